"""Compiles every kernel for two GPUs, which need not be there; prints what of its code rounds otherwise than torch.

A process of its own: kernels of the interpreter cannot be compiled.
"""

import json
import re

import numpy as np
import torch
from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from accordion_bench.codecs.index_codes import code_shapes
from accordion_bench.codecs.rounding import for_kernel
from accordion_bench.tensors.kernels import rounding as kinds
from accordion_bench.tensors.kernels.on_gpu import (
    casts,
    encode,
    factors,
    launch,
    orthonormal,
    products,
    room,
    selection,
    sparse,
)
from accordion_bench.tensors.kernels.rounding import Rounding
from accordion_bench.tensors.kernels.table import LONGEST, Table, addresses
from accordion_bench.tensors.permutations import Draws

TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.float16: "*fp16",
}
INEXACT = re.compile(r"fma\.rn\S*\.f32|\S*\.approx\S*|\S*\.ftz\S*|div\.full\S*")

OPTIONS = {"enable_fp_fusion": False}


def kind_of(x: object) -> str:
    """As Triton itself would tell the type of an argument."""
    if isinstance(x, torch.Tensor):
        return TYPES[x.dtype]
    if isinstance(x, float):
        return "fp32"
    return "constexpr" if x == 1 else "i32"


def start(kernel, grid, device, args, constants):
    names, warps = kernel.arg_names, constants.pop("num_warps", 4)
    signature = dict.fromkeys(constants, "constexpr") | dict(zip(names, map(kind_of, args), strict=False))
    values = constants | {n: x for n, x in zip(names, args, strict=False) if signature[n] == "constexpr"}
    source = ASTSource(kernel, {n: signature[n] for n in names}, {(names.index(n),): x for n, x in values.items()})
    for architecture in (80, 90):
        made = compiled(source, target=GPUTarget("cuda", architecture, 32), options=OPTIONS | {"num_warps": warps})
        found.append([kernel.__name__, architecture, INEXACT.findall(made.asm["ptx"])])


def levels(K: int) -> tuple[float, ...]:
    return tuple(np.linspace(-1, 1, K).tolist())


def roundings() -> list[Rounding]:
    """Of every kind and width."""
    return [
        *(for_kernel(levels(K)) for K in (2, 3, 4, 8, 16, 32, 64, 128, 256)),
        for_kernel((-1.0, -0.1, 0.1, 1.0)),
        for_kernel((-1.0, 0.1, 0.2, 1.0)),
        for_kernel((*levels(100)[:50], *(x**2 for x in levels(100)[50:]))),
        *(Rounding(kind, 256) for kind in (kinds.INTEGER, kinds.E4M3, kinds.E5M2)),
        Rounding(kinds.E3M0, 16),
        Rounding(kinds.RANDOM_INTEGER, 256, 24),
        Rounding(kinds.POWERS, 128, 23),
        Rounding(kinds.POWERS, 256, 23),
        Rounding(kinds.SIGNS, 2),
    ]


def main() -> None:
    """As the module says."""
    x, table = torch.zeros(2, LONGEST + 1), Table([LONGEST + 1], [LONGEST + 1], 4096, [0], [[4], [8]])
    at, message, scales = addresses([x]), torch.zeros(2, 10, dtype=torch.uint8), torch.zeros(2, 1)
    for rounding in roundings():
        streams = torch.zeros(2, 1, dtype=torch.int64)
        values = [np.zeros(rounding.K, np.float32)] * (2 if rounding.kind == kinds.POWERS else 1)
        room.encode(at, table, scales, scales, streams, message, x, rounding)
        room.add_values(at, table, None, 0.5, message, values, x, 3)
    room.add_values(at, table, scales, 0.5, message, values, x, 3, scales)
    room.add_values(at, table, None, 0.5, message, values, x.double(), 3)
    for norm in ("l1", "l2", "linf", "sum", "below", "count"):
        room.bucket_norms(at, table, norm, x)
    room.write_headers(scales, table, message)
    room.read_headers(message, table, 0.5)
    factors.factors(scales, 1.5)
    for measured in (encode.Measured("l2", 0.0), encode.Measured("linf", 127.0)):
        own, rounding = Table([4096], [512], 4096, [0], [[4]]), for_kernel(levels(15))
        room.encode(at, own, None, scales[:0], torch.zeros(2, 1, dtype=torch.int64), message, x, rounding, measured)
    for dtype in (torch.float16, torch.bfloat16):
        own, narrow = Table([4096], [4096], 4096, [0], [[0]]), torch.zeros(4096, dtype=dtype)
        casts.sum_of_shares([x], own, 3, 1e4, narrow)
        casts.widen(narrow, torch.zeros(4096))
    for n in (LONGEST, 1 << 31):
        draws, words = Draws([n], [2]), torch.zeros(1, 24, dtype=torch.int32)
        places = room.draw(draws, words)
    for like in (x, x.double()):
        room.gather(at, draws, places, like)
        room.scatter(at, draws, places, at, (1.0,), like)
    n, kept = np.array([LONGEST]), np.array([LONGEST // 10])
    for like, where in ((x, 0), (x, 4), (x.double(), 0)):
        entries = selection.largest(np.full((2, 1), where), (LONGEST,), (LONGEST // 10,), like)
    for few in (kept, n):  # indices with low bits, and a bitmap
        sections = sparse.Sections(n, few, 0 * n, 4 * few, code_shapes(n, few))
        sparse.write_entries(entries, sections, message)
        sparse.add_entries(np.zeros((2, 1), np.int64), sections, message, 0.5, x)
    for rank in (2, 8):
        M_W, L, R = torch.zeros(2, 1, 300, 600), torch.zeros(1, 300, rank), torch.zeros(1, 600, rank)
        products.multiply([M_W, M_W.mT], [R, L])
        batch = products.Batch(M_W, L.mT.expand(2, 1, -1, -1), R.mT.expand(2, 1, -1, -1))
        products.fill([batch])
        products.subtract([batch], 0.5)
    numbers = orthonormal.Numbers(1e-12, 1e-15, 1e-300, 1e-8, torch.zeros(2400, dtype=torch.float64))
    for rank in (2, 8):
        for passes in (1, 2):
            orthonormal.orthonormalise([torch.zeros(1, 300, rank)], passes, numbers)
    orthonormal.renewed([L], [L])


if __name__ == "__main__":
    found: list[list[object]] = []
    launch.start = start
    main()
    print(json.dumps(found))
