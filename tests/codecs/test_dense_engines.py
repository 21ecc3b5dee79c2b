"""Dense codes by every engine are those of the reference."""

import math
from dataclasses import replace
from typing import NamedTuple, Self

import numpy as np
import pytest
import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Feedback, NonFiniteRow, Target
from accordion_bench.codecs.coding import LARGEST, LEVELS, MEANS, SIGNS, BlockNumbers, Coding, to_levels
from accordion_bench.codecs.engine import Engine
from accordion_bench.codecs.layout import Layout, Message
from accordion_bench.compressors import number_formats
from accordion_bench.compressors.dense import dense_layout
from accordion_bench.compressors.quantiser import exponential, uniform
from accordion_bench.conformance.pretend_device import Pretend
from accordion_bench.tensors.kernels.dense_kernels import BlockRule
from accordion_bench.tensors.kernels.table import LONGEST
from tests.codecs.conftest import There
from tests.codecs.kit import LAID, LENGTHS, SHORT, any_numbers, apart, bucket_of, ulps, whole_numbers
from tests.kit.gpu import THERE

REFERENCE = Engine()
SCALES = [("linf", "norm"), ("l1", "mean"), ("l2", "root mean")]
NORMS = ["l1", "l2", "linf", "sum", "below", "count"]
SIZES = {"1": 1, "512": 512, "1000": 1000, "whole": None, "longer": 30_000}
ANY = (-1.0, -0.7, 0.1, 0.2, 0.9, 1.0)
LARGER = (*np.linspace(-1, 0, 50).tolist(), *np.linspace(0.001, 1, 50).tolist())
CODINGS = {
    "sign": Coding("sign", SIGNS),
    "sign, mean": Coding("sign", SIGNS, "l1", "mean"),
    "sign, root mean": Coding("sign", SIGNS, "l2", "root mean"),
    "sign, means": Coding("sign", SIGNS, "means"),
    **{f"{bits} bits": to_levels(uniform(bits, False), "l2", "s") for bits in range(2, 9)},
    "zero level": to_levels(uniform(3, True), "linf", "s"),
    "two levels": to_levels((-1.0, 1.0), "linf", "s"),
    "ternary": to_levels((-1.0, 0.0, 1.0), "l2", "s"),
    "ternary, shared": to_levels((-1.0, 0.0, 1.0), stream="s"),
    "symmetric": to_levels(exponential(4, False), "l2", "s"),
    "symmetric, 7 bits": to_levels(exponential(7, False, 0.9), "linf", "s"),
    "symmetric, zero level": to_levels(exponential(3, True), "l2", "s"),
    "any levels": to_levels(ANY, "l2", "s"),
    "any of 100 levels": to_levels(LARGER, "linf", "s"),
    **{kind: number_formats.coding_of(kind, False) for kind in ("e4m3", "e5m2", "int8")},
    "int8 at random": number_formats.coding_of("int8", True),
    "e3m0": number_formats.FP4_CODING,
    "power": number_formats.powers_of_two(8),
    "power, 7 bits": number_formats.powers_of_two(7),
}
every_coding = pytest.mark.parametrize("coding", CODINGS.values(), ids=list(CODINGS))
every_size = pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))


class Dense(NamedTuple):
    """Messages of a coding, with blocks of a size; None = whole tensors."""

    coding: Coding
    lengths: tuple[int, ...]
    size: int | None

    @classmethod
    def of(cls, coding: Coding, lengths: tuple[int, ...], size: int | None) -> Self:
        """Scales are shared by workers where messages of levels have none: of whole tensors that are not empty."""
        if coding.rounding == LEVELS and not coding.norm:
            return cls(coding, tuple(filter(None, lengths)), None)
        return cls(coding, lengths, size)

    def layout(self) -> Layout:
        blocks = tuple(max(1, self.size or n) for n in self.lengths)
        return dense_layout(self.lengths, blocks, (self.coding.kinds,) * len(self.lengths), self.coding.fields)

    def shared(self) -> Tensor | None:
        known = self.coding.rounding == LEVELS and not self.coding.norm
        return torch.linspace(0.1, 1.0, len(self.lengths)) if known else None

    def bytes_by(self, there: There, rows_W: list[Tensor]) -> Tensor:
        """Of messages of rows that are there."""
        message = Message.empty(self.layout(), len(rows_W[0]), there.device)
        shared = there.to(self.shared())
        there.engine.encode_dense(bucket_of(rows_W), message, self.coding, shared)
        return message.rows.cpu()

    def add_by(
        self, there: There, sums_R: list[Tensor], bytes_S: Tensor, factors: tuple[float, int], empty: bool = False
    ) -> list[Tensor]:
        """Sums, given the messages of all senders, alpha and divisor; in place of what an `empty` target holds."""
        target = Target([there.to(x_R.clone()) for x_R in sums_R], *factors, empty=empty)
        message = Message(there.to(bytes_S), [self.layout()] * len(bytes_S))
        there.engine.add_dense(target, message, self.coding, there.to(self.shared()))
        return [x_R.cpu() for x_R in target.rows_R]


HERE = There(REFERENCE, torch.device("cpu"))


def by(there: There, lengths, size, kind, rows_W) -> Tensor:
    layout = Layout(lengths, [max(1, n if size is None else size) for n in lengths], {})
    return there.engine.norms(bucket_of(there.to(rows_W)), layout, kind)[0].cpu()


RULES = {
    **{f"{scale} of {norm}": Coding("sign", SIGNS, norm, scale).rule for norm, scale in SCALES},
    "levels": to_levels(uniform(3, True), "l2").rule,
    "largest code": number_formats.coding_of("e4m3", False).rule,
    "largest code of 1": number_formats.FP4_CODING.rule,
    "means": MEANS,
    "largest": LARGEST,
    "clipped": BlockRule("largest", ("linf", "l2", "sum"), clip=1.5),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))

# ---- the properties


def norms_are_equal(there, kind, size, lengths):
    """To the bit where sums have no rounding, else within 2 ulp of float32; long blocks, too, are cut."""
    for dtype in (torch.float32, torch.float64):
        rows_W = whole_numbers(lengths, 3, dtype)
        found, expected = by(there, lengths, size, kind, rows_W), by(HERE, lengths, size, kind, rows_W)
        assert found.dtype == torch.float64 and torch.equal(found, expected)
    rows_W = [x_W.abs() if kind == "sum" else x_W for x_W in any_numbers(lengths, 2)]
    assert ulps(by(there, lengths, size, kind, rows_W), by(HERE, lengths, size, kind, rows_W)) <= 2


def numbers_are_equal(there, rule, size, lengths):
    """To the bit where sums have no rounding; of tensors of zeros, of equal numbers and of tiny ones, too."""
    special = [torch.zeros(3, 9), torch.full((3, 5), 0.25), torch.full((3, 3), 2.0**-149), torch.tensor([[1.0]] * 3)]
    rows_W = [*whole_numbers(lengths, 3), *special]
    numels = [x_W.shape[1] for x_W in rows_W]
    layout = Layout(numels, [max(1, n if size is None else size) for n in numels], {})
    found = there.engine.numbers(bucket_of(there.to(rows_W)), layout, rule)
    expected = REFERENCE.numbers(bucket_of(rows_W), layout, rule)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32 and ours.cpu().view(torch.int32).equal(theirs.view(torch.int32))


def messages_are_equal(there, dense, dtype, laid):
    rows_W = whole_numbers(dense.lengths, 3, dtype)
    assert dense.bytes_by(there, laid(there.to(rows_W))).equal(dense.bytes_by(HERE, rows_W))


def codes_are_equal_for_the_same_scales(there, dense, dtype):
    """Of any numbers."""
    coding, layout = dense.coding, dense.layout()
    if coding.norm == "means":
        return  # codes do not depend on them
    rows_W, shared = any_numbers(dense.lengths, 3, dtype), dense.shared()
    numbers = BlockNumbers()
    if coding.norm:
        numbers = BlockNumbers(*REFERENCE.numbers(bucket_of(rows_W), layout, coding.rule))
    elif shared is not None:
        numbers = BlockNumbers(factors=REFERENCE.factors(coding.rule, shared[None]))
    found = []
    for one in (there, HERE):
        message, given = Message.empty(layout, 3, one.device), BlockNumbers(*map(one.to, numbers))
        one.engine.encode(bucket_of(one.to(rows_W)), message, coding, given)
        found.append(message.rows.cpu())
    assert found[0].equal(found[1])


def sums_are_equal(there, dense, dtype, senders):
    """To the bit: each product and each sum is rounded once, in the order of the senders."""
    bytes_S = dense.bytes_by(HERE, any_numbers(dense.lengths, senders))
    for rows in {1, senders}:
        sums_R = whole_numbers(dense.lengths, rows, dtype, seed=3)
        for factors in ((1.0, senders), (-1.0, 1), (-0.3, 7)):
            found = dense.add_by(there, sums_R, bytes_S, factors)
            expected = dense.add_by(HERE, sums_R, bytes_S, factors)
            assert all(map(torch.equal, found, expected)), (rows, *factors)
        empty_targets_are_as_zeros(there, dense, sums_R, bytes_S)


def empty_targets_are_as_zeros(there, dense, sums_R, bytes_S):
    """Whatever an empty target holds is written over, as if it were zeros."""
    zeros_R = [torch.zeros_like(x_R) for x_R in sums_R]
    held_R = [torch.full_like(x_R, math.nan) for x_R in sums_R]
    found = dense.add_by(there, held_R, bytes_S, (-0.3, 7), empty=True)
    for x_R, y_R in zip(found, dense.add_by(there, zeros_R, bytes_S, (-0.3, 7)), strict=True):
        torch.testing.assert_close(x_R, y_R, rtol=0, atol=0, equal_nan=True)


def residuals_hold_what_is_lost(there, dense, scale, **more):
    """Messages and residuals are those of the reference, to the bit, and what is sent and kept is what there was."""
    rows_W, residuals_W = (whole_numbers(dense.lengths, 3, seed=seed) for seed in (1, 2))
    found = []
    for one in (there, HERE):
        own_W = [one.to(e_W.clone()) for e_W in residuals_W]
        scales = [one.to(scale) if isinstance(scale, Tensor) else scale] * len(own_W)
        masks, momenta = (one.to(more.get(key, [])) for key in ("masks", "momenta"))
        feedback = Feedback(own_W, scales, more.get("decay", 1.0), masks, momenta, more.get("momentum", 0.0))
        bucket = replace(bucket_of(one.to(rows_W)), feedback=feedback)
        message = Message.empty(dense.layout(), 3, one.device)
        one.engine.encode_dense(bucket, message, dense.coding, one.to(dense.shared()))
        found.append([message.rows.cpu(), *(e_W.cpu() for e_W in own_W)])
    assert all(map(torch.equal, *found))
    formed = [x_W * scale + e_W * more.get("decay", 1.0) for x_W, e_W in zip(rows_W, residuals_W, strict=True)]
    if momenta := more.get("momenta"):
        formed = [p_W + u * more["momentum"] for p_W, u in zip(formed, momenta, strict=True)]
    assert dense.bytes_by(HERE, formed).equal(found[0][0])
    lost = dense.add_by(HERE, formed, found[0][0], (-1.0, 1))
    expected = [x_W * mask for x_W, mask in zip(lost, more.get("masks") or [1] * len(lost), strict=True)]
    assert all(map(torch.equal, found[0][1:], expected))


def scales_are_read_as_written(there):
    layout = Dense.of(CODINGS["e4m3"], SHORT, 8).layout()
    numbers_S = torch.randn(3, len(layout.entries))
    message = Message(there.to(torch.zeros(3, layout.nbytes, dtype=torch.uint8)), [layout] * 3)
    there.engine.write(message, "scales", there.to(numbers_S))
    assert there.engine.read(message, "scales").cpu().equal(numbers_S)
    assert REFERENCE.read(Message(message.rows.cpu(), [layout] * 3), "scales").equal(numbers_S)


def what_is_not_finite_is_told(there, coding, bad):
    """By the right row where the engine looks; else it shows in the sum."""
    lengths = (9, 300, 40)
    rows_W, dense = any_numbers(lengths, 3), Dense.of(coding, lengths, 100)
    rows_W[1][2, 207] = bad
    if there.engine.checks_input:
        with pytest.raises(NonFiniteRow) as caught:
            dense.bytes_by(there, rows_W)
        assert caught.value.row == 2 * len(lengths) + 1
    elif coding.norm and coding.norm != "means":
        zeros = [torch.zeros(3, n) for n in lengths]
        bytes_W = dense.bytes_by(there, there.to(rows_W))
        empty_targets_are_as_zeros(there, dense, zeros, bytes_W)
        sums_R = dense.add_by(there, zeros, bytes_W, (1.0, 1))
        finite = torch.stack([x_R.isfinite().all(1) for x_R in sums_R])
        assert (~finite).nonzero().tolist() == [[1, 2]]


# ---- by numba, and by torch on a device


@pytest.mark.parametrize("kind", NORMS)
@every_size
def test_norms(numba, kind, size):
    norms_are_equal(numba, kind, size, LENGTHS)


@every_rule
@every_size
def test_numbers_of_blocks(there, rule, size):
    numbers_are_equal(there, rule, size, LENGTHS)


@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_blocks_of_several_pieces(numba, kind):
    norms_are_equal(numba, kind, LONGEST + 4000, (LONGEST + 5000, 7))


@pytest.mark.sample(6)
@every_size
@every_coding
def test_messages_and_sums(numba, coding, size):
    dense = Dense.of(coding, LENGTHS, size)
    for dtype in (torch.float32, torch.float64):
        messages_are_equal(numba, dense, dtype, apart)
        codes_are_equal_for_the_same_scales(numba, dense, dtype)
    for senders, dtype in ((1, torch.float64), (2, torch.float32), (3, torch.float32), (4, torch.float64)):
        sums_are_equal(numba, dense, dtype, senders)


@pytest.mark.sample(2)
@every_coding
def test_messages_and_sums_on_a_device(device, coding):
    dense = Dense.of(coding, SHORT, 8)
    messages_are_equal(device, dense, torch.float32, apart)
    sums_are_equal(device, dense, torch.float32, 3)


@pytest.mark.parametrize("laid", LAID[1:])
@every_coding
def test_messages_of_tensors_that_are_strided(numba, coding, laid):
    messages_are_equal(numba, Dense.of(coding, LENGTHS, 512), torch.float32, laid)


def test_scales_are_read_as_written(there):
    scales_are_read_as_written(there)


FED = {  # scale, and the rest of a `Feedback`
    "as it is": (1.0, {}),
    "weighted": (0.5, {"decay": 0.25}),
    "led": (0.5, {"momenta": [x_W[0] for x_W in whole_numbers((7, 0, 2600), 1, seed=4)], "momentum": 0.25}),
    "at a rate": (torch.tensor(0.3), {"masks": [torch.arange(n) % 3 != 0 for n in (7, 0, 2600)]}),
}


def of_lengths(more, lengths):
    """The rest of a `Feedback` of tensors of these lengths."""
    return {
        key: [x.float() for x in own if len(x) in lengths] if isinstance(own, list) else own
        for key, own in more.items()
    }


@pytest.mark.parametrize("size", [8, 27, 512, None])
@pytest.mark.parametrize("name", ["sign", "sign, means", "4 bits", "ternary, shared", "e4m3"])
def test_residuals_hold_what_is_lost(there, name, size):
    for scale, more in FED.values():
        dense = Dense.of(CODINGS[name], (7, 0, 2600), size)
        residuals_hold_what_is_lost(there, dense, scale, **of_lengths(more, dense.lengths))


@every_coding
@pytest.mark.parametrize("bad", [math.nan, -math.inf], ids=str)
def test_what_is_not_finite(there, coding, bad):
    if coding == CODINGS["ternary, shared"]:
        pytest.skip("who shares scales has looked at the largest magnitudes")
    what_is_not_finite_is_told(there, coding, bad)


@every_coding
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_what_is_not_finite_is_refused_by_the_reference(coding, bad):
    what_is_not_finite_is_told(HERE, coding, bad)


@every_coding
def test_empty_targets_by_the_reference(coding):
    for lengths, size in ((LENGTHS, 512), (SHORT, 8)):
        dense = Dense.of(coding, lengths, size)
        for senders in (1, 3):
            bytes_S = dense.bytes_by(HERE, any_numbers(dense.lengths, senders))
            for rows in {1, senders}:
                empty_targets_are_as_zeros(HERE, dense, whole_numbers(dense.lengths, rows, seed=3), bytes_S)


@every_coding
def test_threads_change_nothing(coding, monkeypatch):
    """Messages and sums are equal bit for bit, however small the threads' shares; norms are rounded, too."""
    pytest.importorskip("numba")
    from accordion_bench.codecs.on_cpu import OnCpu
    from accordion_bench.tensors.kernels import table

    monkeypatch.setattr(table, "LEAST_TILES", 1)
    there, dense, before, found = (
        There(OnCpu(), torch.device("cpu")),
        Dense.of(coding, (100_055, 40, 4097), 512),
        torch.get_num_threads(),
        [],
    )
    rows_W = [x_W.sin() for x_W in whole_numbers(dense.lengths, 3)]
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            bytes_W = dense.bytes_by(there, rows_W)
            found.append(
                [bytes_W, *dense.add_by(there, [torch.full((1, n), 0.1) for n in dense.lengths], bytes_W, (1.0, 3))]
            )
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


# ---- by Triton, whose interpreter is slow


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("size", [13, 333, None], ids=str)
def test_norms_by_triton(triton, kind, size):
    norms_are_equal(triton, kind, size, (7, 0, 350))


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", [13, 333, None], ids=str)
@every_rule
def test_numbers_of_blocks_by_triton(triton, rule, size):
    numbers_are_equal(triton, rule, size, (7, 0, 350))


@pytest.mark.sample(3)
@every_rule
def test_numbers_of_blocks_of_several_pieces_by_triton(triton, rule):
    numbers_are_equal(triton, rule, LONGEST + 4000, (LONGEST + 5000, 7))


def equal_by_triton(triton, coding, lengths):
    dense = Dense.of(coding, lengths, [100, 371, None][len(coding.values) % 3])
    messages_are_equal(triton, dense, torch.float64, LAID[1])
    codes_are_equal_for_the_same_scales(triton, dense, torch.float32)
    sums_are_equal(triton, dense, torch.float32, 3)


@pytest.mark.sample(5)
@every_coding
def test_messages_and_sums_by_triton(triton, coding):
    equal_by_triton(triton, coding, (7, 0, 130))


MEASURED = ["2 bits", "3 bits", "4 bits", "zero level", "symmetric", "any levels", "e4m3", "int8 at random", "e3m0"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", [8, 512, 2048])
@pytest.mark.parametrize("name", MEASURED)
def test_scales_of_small_blocks_are_made_with_their_codes_by_triton(triton, name, size):
    dense = Dense.of(CODINGS[name], (7, 0, 2600), size)
    messages_are_equal(triton, dense, torch.float32, LAID[0])
    rows_W = [torch.zeros(2, 700), torch.full((2, 40), 1e-45), torch.full((2, 9), 1e18)]
    dense = Dense.of(CODINGS[name], (700, 40, 9), size)
    assert dense.bytes_by(triton, triton.to(rows_W)).equal(dense.bytes_by(HERE, rows_W))


@pytest.mark.sample(7)
@pytest.mark.parametrize("fed", FED)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, None) for name in ("sign", "sign, mean", "sign, means", "power, 7 bits", "int8 at random")),
        *((name, 512) for name in ("4 bits", "symmetric", "e4m3", "e3m0")),
        ("sign, means", 27),
        ("ternary", 100),
        ("ternary, shared", None),
    ],
)
def test_residuals_hold_what_is_lost_by_triton(triton, name, size, fed):
    """As they are read: no other kernel touches them."""
    scale, more = FED[fed]
    dense = Dense.of(CODINGS[name], (7, 0, 2600), size)
    counts = Pretend.counts.launches
    counts.clear()
    residuals_hold_what_is_lost(triton, dense, scale, **of_lengths(more, dense.lengths))
    assert THERE or name == "ternary, shared" or not any("foreach" in launch for launch in counts), counts


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", [513, 12, 1024])
def test_where_blocks_end_within_groups_by_triton(triton, size):
    dense = Dense.of(CODINGS["e4m3"], (7, 2600), size)
    messages_are_equal(triton, dense, torch.float32, LAID[2])
    sums_are_equal(triton, dense, torch.float32, 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "size", "n"), [("ternary", 1283, 3900), ("sign, means", 2051, 4200), ("ternary", 8192, 9700)]
)
def test_slices_of_two_blocks_by_triton(triton, name, size, n):
    """Blocks that end within a group are at least as long as a slice: it reads and writes at most two scales."""
    dense = Dense.of(CODINGS[name], (7, n), size)
    messages_are_equal(triton, dense, torch.float32, LAID[2])
    sums_are_equal(triton, dense, torch.float32, 2)
    residuals_hold_what_is_lost(triton, dense, 1.0)


@pytest.mark.sample(5)
@pytest.mark.parametrize("size", [1024, 2048, 4096, None])
@pytest.mark.parametrize("name", ["int8 at random", "e4m3", "power"])
def test_codes_of_one_byte_by_triton(triton, name, size):
    """Four at once in full slices whose bytes are aligned, one by one elsewhere; a slice of one, two or more scales."""
    dense = Dense.of(CODINGS[name], (2048, 2051, 4300), size)
    messages_are_equal(triton, dense, torch.float32, LAID[2])
    codes_are_equal_for_the_same_scales(triton, dense, torch.float32)
    sums_are_equal(triton, dense, torch.float32, 2)
    residuals_hold_what_is_lost(triton, dense, 1.0)


@pytest.mark.slow
@every_coding
def test_messages_and_sums_of_long_tensors_by_triton(triton, coding):
    equal_by_triton(triton, coding, LENGTHS)


def test_scales_are_read_as_written_by_triton(triton):
    scales_are_read_as_written(triton)


@pytest.mark.sample(3)
@pytest.mark.parametrize("bad", [math.nan, -math.inf], ids=str)
@pytest.mark.parametrize("name", ["sign, mean", "4 bits", "ternary", "int8 at random"])
def test_what_is_not_finite_shows_by_triton(triton, name, bad):
    what_is_not_finite_is_told(triton, CODINGS[name], bad)


def test_tensors_without_coordinates_by_triton(triton):
    dense = Dense.of(CODINGS["4 bits"], (0, 0), 512)
    assert dense.bytes_by(triton, triton.to([torch.zeros(2, 0)] * 2)).shape == (2, 0)
    for empty in (False, True):
        assert dense.add_by(triton, [torch.zeros(1, 0)] * 2, torch.zeros(2, 0, dtype=torch.uint8), (1.0, 2), empty)
