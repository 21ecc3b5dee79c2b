"""ATOMO: probabilities, sampling, unbiasedness and variance as exact sums, bytes, edge cases."""

import pytest
import torch

from accordion_bench.compressors.atomo import ATOMO, inclusion, systematic
from accordion_bench.compressors.compressor import Context
from accordion_bench.compressors.oneshot import NonFiniteRow
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from tests.kit.helpers import SPECS, exchange_for, gradients

SPEC = TensorSpec("m", (7, 3, 4))
CONTEXT = Context(0, [SPEC], [2])


def variance(*args):
    return ATOMO.description.claims.variance(ATOMO(), *args)


def matrices(rows=1, spec=SPEC, decay=1.5, seed=0):
    """Rows [R, N] of matrices with decaying singular values."""
    generator = torch.Generator().manual_seed(seed)
    U, sigma, Vt = torch.linalg.svd(torch.randn(rows, *spec.matrix, generator=generator, dtype=torch.float64), False)
    return (U * (sigma * decay ** -torch.arange(sigma.shape[1])).unsqueeze(1) @ Vt).flatten(1)


def slow_inclusion(sigma, s):
    """Clip, rescale, until nothing is left to clip."""
    clipped = [False] * len(sigma)
    while True:
        rest = sum(x for x, c in zip(sigma, clipped, strict=True) if not c)
        p = [1.0 if c else (s - sum(clipped)) * x / rest for x, c in zip(sigma, clipped, strict=True)]
        above = [x > 1 + 1e-12 for x in p]
        if not any(above):
            return p
        clipped = [c or a for c, a in zip(clipped, above, strict=True)]


@pytest.mark.parametrize("decay", [1.0, 1.1, 2.0, 50.0])
@pytest.mark.parametrize("s", [1, 2, 5, 8])
def test_inclusion_equals_clipping_and_rescaling(s, decay):
    sigma = (torch.rand(20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) + 0.1) / decay ** (
        torch.arange(8)
    )
    sigma = sigma.sort(descending=True).values
    p = inclusion(sigma, s)
    assert ((p > 0) & (p <= 1)).all()
    torch.testing.assert_close(p.sum(1), torch.full((20,), float(s), dtype=torch.float64))
    torch.testing.assert_close(p, torch.tensor([slow_inclusion(row, s) for row in sigma.tolist()]).double())


def test_inclusion_has_the_least_variance():
    """Any other probabilities of the same sum do worse (the problem is convex: small moves suffice)."""
    sigma = torch.tensor([[5.0, 2.0, 1.0, 0.5, 0.1]], dtype=torch.float64)
    variance = lambda p: (sigma.square() * (1 / p - 1)).sum()  # noqa: E731
    p = inclusion(sigma, 3)
    for i in range(5):
        for j in range(5):
            moved = p.clone()
            moved[0, i] -= 1e-4
            moved[0, j] += 1e-4
            assert moved.max() > 1 or variance(moved) >= variance(p)


def expectation(of, p, s):
    """The exact mean of `of(indices)` over the uniform number, on which the choice depends in steps."""
    cuts = torch.cat([torch.zeros(1), (p.cumsum(0) % 1), torch.ones(1)]).double().sort().values
    middles, widths = (cuts[1:] + cuts[:-1]) / 2, cuts.diff()
    return sum(
        width * of(systematic(p[None], middle[None], s)[0]) for middle, width in zip(middles, widths, strict=True)
    )


@pytest.mark.parametrize("s", [1, 2, 3, 5])
def test_mean_and_variance_are_exact_sums_over_the_draw(s):
    x = matrices().view(SPEC.matrix)
    U, sigma, Vt = torch.linalg.svd(x, full_matrices=False)
    p = inclusion(sigma[None], s)[0]

    def message(indices):
        assert len(indices) == s == len(set(indices.tolist()))
        return (U[:, indices] * (sigma / p)[indices]) @ Vt[indices]

    marginals = expectation(lambda indices: torch.zeros_like(p).index_fill(0, indices, 1), p, s)
    torch.testing.assert_close(marginals, p, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(expectation(message, p, s), x, rtol=1e-12, atol=1e-12)
    error = expectation(lambda indices: (message(indices) - x).square().sum(), p, s)
    torch.testing.assert_close(error, (sigma.square() * (1 / p - 1)).sum(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(variance(x.view(1, -1), SPEC, s, CONTEXT)[0], error, rtol=1e-11, atol=1e-12)


def test_keyed_draws_have_that_mean_and_variance():
    rows = 4000
    x_R = matrices().expand(rows, -1)
    Q_R = ATOMO().decode(ATOMO().encode(x_R, SPEC, 2, CONTEXT, range(rows)), SPEC, 2, CONTEXT).double()
    standard_errors = (Q_R.mean(0) - x_R[0]) / (Q_R.std(0) / rows**0.5)
    assert standard_errors.abs().max() < 5
    squares = (Q_R - x_R).square().sum(1)
    expected = variance(x_R[:1], SPEC, 2, CONTEXT)[0]
    assert (squares.mean() - expected).abs() < 5 * squares.std() / rows**0.5


def test_a_message_is_the_chosen_triples():
    x_R = matrices(6)
    message_R = ATOMO().encode(x_R, SPEC, 2, CONTEXT, range(6))
    assert message_R.dtype == torch.uint8 and message_R.shape == (6, 4 * 2 * (7 + 12 + 1))
    for x, Q in zip(x_R, ATOMO().decode(message_R, SPEC, 2, CONTEXT), strict=True):
        U, sigma, Vt = torch.linalg.svd(x.view(7, 12), full_matrices=False)
        weights = (U.T @ Q.view(7, 12).double() @ Vt.T) / sigma.diag().diagonal()
        weights, rest = weights.diagonal(), weights - weights.diagonal().diag()
        sent = weights.abs() > 1e-4
        assert sent.sum() == 2 and rest.abs().max() < 1e-4
        p = inclusion(sigma[None], 2)[0]
        torch.testing.assert_close(weights[sent], 1 / p[sent], rtol=1e-5, atol=0)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_bytes(rank):
    exchange, plan = exchange_for("atomo", rank=rank, dtype=torch.float32, workers=2)
    expected = 0
    for spec in SPECS:
        n, m = spec.matrix
        message = 4 * rank * (n + m + 1)
        expected += message if spec.ndim > 1 and message < 4 * n * m else 4 * n * m
    assert exchange.predicted_bytes(StepInfo(plan, 0)) == expected
    exchange(gradients(workers=2, dtype=torch.float32).tensors, StepInfo(plan, 0, 0.1))
    assert exchange.comm.ledger.columns()["payload_bytes"] == expected


def test_full_rank_loses_nothing():
    exchange, plan = exchange_for("atomo", rank=1000)
    dense, plan0 = exchange_for("none")
    xs_W = gradients().tensors
    for a, b in zip(exchange(xs_W, StepInfo(plan, 0, 0.1)), dense(xs_W, StepInfo(plan0, 0, 0.1)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_gradients_of_that_rank_come_back(rank):
    """Fewer triples than s have p = 1 each, whatever is drawn."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(7, rank, generator=generator) @ torch.randn(rank, 12, generator=generator)
    x_R = x.view(1, -1).expand(50, -1)
    for s in (rank, rank + 1):
        Q_R = ATOMO().decode(ATOMO().encode(x_R, SPEC, s, CONTEXT, range(50)), SPEC, s, CONTEXT)
        torch.testing.assert_close(Q_R, x_R.clone(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-30, 1e-20, 1e15, 1e30])
def test_any_scale(scale):
    x_R = (matrices(20) * scale).float()
    Q_R = ATOMO().decode(ATOMO().encode(x_R, SPEC, 2, CONTEXT, range(20)), SPEC, 2, CONTEXT)
    assert Q_R.isfinite().all() and Q_R.abs().max() <= 50 * x_R.abs().max()
    assert variance(x_R, SPEC, 2, CONTEXT).isfinite().all()


def test_what_has_no_code_is_refused():
    for bad in (float("nan"), float("inf"), 3e38):
        x_R = matrices(3).float()
        x_R[1] *= bad
        with pytest.raises(NonFiniteRow) as refused:
            ATOMO().encode(x_R, SPEC, 1, CONTEXT, range(3))
        assert refused.value.row == 1


def test_workers_draw_for_themselves():
    xs_W = [x[:1].expand_as(x).clone() for x in gradients().tensors]
    exchange, plan = exchange_for("atomo", rank=1)
    ctx = exchange.context(StepInfo(plan, 0, 0.1))
    keys = [exchange.compressor.keys(ctx, "a", [worker])[0] for worker in range(4)]
    messages = [exchange.compressor.encode(xs_W[1][:1].flatten(1), SPECS[1], 1, ctx, [key]) for key in keys]
    assert len({bytes(message.numpy()) for message in messages}) > 1


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 1.5}, {"collective": "all_reduce"}])
def test_bad_options(options):
    with pytest.raises(ConfigError, match="compressor." + next(iter(options))):
        exchange_for("atomo", **options)
