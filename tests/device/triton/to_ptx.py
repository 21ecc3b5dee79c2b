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

from accordion_bench.codecs.coding import rounding_to
from accordion_bench.codecs.packed_codes import code_shapes
from accordion_bench.tensors.kernels import dense_kernels as kinds
from accordion_bench.tensors.kernels.dense_kernels import (
    NORMS,
    BlockRule,
    Coordinates,
    Decoding,
    Encoding,
    KernelRounding,
    ResidualInputs,
)
from accordion_bench.tensors.kernels.on_gpu import (
    bins,
    casts,
    drawn,
    encode,
    launch,
    norms,
    orthonormal,
    products,
    selection,
    sparse,
    steps,
    sums,
    thresholds,
    tiles,
)
from accordion_bench.tensors.kernels.on_gpu.residual_inputs import WEIGHTED
from accordion_bench.tensors.kernels.table import LONGEST, Table
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

RULES = [
    BlockRule("scale", ("l2",), factor="levels", top=7.0),
    BlockRule("scale", ("linf",), "largest", 127.0, "inverse"),
    BlockRule("scale", ("l1",), "n"),
    BlockRule("scale", ("l2",), "root n"),
    BlockRule("means", ("sum", "below", "count")),
    BlockRule("largest", ("linf", "l2", "sum"), clip=2.5),
]
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
        inexact = INEXACT.findall(made.asm["ptx"])
        ahead = constants.get("NESTEROV") and not constants["SUMMED"]
        if constants.get("FED") == WEIGHTED.value or ahead:  # a sum with a weight is one operation, as torch's
            inexact = [one for one in inexact if not one.startswith("fma.rn")]
        found.append([kernel.__name__, architecture, inexact])


def levels(K: int) -> tuple[float, ...]:
    return tuple(np.linspace(-1, 1, K).tolist())


def roundings() -> list[KernelRounding]:
    """Of every kind and width."""
    return [
        *(rounding_to(levels(K)) for K in (2, 3, 4, 8, 16, 32, 64, 128, 256)),
        rounding_to((-1.0, -0.1, 0.1, 1.0)),
        rounding_to((-1.0, 0.1, 0.2, 1.0)),
        rounding_to((*levels(100)[:50], *(x**2 for x in levels(100)[50:]))),
        *(KernelRounding(kind, 256) for kind in (kinds.INTEGER, kinds.E4M3, kinds.E5M2)),
        KernelRounding(kinds.E3M0, 16),
        KernelRounding(kinds.RANDOM_INTEGER, 256, 24),
        KernelRounding(kinds.POWERS, 128, 23),
        KernelRounding(kinds.POWERS, 256, 23),
        KernelRounding(kinds.SIGNS, 2),
    ]


def main() -> None:
    """As the module says."""
    x, table = torch.zeros(2, LONGEST + 1), Table([LONGEST + 1], [LONGEST + 1], 4096, [0], [[4], [8]])
    message, scales, none = torch.zeros(2, 10, dtype=torch.uint8), torch.zeros(2, 1), torch.zeros(0)
    streams, book = torch.zeros(2, 1, dtype=torch.int64), np.zeros(256, np.float32)
    plain, small = Coordinates([x]), Table([4096], [512], 4096, [0], [[4]])
    fed = [ResidualInputs([x]), ResidualInputs([x], 0.1, decay=0.5), ResidualInputs([x], rates=[x[0, 0]], masks=[x[0]])]
    led = ResidualInputs([x], 0.1, momenta=[x[0]], momentum=0.9)
    for number, rounding in enumerate(roundings()):
        values = [book[: rounding.K]] * (2 if rounding.kind == kinds.POWERS else 1)
        encoding = Encoding(rounding, scales, scales, streams)
        encode.encode(plain, table, message, encoding)
        fed_one, middles = Coordinates([x], fed[number % len(fed)]), scales if rounding.K == 2 else None
        encode.encode(fed_one, table, message, encoding._replace(values=values, middles=middles))
        sums.add_values(plain, table, message, Decoding(values, None, 0.5, divisor=3))
    signs = [book[:2]]
    sums.add_values(plain, table, message, Decoding(signs, scales, 0.5, scales, 3))
    sums.add_values(Coordinates([x.double()]), table, message, Decoding(signs, None, 0.5, divisor=3))
    columns = Table([LONGEST + 1] * 2, [27, 64], 4096, [0] * 2, [[4] * 2])
    sums.add_values(Coordinates([x, x]), columns, message, Decoding(signs, None, 0.5, scales))
    for kind in (*NORMS, NORMS):
        for own in (None, *fed):
            norms.bucket_norms(Coordinates([x], own), table, [kind] if isinstance(kind, str) else kind)
    for rule in RULES:
        for of in (table, small):
            norms.block_numbers(plain, of, rule)
    encode.encode(Coordinates([x], led), table, message, Encoding(roundings()[-1], scales, none, streams, values=signs))
    norms.bucket_norms(Coordinates([x], led), table, ["l2"])
    for nesterov in (False, True):
        for sums_W in ((), [x]):
            steps.add([x], [x], 0.9, nesterov, sums_W)
    steps.take([x[0]], [x[0]], [x[0]], [x[0, 0]])
    sums.write_headers(scales, table, message)
    sums.read_headers(message, table, 0.5)
    norms.factors(scales, BlockRule("scale", (), factor="levels", top=1.5))
    rounding = rounding_to(levels(15))
    for measured in RULES[:2]:
        for own in (None, *fed):
            values = [book[:15]] if own else []
            encoding = Encoding(rounding, None, none, streams, measured, values)
            encode.encode(Coordinates([x], own), small, message, encoding)
    for dtype in (torch.float16, torch.bfloat16):
        own, narrow = Table([4096], [4096], 4096, [0], [[0]]), torch.zeros(4096, dtype=dtype)
        casts.sum_of_shares([x], own, 3, 1e4, narrow)
        casts.widen(narrow, torch.zeros(4096))
    for n in (LONGEST, 1 << 31):
        draws, words = Draws([n], [2]), torch.zeros(1, 24, dtype=torch.int32)
        places = drawn.draw(draws, words)
    for like in (plain, Coordinates([x.double()])):
        drawn.gather(like, draws, places)
        drawn.scatter(like, draws, places, like, (1.0,))
    n, kept = np.array([LONGEST]), np.array([LONGEST // 10])
    for like, where in ((x, 0), (x, 4), (x.double(), 0)):
        entries = selection.largest(np.full((2, 1), where), (LONGEST,), (LONGEST // 10,), like)
    for signs in (False, True):
        for few in (kept, n):  # indices with low bits, and a bitmap
            sections = sparse.Sections(n, few, (0 * n, 4 * few), code_shapes((1 + signs) * n, few), signs)
            on = sparse.tables_on(sections, x.device)
            sparse.write_entries(entries, on, message)
            sparse.add_entries(np.zeros((2, 1), np.int64), on, message, 0.5, x)
    sparse.write_heads(torch.zeros(1), on, message[0])
    wanted = [thresholds.WantedEntries(LONGEST // 10, LONGEST // 10, 0, 2, range(3, LONGEST, 101), 2)]
    reached = thresholds.from_thresholds(entries, np.zeros((2, 1), np.int64), wanted, (LONGEST // 10,), x)
    thresholds.entries_of(reached, LONGEST // 10)
    for like in (x.expand(2, -1), x.double()):
        thresholds.entries_of(thresholds.not_zero([like], np.zeros((2, 1), np.int64)), LONGEST)
        bins.send_lifted([like] * 2, [like] * 2, [50, 500])
    each = [tiles.TileShape(64 * m, m, 64, b, 40, 12, m == 147, 0, 9, 99) for m, b in ((128, 64), (147, 49), (3, 3))]
    on = tiles.tables_on(tuple(each), x.device)
    for like in (x, x.double()):
        tiles.largest(np.zeros((2, 3), np.int64), on, like)
        tiles.add(np.zeros((2, 3), np.int64), on, message, 0.5, like)
    for rank in (2, 8):
        M_W, L, R = torch.zeros(2, 1, 300, 600), torch.zeros(1, 300, rank), torch.zeros(1, 600, rank)
        products.multiply([M_W, M_W.mT], [R, L])
        products.multiply([M_W, M_W.mT], [R, L], [[M_W[:, 0]], [M_W[:, 0].mT]])
        batch = products.ProductBatch(M_W, L.mT.expand(2, 1, -1, -1), R.mT.expand(2, 1, -1, -1))
        products.fill([batch])
        products.subtract([batch], 0.5)
    numbers = orthonormal.Numbers(1e-12, 1e-15, 1e-300, 1e-8, torch.zeros(2400, dtype=torch.float64))
    for rank in (2, 8):
        for passes in (1, 2):
            orthonormal.orthonormalise([torch.zeros(1, 300, rank)], passes, numbers)
    orthonormal.replace_degenerate([L], [L])


if __name__ == "__main__":
    found: list[list[object]] = []
    launch.start = start
    main()
    print(json.dumps(found))
