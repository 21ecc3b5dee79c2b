"""Counts the instructions of kernels of dense codes for one GPU, which need not be there; prints them as JSON.

A process of its own, as `to_ptx`. Coordinates begin at multiples of 16 bytes.
"""

import json
import re
from collections import Counter

import numpy as np
import torch
from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from accordion_bench.codecs.rounding import for_kernel
from accordion_bench.tensors.kernels import rounding as kinds
from accordion_bench.tensors.kernels.on_gpu import casts, encode, launch, room
from accordion_bench.tensors.kernels.rounding import Rounding
from accordion_bench.tensors.kernels.table import Table
from tests.device.triton import to_ptx

N = 1 << 20
EACH = 16  # coordinates of a thread
INSTRUCTION = re.compile(r"\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_.]+)\s")
WIDE = {"ld": "ld.global.v4.b32", "st": "st.global.v4.b32"}
CASES = {  # coordinates of a block, rounding, codes, whether scales are made in the same read
    "sign": (N, Rounding(kinds.SIGNS, 2), 2, None),
    "4 bits": (512, for_kernel(to_ptx.levels(15)), 15, None),
    "3 bits": (512, for_kernel(to_ptx.levels(7)), 7, None),
    "e4m3": (1024, Rounding(kinds.E4M3, 256), 256, None),
    "e3m0": (512, Rounding(kinds.E3M0, 16), 16, None),
    "4 bits, measured": (512, for_kernel(to_ptx.levels(15)), 15, encode.Measured("l2", 0.0)),
    "e4m3, measured": (1024, Rounding(kinds.E4M3, 256), 256, encode.Measured("linf", 448.0)),
}


def start(kernel, grid, device, args, constants):
    names = kernel.arg_names
    signature = dict.fromkeys(constants, "constexpr") | dict(zip(names, map(to_ptx.kind_of, args), strict=False))
    values = constants | {n: x for n, x in zip(names, args, strict=False) if signature[n] == "constexpr"}
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]]
        for n, x in zip(names, args, strict=False)
        if isinstance(x, torch.Tensor)
    }
    constants = {(names.index(n),): x for n, x in values.items()}
    source = ASTSource(kernel, {n: signature[n] for n in names}, constants, aligned)
    ptx = compiled(source, target=GPUTarget("cuda", 90, 32), options=to_ptx.OPTIONS).asm["ptx"]
    told = Counter(match[1] for line in ptx.splitlines() if (match := INSTRUCTION.match(line)))
    found.append(
        {
            "case": now[0],
            "kernel": kernel.__name__,
            "wide": told[WIDE["ld"]] + told[WIDE["st"]],
            "divided": sum(count for name, count in told.items() if re.match(r"(div|rem)\.[su]", name)),
            "local": ptx.count(".local"),
            "each": sum(told.values()) / EACH,
        }
    )


def main() -> None:
    """As the module says."""
    x, at, message = torch.zeros(1, N), np.array([[4096]]), torch.zeros(1, 10, dtype=torch.uint8)
    streams, none = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(0, 0)
    for case, (size, rounding, codes, measured) in CASES.items():
        now[:] = [case]
        table = Table([N], [size], 4096, [0], [[4]])
        scales = torch.zeros(1, table.buckets) if size < N else None
        given = None if measured else scales
        room.encode(at, table, given, none if given is None else given, streams, message, x, rounding, measured)
        if not measured:
            own = None if scales is not None else torch.empty(0)
            room.add_values(at, table, own, 1.0, message, [np.zeros(codes, np.float32)], x, 1)
    for case, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        now[:] = [case]
        narrow = torch.zeros(4096, dtype=dtype)
        casts.sum_of_shares([torch.zeros(1, 4096)], Table([4096], [4096], 4096, [0], [[0]]), 1, 1e4, narrow)
        casts.widen(narrow, torch.zeros(4096))


if __name__ == "__main__":
    now, found = [""], []
    launch.start = start
    main()
    print(json.dumps(found))
