"""Places, tiles and factors by every engine are those of the reference; dense and sparse codes have modules."""

import inspect
import math
from pathlib import Path

import pytest
import torch

from accordion_bench.codecs.bucket import NonFiniteRow, Target
from accordion_bench.codecs.engine import Engine, Momenta, MomentumSteps
from accordion_bench.codecs.layout import Message
from accordion_bench.codecs.matrix_tiles import TileForm, Tiles
from accordion_bench.codecs.orthonormal import MatrixOperations
from accordion_bench.compressors.topk import tiled_layout
from accordion_bench.plan import TensorSpec
from tests.codecs.conftest import There
from tests.codecs.kit import LAID, LENGTHS, ULP, apart, bucket_of, side_by_side, whole_numbers

HERE = There(Engine(), torch.device("cpu"))
SHAPES = [(64, 64), (33, 14), (7,), (1, 1), (6, 5, 4), (128, 36)]
NUMELS = tuple(math.prod(shape) for shape in SHAPES)


def test_every_operation_is_compared():
    """Here, or in a module beside."""
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*engines.py"))
    operations = {name for kind in (Engine, MatrixOperations) for name, own in vars(kind).items() if callable(own)}
    within = {"add_codes": "add_dense", "encode_formed": "encode_dense", "factors": "encode_formed"}  # compared, too
    for name, caller in within.items():
        assert f"self.{name}(" in inspect.getsource(getattr(Engine, caller))
    left = {name for name in operations - set(within) if f"engine.{name}(" not in text and not name.startswith("_")}
    assert left <= {"largest_of"}  # the scales of signs in `encode_sparse`


# ---- places


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("laid", LAID)
def test_values_at_places(there, laid, dtype):
    compare_places(there, LENGTHS, laid, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_at_places_by_triton(triton, dtype):
    """The longest tensor has places that do not fit into 16 bits; one type is enough for it."""
    lengths = (1, 7, 0, 41, 4097, 66_000) if dtype == torch.float32 else (1, 7, 0, 41, 4097)
    compare_places(triton, lengths, side_by_side, dtype)


def compare_places(there: There, lengths, laid, dtype) -> None:
    """What is read is equal, so that places are; sums are rounded once or twice."""
    rows_W = whole_numbers(lengths, 3, dtype)
    counts = [n // 3 + min(n, 1) for n in lengths]
    factors, found = [1.0 + t / 7 for t in range(len(lengths))], []
    of_lengths = bucket_of(rows_W, [(n,) for n in lengths])
    numbers = [torch.arange(n, dtype=dtype).repeat(3, 1) for n in lengths]
    for one in (there, HERE):
        places = one.engine.places(lambda bucket: range(len(lengths)), counts, of_lengths, one.device)
        values_W = one.engine.take(laid(one.to(rows_W)), places)
        target = Target([one.to(x_W / 3) for x_W in rows_W], -1.0)
        one.engine.put(target, values_W, places, factors)
        own_W = one.engine.take(one.to(numbers), places)
        found.append([x_W.cpu() for x_W in (*own_W, *values_W, *target.rows_R)])
    taken = 2 * len(lengths)
    assert all(map(torch.equal, found[0][:taken], found[1][:taken]))
    for own, other in zip(found[0][taken:], found[1][taken:], strict=True):
        assert ((own - other).abs() <= ULP * 4 * other.abs().float()).all()


# ---- tiles


def forms_of(limit: int, k: int, coded: bool) -> list[TileForm]:
    tiles = [Tiles.of(TensorSpec("", shape), limit) for shape in SHAPES]
    return [TileForm(own, min(k, own.numel), coded) for own in tiles]


def tiles_by(there: There, forms, rows_W) -> Message:
    layout = tiled_layout(NUMELS, tuple(forms))
    message = Message.empty(layout, len(rows_W[0]), there.device)
    there.engine.encode_tiles(bucket_of(rows_W, SHAPES), message, forms)
    return message


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("coded", [False, True], ids=["exact", "two bits"])
@pytest.mark.parametrize(("limit", "k"), [(8, 1), (8, 5), (64, 40), (3, 9)])
def test_tiles(there, limit, k, coded, dtype):
    forms = forms_of(limit, k, coded)
    for senders, laid in ((1, apart), (2, side_by_side), (4, apart)):
        rows_W = whole_numbers(NUMELS, senders, dtype)
        found, expected = tiles_by(there, forms, laid(there.to(rows_W))), tiles_by(HERE, forms, rows_W)
        assert found.rows.cpu().equal(expected.rows)
        for rows in {1, senders}:
            for alpha, divisor in ((1.0, senders), (-1.0, 1)):
                sums = []
                for one in (there, HERE):
                    before = whole_numbers(NUMELS, rows, dtype, seed=3)
                    target = Target([one.to(x_R.clone()) for x_R in before], alpha, divisor)
                    one.engine.add_tiles(target, expected._replace(rows=one.to(expected.rows)), forms)
                    sums.append([x_R.cpu() for x_R in target.rows_R])
                assert all(map(torch.equal, *sums))


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_tiles_that_are_not_finite(there, bad):
    forms, rows_W = forms_of(8, 3, False), whole_numbers(NUMELS, 3)
    rows_W[4][2, 50] = bad
    for one in (there, HERE):
        if one.engine.checks_input:
            with pytest.raises(NonFiniteRow) as caught:
                tiles_by(one, forms, rows_W)
            assert caught.value.row == 2 * len(SHAPES) + 4
        else:
            target = Target([one.to(torch.zeros(3, n)) for n in NUMELS])
            one.engine.add_tiles(target, tiles_by(one, forms, one.to(rows_W)), forms)
            finite = torch.stack([x_R.cpu().isfinite().all(1) for x_R in target.rows_R])
            assert (~finite).nonzero().tolist() == [[4, 2]]


# ---- momenta


@pytest.mark.parametrize("laid", LAID[:2])
def test_momenta(there, laid):
    compare_momenta(there, laid, NUMELS, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_momenta_by_triton(triton, dtype):
    compare_momenta(triton, side_by_side, (1, 7, 0, 4097), dtype)


def compare_momenta(there: There, laid, numels, dtype) -> None:
    """Momenta, sums of them and what looks ahead, to the bit; of numbers that are rounded."""
    numbers = [[x_W / 3 for x_W in whole_numbers(numels, 2, dtype, seed)] for seed in (1, 2, 3)]
    for nesterov in (False, True):
        for summed in (False, True):
            found = []
            for one in (there, HERE):
                us_W, gs_W, vs_W = (laid(one.to([x_W.clone() for x_W in own])) for own in numbers)
                sent_W = one.engine.add_momenta(Momenta(us_W, gs_W, 0.9, nesterov, vs_W if summed else ()))
                found.append([x_W.cpu() for x_W in (*us_W, *vs_W, *sent_W)])
            assert all(map(torch.equal, *found))
            us_W, gs_W, vs_W = numbers
            moved_W = [
                0.9 * (u_W + g_W) if nesterov and summed else 0.9 * u_W + g_W
                for u_W, g_W in zip(us_W, gs_W, strict=True)
            ]
            ahead_W = [g_W + 0.9 * u_W for g_W, u_W in zip(gs_W, moved_W, strict=True)] if nesterov else moved_W
            if summed:
                ahead_W = [v_W + u_W + nesterov * g_W for v_W, u_W, g_W in zip(vs_W, moved_W, gs_W, strict=True)]
            for own_W, other_W in zip(found[0], [*moved_W, *(ahead_W if summed else vs_W), *ahead_W], strict=True):
                torch.testing.assert_close(own_W, other_W)


def test_momentum_steps(there):
    compare_steps(there, NUMELS, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_momentum_steps_by_triton(triton, dtype):
    compare_steps(triton, (1, 7, 0, 4097), dtype)


def compare_steps(there: There, numels, dtype) -> None:
    """Momenta and steps, to the bit; what is masked stays where it is."""
    signs, inverses = ([x_W[0] / 3 for x_W in whole_numbers(numels, 1, dtype, seed)] for seed in (1, 2))
    inverses = [x.clamp_min(0) for x in inverses]
    masks = [(x > 0).to(dtype) for x in inverses]
    rates, found = [torch.tensor(0.3 + t % 2, dtype=dtype) for t in range(len(numels))], []
    for one in (there, HERE):
        momenta = [torch.full_like(x, 7) for x in one.to(signs)]
        given = [one.to(own) for own in (signs, inverses, masks, rates)]
        steps = one.engine.momentum_steps(MomentumSteps(momenta, *given))
        found.append([x.cpu() for x in (*momenta, *steps)])
    assert all(map(torch.equal, *found))
    for t, (sign, inverse, mask) in enumerate(zip(signs, inverses, masks, strict=True)):
        momentum, step = found[0][t], found[0][len(numels) + t]
        assert momentum.equal(sign * mask) and step.equal(momentum * inverse * rates[t])


# ---- factors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_orthonormal_columns_have_the_spans_of_those_given(there, dtype):
    factors = [
        torch.randn(count, n, r, dtype=dtype)
        for count, n, r in ((1, 9, 4), (3, 40, 2), (2, 40, 2), (2, 7, 1), (1, 5, 5))
    ]
    for one in (there, HERE):
        for factor, own in zip(factors, one.engine.orthonormalise(one.to(factors)), strict=True):
            own = own.cpu().double()
            assert own.shape == factor.shape and one.engine.orthonormalise([]) == []
            assert (own.mT @ own - torch.eye(factor.shape[2])).abs().max() < 1e-5
            for columns in range(1, factor.shape[2] + 1):  # of the first one, two, ...
                given, some = factor.double()[..., :columns], own[..., :columns]
                assert (some @ (some.mT @ given) - given).abs().max() < 1e-5 * given.abs().max()


def test_a_zero_matrix_has_finite_columns(there):
    for one in (there, HERE):
        for r in (1, 3):
            for passes in (1, 2):
                (own,) = one.engine.orthonormalise(one.to([torch.zeros(2, 8, r)]), passes)
                assert own.cpu().isfinite().all()
