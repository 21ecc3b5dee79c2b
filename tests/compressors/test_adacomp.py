"""AdaComp: against an obvious twin, what happens to every gradient, and a message that loses nothing."""

import pytest
import torch

from accordion_bench.codecs import packed_codes
from accordion_bench.codecs.engine import Engine
from accordion_bench.compressors.adacomp import AdaComp, SparseSigns
from accordion_bench.exchange.dry_exchange import probe_exchange
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from tests.kit.coded import coded
from tests.kit.helpers import SPECS, compressor, exchange_for, gradients, residuals

SHORT = {"bin_conv": 7, "bin_dense": 50}  # several bins in every tensor, the last one shorter


def twin_message(grown, news, size):
    """What one worker sends of one tensor, entry by entry, as one writes it down."""
    grown, news = grown.flatten().tolist(), news.flatten().tolist()
    starts = range(0, len(grown), size)
    largest = [max(abs(x) for x in grown[start : start + size]) for start in starts]
    scale = float(torch.tensor(sum(largest) / len(largest)).float())
    sent = []
    for j, (g, d) in enumerate(zip(grown, news, strict=True)):
        sign = (g > 0) - (g < 0)
        sent.append(sign * scale if abs(g + d) >= largest[j // size] else 0.0)
    return torch.tensor(sent, dtype=torch.float64)


def twin_step(kept, xs_W, bins):
    updates = []
    for spec, x_W in zip(SPECS, xs_W, strict=True):
        size = bins["bin_conv" if spec.ndim > 2 else "bin_dense"]
        total = torch.zeros(spec.shape, dtype=torch.float64)
        for w, x in enumerate(x_W):
            grown = kept.get((spec.name, w), torch.zeros_like(x)) + x
            sent = grown if spec.ndim < 2 else twin_message(grown, x, size).view(spec.shape)
            kept[spec.name, w] = grown - sent
            total += sent
        updates.append(total / len(x_W))
    return updates


@pytest.mark.parametrize("bins", [SHORT, {"bin_conv": 50, "bin_dense": 500}, {"bin_conv": 1, "bin_dense": 1}])
def test_equals_its_twin(bins):
    exchange, plan = exchange_for("adacomp", **bins)
    kept = {}
    for step in range(5):
        xs_W = gradients(step=step).tensors
        expected = twin_step(kept, xs_W, bins)
        for spec, update, other in zip(SPECS, exchange(xs_W, StepInfo(plan, step, 0.1)), expected, strict=True):
            assert torch.allclose(update, other, rtol=1e-12, atol=1e-14), (spec.name, step)
    for name, e_W in residuals(exchange).items():
        for w, e in enumerate(e_W):
            assert torch.allclose(e, kept[name, w], rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize("workers", [1, 4, 40])  # 40: what is decoded travels by dense all-reduce
def test_no_gradient_is_lost(workers):
    """Sum of updates + mean residual = sum of mean gradients."""
    exchange, plan = exchange_for("adacomp", workers=workers, **SHORT)
    total = [torch.zeros(spec.shape, dtype=torch.float64) for spec in SPECS]
    target = [x.clone() for x in total]
    for step in range(4):
        xs_W = gradients(workers=workers, step=step).tensors
        for i, update in enumerate(exchange([x.clone() for x in xs_W], StepInfo(plan, step, 0.1))):
            total[i] += update
            target[i] += xs_W[i].mean(0)
    kept = residuals(exchange)
    assert set(kept) == {spec.name for spec in SPECS if spec.ndim >= 2}
    for spec, ours, theirs in zip(SPECS, total, target, strict=True):
        ours = ours + kept[spec.name].mean(0) if spec.name in kept else ours
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12), spec.name


def test_bins():
    built = AdaComp()
    shapes = {(16, 8, 3, 3): 50, (8, 4, 3): 50, (40, 40): 500, (5, 23): 115, (1, 1): 1}
    assert {shape: built.bin_size(TensorSpec("t", shape)) for shape in shapes} == shapes


def test_what_a_bin_sends():
    """The newest gradient decides: 0.6 + 0.5 reaches the maximum 1, 0.9 - 0.1 does not; nothing from an empty bin."""
    residual_W = torch.tensor([[1.0, 0.1, 1.0, 0.0, -0.2, 0.0, -3.1]])
    news = torch.tensor([[0.0, 0.5, -0.1, 0.0, 0.2, 0.0, 0.1]])
    grown = residual_W + news
    (sent_W,), scales_W = Engine().select_in_bins([residual_W], [news], [3])
    # -3 + 0.1 falls back below its bin's maximum, so that nothing of that bin is sent
    scale = float(scales_W)
    assert sent_W.tolist() == [[scale, scale, 0, 0, 0, 0, 0]] and scale == pytest.approx((1 + 0 + 3) / 3)
    assert residual_W.equal(grown - sent_W)


def test_longer_bins_cost_less():
    sent = []
    for size in (5, 50, 500):
        exchange, plan = exchange_for("adacomp", bin_conv=size, bin_dense=size)
        for step in range(3):
            exchange(gradients(step=step).tensors, StepInfo(plan, step, 0.1))
        sent.append(exchange.comm.ledger.counts["payload"])
    assert sent[0] > sent[1] > sent[2]


@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("numel", [1, 2, 7, 64, 1001])
def test_a_message_is_exact_and_no_longer_than_promised(numel, density):
    generator = torch.Generator().manual_seed(numel)
    signs = torch.randint(0, 2, (3, numel), generator=generator) * 2.0 - 1
    x_R = signs * (torch.rand(3, numel, generator=generator) < density) * torch.tensor([[0.3], [1e-30], [2e30]])
    messages, decoded_R = coded(SparseSigns(), x_R)
    for x, message, decoded in zip(x_R, messages, decoded_R, strict=True):
        count = int((x != 0).sum())
        assert len(message) == 8 + packed_codes.index_bytes(2 * numel, count)[1]  # a scale and a count stand first
        assert torch.equal(decoded, x)


def test_probe_tells_the_next_exchange():
    exchange, plan = exchange_for("adacomp", **SHORT)
    exchange(gradients().tensors, StepInfo(plan, 0, 0.1))
    xs_W = gradients(step=1).tensors
    fed_W = [x_W + residuals(exchange).get(spec.name, 0) for spec, x_W in zip(SPECS, xs_W, strict=True)]
    probe = probe_exchange(exchange, xs_W, StepInfo(plan, 1))
    exchange(xs_W, StepInfo(plan, 1, 0.1))
    for spec, fed, error, measured in zip(SPECS, fed_W, probe.error, probe.measured, strict=True):
        lost = residuals(exchange).get(spec.name, torch.zeros_like(fed))
        shares = lost.flatten(1).square().sum(1) / fed.flatten(1).square().sum(1)
        assert error == pytest.approx(float(shares.mean()))
        assert measured.error == pytest.approx(float(lost[0].square().sum()))
        assert measured.sent_norm == pytest.approx(float((fed[0] - lost[0]).norm()))


@pytest.mark.parametrize(
    "options, told",
    [
        ({"error_feedback": True}, "error_feedback must be false, because it already accumulates unsent entries in e"),
        ({"bin_conv": 0}, "bin_conv must be an integer of at least 1, got 0; type .*bin_conv=50"),
        ({"bin_dense": 2.5}, "bin_dense must be an integer of at least 1, got 2.5; type .*bin_dense=500"),
        ({"collective": "all_reduce"}, "collective must be all_gather, because every worker selects different entries"),
    ],
)
def test_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        compressor("adacomp", **options)
