"""Count instructions of kernels in PTX for one GPU, which need not be present; print them as JSON.

Runs in a process of its own, as `to_ptx`. Tensors are aligned to 16 bytes. The body of a loop counts once.
"""

import json
import re
from collections import Counter

import numpy as np
import torch
from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from accordion_bench.codecs.coding import rounding_to
from accordion_bench.tensors.kernels import dense_kernels as kinds
from accordion_bench.tensors.kernels.dense_kernels import (
    BlockRule,
    Coordinates,
    Decoding,
    Encoding,
    KernelRounding,
    ResidualInputs,
)
from accordion_bench.tensors.kernels.on_gpu import casts, drawn, encode, launch, norms, steps, sums, tiles
from accordion_bench.tensors.kernels.on_gpu.packing import slice_size
from accordion_bench.tensors.kernels.table import Table
from accordion_bench.tensors.permutations import SIZE, Draws
from tests.device.triton import to_ptx

N = 1 << 20
THREADS = 128  # of a program
EACH = slice_size(2) // THREADS  # coordinates of a thread, where nothing else is said
OF_KERNELS = {"_choose": tiles.WIDEST // THREADS, "_add_tiles": tiles.LANES // THREADS}
OF_KERNELS |= dict.fromkeys(["_draw", "_gather", "_scatter"], SIZE // THREADS)
INSTRUCTION = re.compile(r"\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_.]+)\s")
WIDE = {"ld": "ld.global.v4.b32", "st": "st.global.v4.b32"}
OF_BLOCKS = {"_join_pieces", "_write_headers", "_read_headers"}  # kernels that read no coordinate
SIGNS, QSGD = KernelRounding(kinds.SIGNS, 2), rounding_to(to_ptx.levels(15))
E4M3, E3M0 = KernelRounding(kinds.E4M3, 256), KernelRounding(kinds.E3M0, 16)
TO_LEVELS = BlockRule("scale", ("l2",), factor="levels", top=7.0)
TO_E4M3 = BlockRule("scale", ("linf",), "largest", 448.0, "inverse")
TO_INT8 = BlockRule("scale", ("linf",), "largest", 127.0, "inverse")
INT8, POWERS = KernelRounding(kinds.RANDOM_INTEGER, 256, 24), KernelRounding(kinds.POWERS, 256, 23)
TERNARY = rounding_to((-1.0, 0.0, 1.0))
CASES = {  # coordinates of a block, rounding, whether scales are made in the same read
    "sign": (N, SIGNS, None),
    "4 bits": (512, QSGD, None),
    "3 bits": (512, rounding_to(to_ptx.levels(7)), None),
    "e4m3": (1024, E4M3, None),
    "e3m0": (512, E3M0, None),
    "4 bits, measured": (512, QSGD, TO_LEVELS),
    "e4m3, measured": (1024, E4M3, TO_E4M3),
    "int8": (1024, INT8, None),
    "int8, measured": (1024, INT8, TO_INT8),
    "powers": (N, POWERS, None),
    "ternary": (8192, TERNARY, None),
    "ternary, shared": (N, TERNARY, None),
}
BOOKS = {"int8": sums.INTEGERS, "powers": sums.POWERS}
FED = {  # the same, of coordinates to which residuals are added
    "sign, fed": (N, SIGNS, None, "l1"),
    "sign, fed at a rate, masked": (N, SIGNS, None, "l2"),
    "sign, led, masked": (N, SIGNS, None, "l2"),
    "4 bits, measured, fed": (512, QSGD, TO_LEVELS, None),
    "e4m3, measured, fed": (1024, E4M3, TO_E4M3, None),
}


def start(kernel, grid, device, args, constants):
    if kernel.__name__ in OF_BLOCKS:
        return
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
    own = OF_KERNELS.get(kernel.__name__, slice_size(3) // THREADS if "ternary" in now[0] else EACH)
    found.append(
        {
            "case": now[0],
            "kernel": kernel.__name__,
            "wide": told[WIDE["ld"]] + told[WIDE["st"]],
            "divided": sum(count for name, count in told.items() if re.match(r"(div|rem)\.[su]", name)),
            "local": ptx.count(".local"),
            "each": sum(told.values()) / own,
        }
    )


def main() -> None:
    """As the module says."""
    x, message, none = on(torch.zeros(1, N)), torch.zeros(1, 10, dtype=torch.uint8), torch.zeros(0, 0)
    streams = torch.zeros(1, 1, dtype=torch.int64)
    for case, (size, rounding, measured) in CASES.items():
        now[:] = [case]
        table = Table([N], [size], 4096, [0], [[4], [8]])
        scales = torch.zeros(1, table.buckets) if size < N else None
        given, shared = None if measured else scales, torch.zeros(1, 1) if "shared" in case else none
        encoding = Encoding(rounding, given, shared if given is None else given, streams, measured)
        encode.encode(Coordinates([x]), table, message, encoding)
        if not measured:
            own, books = None if scales is not None else shared, [BOOKS.get(case, np.zeros(rounding.K, np.float32))]
            books += [np.zeros(2, np.float32)] if rounding.kind == kinds.POWERS else []
            sums.add_values(Coordinates([x]), table, message, Decoding(books, own))
    for case, (size, rounding, measured, norm) in FED.items():
        now[:] = [case]
        table, rates = Table([N], [size], 4096, [0], [[4]]), [x[0, 0]] if "rate" in case else ()
        masks, momenta = ([x[0]] if word in case else () for word in ("masked", "led"))
        weight, momentum = (0.1, 0.9) if momenta else (1.0, 0.0)
        own = Coordinates([x], ResidualInputs([x], weight, rates, masks=masks, momenta=momenta, momentum=momentum))
        scales = None if measured else torch.zeros(1, table.buckets)
        values = [np.zeros(rounding.K, np.float32)]
        encode.encode(own, table, message, Encoding(rounding, scales, none, streams, measured, values))
        if norm:
            norms.bucket_norms(own, table, [norm])
    for case, kinds_of in (("1-bit SGD", ("sum", "below", "count")), ("TernGrad", ("linf", "l2", "sum"))):
        now[:] = [case]
        norms.bucket_norms(Coordinates([x]), Table([N], [N], 4096, [0], [[4]]), kinds_of)
    now[:] = ["columns"]  # of different lengths
    table = Table([N, N], [27, 64], 4096, [0, 0], [[4, 4]])
    scales = torch.zeros(1, table.buckets)
    encode.encode(Coordinates([x, x]), table, message, Encoding(SIGNS, scales, none, streams))
    sums.add_values(Coordinates([x, x]), table, message, Decoding([np.zeros(2, np.float32)], None, 1.0, scales))
    for case, nesterov, given in (
        ("momentum", False, ()),
        ("momentum, ahead", True, ()),
        ("momentum and sums", True, [x]),
    ):
        now[:] = [case]
        steps.add([x], [x], 0.9, nesterov, given)
    now[:] = ["steps"]
    steps.take([x[0]], [x[0]], [x[0]], [x[0, 0]])
    now[:] = ["RandomK"]
    draws = Draws([N], [N // 10])
    places = drawn.draw(draws, torch.zeros(1, 24, dtype=torch.int32))
    drawn.scatter(Coordinates([x]), draws, places, Coordinates([drawn.gather(Coordinates([x]), draws, places)]), (1.0,))
    now[:] = ["tiles"]
    tables = tiles.tables_on((tiles.TileShape(N, 1024, 64, 64, 410, 12, False, 0, 4 * 410 * 256, 0),), x.device)
    tiles.largest(np.zeros((1, 1), np.int64), tables, x)
    tiles.add(np.zeros((1, 1), np.int64), tables, message, 1.0, x)
    for case, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        now[:] = [case]
        narrow = torch.zeros(4096, dtype=dtype)
        casts.sum_of_shares([torch.zeros(1, 4096)], Table([4096], [4096], 4096, [0], [[0]]), 1, 1e4, narrow)
        casts.widen(narrow, torch.zeros(4096))


def on(x: torch.Tensor) -> torch.Tensor:
    """A tensor that begins at a multiple of 16 bytes."""
    assert x.data_ptr() % 16 == 0
    return x


if __name__ == "__main__":
    now, found = [""], []
    launch.start = start
    main()
    print(json.dumps(found))
