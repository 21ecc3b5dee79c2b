"""The float32 of every bucket, in front of its tensor's codes; bytes, since a message may begin anywhere."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.on_gpu.launch import launch
from accordion_bench.tensors.kernels.on_gpu.table import buckets_on
from accordion_bench.tensors.kernels.table import Table

TOGETHER = 256  # buckets of a program


def write_headers(scales: Tensor, table: Table, message: Tensor) -> None:
    """See `DenseKernels.write_headers`. One launch."""
    grid = (triton.cdiv(table.buckets, TOGETHER), len(message))
    there = message.device
    args = (scales, table.buckets, buckets_on(table, there), message, message.stride(0))
    launch(_write_headers, grid, there, *args, TOGETHER=TOGETHER)


def read_headers(message: Tensor, table: Table, alpha: float) -> Tensor:
    """See `DenseKernels.read_headers`. One launch."""
    there = message.device
    scales = torch.empty(len(message), table.buckets, device=there)
    grid = (triton.cdiv(table.buckets, TOGETHER), len(message))
    args = (scales, table.buckets, buckets_on(table, there), message, message.stride(0), float(alpha))
    launch(_read_headers, grid, there, *args, TOGETHER=TOGETHER)
    return scales


@triton.jit
def write_float(out, number, exists):  # type: ignore[no-untyped-def]
    """Float32 numbers at addresses of their first bytes."""
    bits = number.to(tl.uint32, bitcast=True)
    for byte in tl.static_range(4):
        tl.store(out + byte, (bits >> (8 * byte)).to(tl.uint8), mask=exists)


@triton.jit
def read_float(message, exists):  # type: ignore[no-untyped-def]
    """The inverse."""
    bits = tl.load(message, mask=exists, other=0).to(tl.uint32)
    for byte in tl.static_range(1, 4):
        bits |= tl.load(message + byte, mask=exists, other=0).to(tl.uint32) << (8 * byte)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _write_headers(scales, M, at, message, row_bytes, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]
    w = tl.program_id(1).to(tl.int64)
    b = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    scale = tl.load(scales + w * M + b, mask=b < M, other=0)
    write_float(message + w * row_bytes + tl.load(at + b, mask=b < M, other=0), scale, b < M)


@triton.jit
def _read_headers(scales, M, at, message, row_bytes, alpha, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]
    a = tl.program_id(1).to(tl.int64)
    b = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    scale = read_float(message + a * row_bytes + tl.load(at + b, mask=b < M, other=0), b < M)
    tl.store(scales + a * M + b, scale * alpha, mask=b < M)
