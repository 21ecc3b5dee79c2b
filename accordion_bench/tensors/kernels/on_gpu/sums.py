"""Sums of decoded messages, straight from their bytes into the sum."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.on_gpu.launch import TYPES, launch
from accordion_bench.tensors.kernels.on_gpu.packing import places, slice_size, unpack
from accordion_bench.tensors.kernels.on_gpu.table import BUCKET, CODES, SIZE, N, bucket_of, on_device, rows_on, slices_on
from accordion_bench.tensors.kernels.table import Table
from accordion_bench.tensors.upload import upload


def add_values(
    targets: np.ndarray,
    table: Table,
    scales: Tensor,
    message: Tensor,
    values: np.ndarray,
    like: Tensor,
    divisor: int,
) -> None:
    """target [R, N] += the sum, in order, of scale x values[code] of each sender; then / divisor. One launch.

    Sender a goes to row a mod R. Each product and each sum is rounded once.

    Args:
        targets: addresses of the sums, [R, T].
        table: lengths, buckets, and where the codes are.
        scales: float32 [A, M]; empty = 1.
        message: uint8 [A, B].
        values: what the codes stand for, float32 [K].
        like: a tensor of the type of the sums.
        divisor: of the whole, 1 for a sum.
    """
    there, (R, T), K = message.device, targets.shape, len(values)
    slices = slices_on(table, slice_size(K), there)
    padded = np.resize(values, 256)  # bytes from a stranger may hold codes that do not exist
    launch(
        _add_values,
        (len(slices), R),
        there,
        *(upload(torch.from_numpy(targets), there), T, rows_on(table, there), slices, scales, table.buckets),
        *(message, message.stride(0), len(message), R, on_device(padded.tobytes(), there), float(divisor)),
        COLUMNS=table.rows.shape[1],
        TYPE=TYPES[like.dtype],
        K=K,
        SCALED=scales.numel() > 0,
        DIVIDED=divisor != 1,
    )


@triton.jit
def _add_values(  # type: ignore[no-untyped-def]
    targets, T, rows, slices, scales, M, message, row_bytes, A, R, values, divisor,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, K: tl.constexpr, SCALED: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(1)
    t, begin = tl.load(slices + 2 * tl.program_id(0)), tl.load(slices + 2 * tl.program_id(0) + 1)
    row = rows + t * COLUMNS
    n = tl.load(row + N)
    j, exists = places(K)
    exists = exists & (begin + j < n)
    bucket = tl.load(row + BUCKET) + bucket_of(begin, j, tl.load(row + SIZE))
    target = tl.load(targets + r.to(tl.int64) * T + t).to(tl.pointer_type(TYPE)) + begin + j
    total = tl.load(target, mask=exists, other=0)
    packed = message + tl.load(row + CODES)
    for a in range(r, A, R):
        sender = tl.cast(a, tl.int64)
        codes = unpack(packed + sender * row_bytes, begin, n, K)
        value = tl.load(values + codes, mask=exists, other=0)
        if SCALED:
            value = value * tl.load(scales + sender * M + bucket, mask=exists, other=0)
        total += value.to(TYPE)
    if DIVIDED:
        total = tl.div_rn(total, divisor) if TYPE == tl.float32 else total / divisor
    tl.store(target, total, mask=exists)
