"""Threshold: what is above it, how many that may be, and messages whose length says so."""

import pytest
import torch

from accordion_bench.codecs import packed_codes
from accordion_bench.codecs.selection import sampled_top, strided_sample, top_indices
from accordion_bench.compressors.threshold import Threshold
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from tests.kit.coded import coded
from tests.kit.helpers import SPECS, exchange_for, gradients

N = 200_001


def row_of(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(N, generator=generator)
    by_row = torch.logspace(-3, 3, 300).repeat_interleave(667)[:N]  # rows of a matrix at different scales
    return {
        "normal": normal,
        "heavy": normal**5,
        "ascending": normal.abs().sort().values,
        "rows": normal * by_row,
        "sparse": normal * (torch.rand(N, generator=generator) < 0.15),
        "levels": torch.randint(-200, 201, (N,), generator=generator) / 8,
    }[kind]


@pytest.mark.parametrize("kind", ["normal", "heavy", "ascending", "rows", "sparse", "levels"])
@pytest.mark.parametrize("density", [0.0005, 0.01, 0.1, 0.6])
def test_about_k_of_the_largest(kind, density):
    row, k = row_of(kind), int(density * N)
    nonzero = int((row != 0).sum())
    for step in range(5):
        found = sampled_top(row, k, 0.01, 0.8, 1.3, offset=step)
        assert bool((found.diff() > 0).all())
        assert min(0.8 * k, nonzero) <= len(found) <= 1.3 * k
        left = torch.ones(N, dtype=torch.bool)
        left[found] = False
        assert row[found].abs().min() >= row[left].abs().max()  # nothing that is left is larger than what is sent
        assert row[found].abs().min() > 0


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_seeing_all_entries_gives_exactly_the_largest(share):
    short, long = row_of("normal")[:5000], row_of("normal")
    for row, k in ((short, 50), (long, 2000)) if share == 1 else ((short, 50),):
        assert torch.equal(sampled_top(row, k, share, 0.8, 1.3), top_indices(row[None], k)[0])


def test_a_sample_that_misleads_is_put_right():
    row, k = row_of("normal"), 2000
    sample = strided_sample(row, max(N // 100, 32 * N // k))
    stride = next(s for s in range(1, N) if torch.equal(row[::s].abs(), sample))
    for factor, exact in ((1e-3, True), (1e3, False)):
        misleading = row.clone()
        misleading[::stride] *= factor
        found = sampled_top(misleading, k, 0.01, 0.8, 1.3)
        assert 0.8 * k <= len(found) <= 1.3 * k
        if exact:  # too low a threshold: cut by magnitude
            assert torch.equal(found, top_indices(misleading[None], k)[0])


def test_ties_are_cut_to_the_bound():
    assert sampled_top(torch.ones(N), 1000, 0.01, 0.8, 1.3).tolist() == list(range(1000))


def absolute(tau: float, density: float, x_W: torch.Tensor) -> list[torch.Tensor]:
    return list(coded(Threshold(density, threshold=tau), x_W, level=density)[1])


def test_an_absolute_threshold_is_met_exactly():
    x_W = row_of("normal").view(3, -1)
    for x, decoded in zip(x_W, absolute(1.5, 0.2, x_W), strict=True):
        assert torch.equal(decoded, torch.where(x.abs() >= 1.5, x, 0))


def test_an_absolute_threshold_that_too_much_exceeds_sends_the_largest():
    x_W = row_of("normal").view(3, -1)
    most = int(1.3 * int(0.01 * x_W.shape[1]))
    for x, decoded in zip(x_W, absolute(0.001, 0.01, x_W), strict=True):
        assert torch.equal(decoded.nonzero()[:, 0], top_indices(x[None], most)[0])


def test_bytes_are_recounted_from_what_arrived():
    """Sizes differ from worker to worker; a message is 4 bytes per value, the indices, and 4 bytes for its size."""
    specs = [TensorSpec("a", (300, 200)), TensorSpec("b", (100, 300))]
    exchange, plan = exchange_for("threshold", 3, specs=specs, density=0.05, error_feedback=False, dtype=torch.float32)
    xs_W = [torch.randn(3, *s.shape, generator=torch.Generator().manual_seed(5)) for s in specs]
    out = exchange.compressor.exchange(xs_W, exchange.context(StepInfo(plan, 0, 0.1)), {}, exchange.comm)
    expected, counts = 0, set()
    for i, spec in enumerate(specs):
        sent_W = torch.zeros_like(xs_W[i])
        out.subtract_sent_({i: sent_W})
        torch.testing.assert_close(-sent_W.mean(0), out.update[i])
        for sent in sent_W:
            k = int((sent != 0).sum())
            counts.add(k)
            expected += 4 + 4 * k + packed_codes.index_bytes(spec.numel, k)[1]
    assert len(counts) > 3
    assert exchange.comm.ledger.counts["payload"] == expected
    assert expected < 3 * exchange.predicted_bytes(StepInfo(plan, 0))


def test_without_gradient_nothing_but_sizes_is_sent():
    exchange, plan = exchange_for("threshold", density=0.05)
    exchange([torch.zeros_like(x) for x in gradients().tensors], StepInfo(plan, 0, 0.1))
    sparse = [s for s in SPECS if exchange.compressor.inner.pays(s, 0.05, 4) and s.ndim > 1]
    assert exchange.comm.ledger.columns()["payload_bytes"] == 4 * len(sparse) + 8 * sum(
        s.numel for s in SPECS if s not in sparse
    )


@pytest.mark.parametrize("density", [0.02, 0.2])
def test_small_tensors_are_sent_as_topk_sends_them(density):
    """Error feedback included, over several steps."""
    ours, plan = exchange_for("threshold", density=density, sample_share=1.0)
    topk, _ = exchange_for("topk", density=density)
    for step in range(4):
        xs_W = gradients(step=step).tensors
        for a, b in zip(ours(xs_W, StepInfo(plan, step, 0.1)), topk(xs_W, StepInfo(plan, step, 0.1)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_values_out_of_range_are_refused():
    for options in ({"threshold": 0}, {"sample_share": 0}, {"most": 0.9}, {"least": 1.1}, {"density": 0}):
        with pytest.raises(ConfigError):
            Threshold(**options)
