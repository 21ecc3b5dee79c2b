"""Selections, sparse messages and their sums by every engine are those of the reference."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from accordion_bench.codecs.bucket import NonFiniteRow, Target
from accordion_bench.codecs.engine import Engine, Sampling, Selection
from accordion_bench.codecs.layout import Message, SparseLayout, sparse_layout
from tests.codecs.conftest import There
from tests.codecs.kit import LAID, LENGTHS, ULP, apart, bucket_of, whole_numbers

HERE = There(Engine(), torch.device("cpu"))
DTYPES = [torch.float32, torch.float64]
TENTH = [max(1, n // 10) if n else 0 for n in LENGTHS]


class Case(NamedTuple):
    """A selection: of an engine, given rows and counts."""

    choose: Callable[[Engine, list[Tensor]], Selection]
    counts: list[int] | None = None  # where they do not depend on the data
    signs: bool = False


def sampled(share: float, least: float, most: float, offset: int) -> Case:
    return Case(lambda engine, rows_W: engine.about(rows_W, TENTH, Sampling(share, least, most, offset)))


CASES = {
    "none": Case(lambda engine, rows_W: engine.largest(rows_W, [0] * len(LENGTHS)), [0] * len(LENGTHS)),
    "one": Case(
        lambda engine, rows_W: engine.largest(rows_W, [min(n, 1) for n in LENGTHS]), [min(n, 1) for n in LENGTHS]
    ),
    "a tenth": Case(lambda engine, rows_W: engine.largest(rows_W, TENTH), TENTH),
    "all": Case(lambda engine, rows_W: engine.largest(rows_W, list(LENGTHS)), list(LENGTHS)),
    "above": Case(lambda engine, rows_W: engine.above(rows_W, 100 * 2.0**-10, list(LENGTHS))),
    "above, at most": Case(lambda engine, rows_W: engine.above(rows_W, 2.0**-10, TENTH)),
    "above all": Case(lambda engine, rows_W: engine.above(rows_W, 1e9, TENTH)),
    "about": sampled(0.01, 0.8, 1.3, 3),
    "about, first estimate": sampled(0.02, 0.0, 1.0, 0),
    "about, at least": sampled(0.01, 1.0, 1.05, 7),
    "about, all seen": sampled(0.6, 0.8, 1.3, 0),
    "not zero": Case(lambda engine, rows_W: engine.nonzero(rows_W), signs=True),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def numbers(case: Case, workers: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Entries of one magnitude where their signs tell them."""
    rows_W = whole_numbers(LENGTHS, workers, dtype)
    return [torch.where(x_W.abs() > 0.1, x_W.sign() * 0.3, 0) for x_W in rows_W] if case.signs else rows_W


def encoded(there: There, case: Case, rows_W: list[Tensor]) -> tuple[Message, Tensor]:
    """Messages of rows that are there, and the counts of what is selected [W, T]."""
    workers = len(rows_W[0])
    selection = case.choose(there.engine, rows_W)
    if case.counts is None:
        counts_W = selection.counts_W.cpu()
        layouts = [SparseLayout(LENGTHS, counts, case.signs) for counts in counts_W.tolist()]
        message = Message.of_each(layouts, there.device)
    else:
        counts_W = torch.tensor(case.counts, dtype=torch.int32).expand(workers, -1)
        message = Message.empty(sparse_layout(LENGTHS, tuple(case.counts)), workers, there.device)
    there.engine.encode_sparse(bucket_of(rows_W), selection, message)
    return message, counts_W


def moved(message: Message, there: There) -> Message:
    return message._replace(rows=there.to(message.rows if isinstance(message.rows, Tensor) else list(message.rows)))


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_case
def test_messages(there, case, dtype):
    for workers in (1, 3):
        for laid in LAID if workers == 3 else [apart]:
            rows_W = numbers(case, workers, dtype)
            found, counts_W = encoded(there, case, laid(there.to(rows_W)))
            expected, expected_W = encoded(HERE, case, rows_W)
            assert counts_W.dtype == torch.int32 and counts_W.equal(expected_W)
            assert [row.cpu().tolist() for row in found.rows] == [row.tolist() for row in expected.rows]


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_case
def test_sums(there, case, dtype):
    """To the bit where a coordinate has one term; sender s goes to row s mod R."""
    for senders in (1, 2, 3, 4):
        message, _ = encoded(HERE, case, numbers(case, senders))
        for rows in {1, senders}:
            for alpha, divisor in ((1.0, senders), (-1.0, 1)):
                before = whole_numbers(LENGTHS, rows, dtype, seed=3)
                sums = []
                for one in (there, HERE):
                    target = Target([one.to(x_R.clone()) for x_R in before], alpha, divisor)
                    one.engine.add_sparse(target, moved(message, one))
                    sums.append([x_R.cpu() for x_R in target.rows_R])
                for found, expected in zip(*sums, strict=True):
                    assert found.equal(expected) if rows == senders else near(found, expected, senders)


@pytest.mark.parametrize("name", ["about", "not zero"])
def test_what_was_sent_is_cleared(there, name):
    """Zeros at the coordinates that messages name, and at no others."""
    message, _ = encoded(HERE, CASES[name], numbers(CASES[name], 3))
    ones, cleared = [torch.ones(3, n) for n in LENGTHS], []
    for one in (there, HERE):
        target = Target([one.to(x_R.clone()) for x_R in ones], 1.0, clears=True)
        one.engine.add_sparse(target, moved(message, one))
        cleared.append([x_R.cpu() for x_R in target.rows_R])
    assert all(map(torch.equal, *cleared))
    sums = Target([torch.zeros(3, n) for n in LENGTHS])
    HERE.engine.add_sparse(sums, message)
    assert all(x_R.equal((sum_R == 0).float()) for x_R, sum_R in zip(cleared[0], sums.rows_R, strict=True))


def near(found: Tensor, expected: Tensor, senders: int) -> bool:
    """Within 2 ulp of float32, of the magnitudes that were added up, at most 1 each."""
    return bool(((found - expected).abs() <= 2 * ULP * (senders + 1)).all())


KINDS = {
    "smooth": lambda x: x**3,
    "sparse": lambda x: x * (x.abs() > 2.6),
    "signs": lambda x: x.sign(),
    "two values": lambda x: torch.where(x > 1.3, 2.0, 1.0),
    "zero": lambda x: x * -0.0,
    "tiny": lambda x: x * 1e-42,
    "sorted": lambda x: x.sort().values,
}
LONG = (1, 64, 65, 4099, 65_536, 131_101)  # the last one has three tiles


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_numbers(numba, kind):
    """Of long tensors, by several counts and thresholds."""
    drawn = [torch.randn(2, n, generator=torch.Generator().manual_seed(n)) for n in LONG]
    rows_W = [KINDS[kind](x_W) for x_W in drawn]
    few, many = ([int(density * n) for n in LONG] for density in (0.01, 0.3))
    wanted = [
        *(functools.partial(Engine.largest, counts=counts) for counts in (few, many)),
        *(functools.partial(Engine.above, threshold=at, most=many) for at in (1e-30, 1.0, 3.7)),
        *(
            functools.partial(Engine.about, counts=few, sampling=Sampling(*how))
            for how in ((0.01, 0.8, 1.3, 3), (0.6, 0.8, 1.3, 0))
        ),
    ]
    for choose in wanted:
        found = []
        for one in (numba, HERE):
            selection = getattr(one.engine, choose.func.__name__)(rows_W, **choose.keywords)
            counts_W = selection.counts_W
            message = Message.of_each([SparseLayout(LONG, counts) for counts in counts_W.tolist()], one.device)
            one.engine.encode_sparse(bucket_of(rows_W), selection, message)
            found.append([counts_W, *message.rows])
        assert all(map(torch.equal, *found)), choose.keywords


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("name", ["one", "a tenth", "above, at most"])
def test_what_is_not_finite(there, name, bad):
    """By the right row where the engine looks; else it shows in the sum."""
    case, at = CASES[name], len(LENGTHS) - 2
    rows_W = numbers(case, 3)
    rows_W[at][1, 17] = bad
    for one in (there, HERE):
        if one.engine.checks_input:
            with pytest.raises(NonFiniteRow) as caught:
                encoded(one, case, rows_W)
            assert caught.value.row == len(LENGTHS) + at
        else:
            target = Target([one.to(torch.zeros(3, n)) for n in LENGTHS])
            one.engine.add_sparse(target, encoded(one, case, one.to(rows_W))[0])
            finite = torch.stack([x_R.cpu().isfinite().all(1) for x_R in target.rows_R])
            assert (~finite).nonzero().tolist() == [[at, 1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lifted(there, dtype):
    """Bins of one, of some, and of all coordinates; what reaches the largest one is equal to the bit."""
    lengths, sizes = (1, 7, 40, 41, 4097, 20481, 100), (1, 3, 50, 41, 50, 500, 1)
    residuals_W, news_W = whole_numbers(lengths, 3, dtype), whole_numbers(lengths, 3, dtype, seed=3)
    residuals_W[2] = -news_W[2]
    for laid in LAID[:2]:
        found = []
        for one, of in ((there, laid), (HERE, apart)):
            own_W = one.to([e_W.clone() for e_W in residuals_W])
            sent_W, scales_W = one.engine.select_in_bins(own_W, of(one.to(news_W)), sizes)
            assert scales_W.dtype == torch.float32
            found.append([x_W.cpu() for x_W in (*own_W, *sent_W, scales_W)])
        assert all(map(torch.equal, *found))
        for e_W, x_W, own_W, sent_W in zip(residuals_W, news_W, found[0], found[0][len(lengths) :], strict=False):
            assert own_W.equal(e_W + x_W - sent_W)


def test_threads_change_nothing(numba, monkeypatch):
    """Messages are equal bit for bit, however small the threads' shares."""
    from accordion_bench.tensors.kernels import table

    monkeypatch.setattr(table, "LEAST_TILES", 1)
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append([encoded(numba, case, numbers(case, 3))[0].rows for case in CASES.values()])
    finally:
        torch.set_num_threads(before)
    assert [[row.tolist() for row in rows] for rows in found[0]] == [
        [row.tolist() for row in rows] for rows in found[1]
    ]
