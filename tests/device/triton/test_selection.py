"""The largest magnitudes by kernels are those of torch to the bit, also where a sample says nothing of them."""

import pytest
import torch
from torch import Tensor

from accordion_bench.codecs import engines
from accordion_bench.codecs.bucket import Target
from accordion_bench.codecs.engine import Engine, Sampling
from accordion_bench.codecs.layout import Message, SparseLayout, sparse_layout
from accordion_bench.codecs.selection import at_least, sampled_top, stride_of, top_positions
from tests.codecs.kit import bucket_of, whole_numbers

selection = pytest.importorskip("accordion_bench.tensors.kernels.on_gpu.selection", exc_type=ImportError)
thresholds = pytest.importorskip("accordion_bench.tensors.kernels.on_gpu.thresholds", exc_type=ImportError)

LONG, SHORT = 33_001, (1, 64, 2049, 0, 9)


def drawn(n: int, rows: int = 1) -> Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(n))


def unseen(n: int, rows: int = 1) -> Tensor:
    """The largest magnitudes are where the sample does not look: it takes every third sector."""
    at = torch.arange(n)
    return drawn(n, rows) * torch.where((at // 8) % 3 == 0, 1e-3, 1.0)


def special(n: int, rows: int = 1) -> Tensor:
    x_R = drawn(n, rows)
    for place, value in enumerate((torch.nan, -torch.inf, torch.inf, -torch.nan, -0.0, 0.0, 1e-45, -1e-40)):
        x_R[:, place * 5 :: 61] = value
    return x_R


KINDS = {
    "normal": drawn,
    "bfloat16": lambda n, rows=1: drawn(n, rows).bfloat16().float(),
    "heavy tails": lambda n, rows=1: drawn(n, rows) ** 15,
    "few values": lambda n, rows=1: drawn(n, rows).round(),
    "mostly zero": lambda n, rows=1: drawn(n, rows) * (drawn(n, rows).abs() > 2.5),
    "zero": lambda n, rows=1: torch.zeros(rows, n),
    "equal": lambda n, rows=1: torch.full((rows, n), -3.0),
    "tiny": lambda n, rows=1: drawn(n, rows) * 1e-42,
    "ascending": lambda n, rows=1: drawn(n, rows).abs().sort().values,
    "not finite": special,
    "unseen": unseen,
    "clustered": lambda n, rows=1: drawn(n, rows) * (1 + 1e3 * (torch.arange(n) // 3000 == 1)),
}


def expected(rows_W: list[Tensor], counts: list[int]) -> Tensor:
    pairs = zip(rows_W, counts, strict=True)
    return torch.cat([top_positions(x_W, max(1, x_W.shape[1]), k) for x_W, k in pairs if k], dim=1)


def check(gpu, rows_W: list[Tensor], counts: list[int]) -> None:
    found = engines._on_gpu().largest([x_W.to(gpu.device) for x_W in rows_W], counts)
    indices_W = expected(rows_W, counts)
    assert torch.equal(found.indices.cpu().long(), indices_W)
    pairs = zip(rows_W, indices_W.split(counts, dim=1), strict=True)
    values_W = torch.cat([x_W.gather(1, own_W) for x_W, own_W in pairs], dim=1)
    assert torch.equal(found.values.cpu().view(torch.int32), values_W.float().view(torch.int32))


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", KINDS)
def test_long_tensors(gpu, kind):
    """Several blocks, a sample that is a part."""
    check(gpu, [KINDS[kind](LONG)], [LONG // 10])


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["normal", "bfloat16", "heavy tails"])
def test_one_read_leaves_few_candidates(monkeypatch, gpu, kind):
    """The sample's bounds hold the key, and what is between them has room: there is no second read of all."""
    seen = {}

    def launch(kernel, grid, device, *args, **constants):
        seen[kernel.__name__] = args
        started(kernel, grid, device, *args, **constants)

    started = selection.launch
    monkeypatch.setattr(selection, "launch", launch)
    check(gpu, [KINDS[kind](LONG)], [LONG // 10])
    totals, places = seen["_put_aside"][-3].cpu().tolist(), seen["_put_aside"][-1].cpu()
    assert totals[0] < LONG // 10 <= totals[0] + totals[1]
    assert int(places.sum()) == totals[1] < LONG // 10 and not totals[2]


@pytest.mark.sample(5)
@pytest.mark.parametrize("kind", KINDS)
def test_short_tensors_of_one_bucket(gpu, kind):
    """One entry, all, some; none of an empty tensor, none of another one."""
    check(gpu, [KINDS[kind](n) for n in SHORT], [1, 64, 500, 0, 0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("k", [1, 40, LONG // 2, LONG - 1, LONG])
def test_few_entries_and_all(gpu, k):
    check(gpu, [drawn(LONG)], [k])


def test_numbers_of_64_bits_are_compared_as_float32(gpu):
    x = drawn(3000).double()
    check(gpu, [x + 1e-12 * x.flip(1), x.float().double()], [500, 50])


def test_rows_that_begin_anywhere(gpu):
    """Loads are narrow where an address is no multiple of 16 bytes."""
    whole_W = drawn(2001, 2)
    rows_W = list(whole_W.split([1, 1500, 500], dim=1))
    found = engines._on_gpu().largest(list(whole_W.to(gpu.device).split([1, 1500, 500], dim=1)), [1, 200, 30])
    assert torch.equal(found.indices.cpu().long(), expected(rows_W, [1, 200, 30]))


def chosen(gpu, rows_W: list[Tensor], choose) -> list[list[list[int]]]:
    """Indices of what is selected, [W][T]."""
    reached = choose(engines._on_gpu(), [x_W.to(gpu.device) for x_W in rows_W])
    counts = reached.counts_W.cpu().tolist()
    found = thresholds.entries_of(reached, max(map(sum, counts)))
    return [
        [part.tolist() for part in own[: sum(k)].split(k)] for own, k in zip(found.indices.cpu(), counts, strict=True)
    ]


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(12))
def test_a_sampled_threshold(gpu, seed):
    """Also where the sample misleads: too low or too high, all zero, denormal; of numbers of many kinds."""
    generator = torch.Generator().manual_seed(seed)

    def one_of(*values):
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    share, least, most = one_of(0.01, 0.02, 0.6), one_of(0.8, 0.0, 1.0), one_of(1.3, 1.0)
    rows_W, counts = [], []
    for n in (1, one_of(60, 700), 3000, one_of(5003, 17_011)):
        k, x_W = max(1, int(one_of(0.0005, 0.01, 0.1, 0.6) * n)), KINDS[one_of(*KINDS)](n, 2).clone()
        stride = stride_of(n, max(int(share * n), 32 * n // k))
        if one_of(True, False):
            x_W[0, seed % stride :: stride] *= one_of(1e-3, 1e3, 0.0, 1e-40)
        rows_W.append(x_W.nan_to_num_())
        counts.append(k)
    found = chosen(gpu, rows_W, lambda engine, own_W: engine.about(own_W, counts, Sampling(share, least, most, seed)))
    for w, own in enumerate(found):
        for x_W, k, indices in zip(rows_W, counts, own, strict=True):
            assert indices == sampled_top(x_W[w], k, share, least, most, seed).tolist()


@pytest.mark.sample(1)
@pytest.mark.parametrize("threshold", [0.1, 0.75, 1e-50, 100.0])
def test_a_known_threshold(gpu, threshold):
    x_W = (drawn(3000, 2) * 4).round() / 4
    own = chosen(gpu, [x_W], lambda engine, own_W: engine.above(own_W, threshold, [1800]))
    for row, (indices,) in zip(x_W, own, strict=True):
        found = at_least(row, threshold)
        if len(found) > 1800:
            found = expected([row[None]], [1800])[0]
        assert indices == found.tolist()


@pytest.mark.parametrize("signs", [False, True])
def test_messages_and_sums_of_uneven_senders(gpu, signs):
    """Byte for byte those of the reference; two senders each in a row of its own, and in one."""
    rows_W = [drawn(n, 2) for n in (600, 5003, 1, 0, 900)]
    rows_W[4][:] = 0
    if signs:
        rows_W = [torch.where(x_W.abs() > 1, x_W.sign() * 0.3, 0) for x_W in rows_W]
    counts, numels, found = [60, 500, 1, 0, 90], tuple(x_W.shape[1] for x_W in rows_W), []
    for engine, there in ((engines._on_gpu(), gpu.device), (Engine(), torch.device("cpu"))):
        own_W, out = [x_W.to(there) for x_W in rows_W], []
        picked = engine.nonzero(own_W) if signs else engine.about(own_W, counts, Sampling(0.1, 0.8, 1.3, 3))
        layouts = [SparseLayout(numels, own, signs) for own in picked.counts_W.cpu().tolist()]
        message = Message.of_each(layouts, there)
        engine.encode_sparse(bucket_of(own_W), picked, message)
        out += [row.cpu() for row in message.rows]
        for rows in (1, 2):
            target = Target([drawn(n, rows).to(there) for n in numels], -1.0, 3 - rows)
            engine.add_sparse(target, message)
            out += [x_R.cpu() for x_R in target.rows_R]
        found.append(out)
    assert all(map(torch.equal, *found))


def test_bins(gpu):
    """Scales to the bit where sums are exact; long bins and short ones, of both types."""
    lengths, sizes = (1, 7, 40, 41, 4097, 20_481, 100), (1, 3, 50, 41, 50, 500, 1)
    for dtype in (torch.float32, torch.float64):
        residuals_W, news_W = whole_numbers(lengths, 3, dtype), whole_numbers(lengths, 3, dtype, seed=3)
        residuals_W[2] = -news_W[2]
        residuals_W[4][1, 700] = torch.nan
        own_W, newest_W = ([x_W.to(gpu.device) for x_W in xs_W] for xs_W in (residuals_W, news_W))
        sent_W, scales_W = engines._on_gpu().select_in_bins(own_W, newest_W, sizes)
        expected_W, scales = Engine().select_in_bins(residuals_W, news_W, sizes)
        for found_W, other_W in zip([*own_W, *sent_W, scales_W], [*residuals_W, *expected_W, scales], strict=True):
            torch.testing.assert_close(found_W.cpu(), other_W, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sample(5)
@pytest.mark.parametrize("counts", [[1, 400, 2, 0], [7, 1500, 1, 0], [5, 700, 3000, 0]])
@pytest.mark.parametrize("senders", [1, 2])
def test_messages_and_sums(gpu, counts, senders):
    """Byte for byte those of the reference; sums to the bit, since senders are added in their order."""
    rows_W = [drawn(n, senders) for n in (7, 1500, 5003, 0)]
    layout = sparse_layout(tuple(x_W.shape[1] for x_W in rows_W), tuple(counts))
    messages = []
    for engine, there in ((engines._on_gpu(), gpu.device), (Engine(), torch.device("cpu"))):
        own_W = [x_W.to(there) for x_W in rows_W]
        messages.append(Message.empty(layout, senders, there))
        engine.encode_sparse(bucket_of(own_W), engine.largest(own_W, counts), messages[-1])
    assert torch.equal(messages[0].rows.cpu(), messages[1].rows)
    for rows in {1, senders}:
        before = [drawn(x_W.shape[1], rows) for x_W in rows_W]
        sums = []
        for engine, message in zip((engines._on_gpu(), Engine()), messages, strict=True):
            there = message.rows.device
            target = Target([x_R.to(there, copy=True) for x_R in before], -1.0, senders)
            engine.add_sparse(target, message)
            sums.append([x_R.cpu() for x_R in target.rows_R])
        assert all(map(torch.equal, *sums))


def test_what_a_message_says_of_other_coordinates_is_not_followed(gpu):
    """Any bytes; nothing is written in front of the sums or behind them."""
    layout = sparse_layout((700, 900), (90, 20))
    rows = torch.randint(0, 256, (2, layout.nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    around = torch.zeros(3000, device=gpu.device)
    sums = [around[1000:1700][None], around[1700:2600][None]]
    engines._on_gpu().add_sparse(Target(sums), Message(rows.to(gpu.device), [layout] * 2))
    assert not around[:1000].cpu().any() and not around[2600:].cpu().any()
