"""ARC-TopK: against an obvious twin in float64, its identities, ties, bytes, and values that are refused."""

import pytest
import torch

from accordion_bench.compressors.arctopk import ARCTopK
from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng
from tests.kit.helpers import SPECS, exchange_for, gradients, residuals


def twin_step(xs_W, kept, step, density, sketch, seed):
    """One step with error feedback as one writes it down: one matrix, one worker, one line at a time."""
    updates = []
    for spec, x_W in zip(SPECS, xs_W, strict=True):
        n, m = spec.matrix
        k = max(1, -(-round(density * n * 1e6) // 10**6))
        if spec.ndim < 2 or n * sketch + k * m >= n * m:
            updates.append(x_W.mean(0))
            continue
        Ms = [x_W[w].reshape(n, m) + kept.get((spec.name, w), 0) for w in range(len(x_W))]
        generator = keyed_rng.generator(seed, "arctopk", spec.name, step)
        V = torch.randn(m, sketch, generator=generator, dtype=torch.float64) / sketch**0.5
        P = sum(M @ V for M in Ms) / len(Ms)
        norms = P.norm(dim=1).tolist()
        chosen = sorted(range(n), key=lambda row: (-norms[row], row))[:k]
        update = torch.zeros(n, m, dtype=torch.float64)
        for row in chosen:
            update[row] = sum(M[row] for M in Ms) / len(Ms)
        for w, M in enumerate(Ms):
            kept[spec.name, w] = M.clone()
            kept[spec.name, w][chosen] = 0
        updates.append(update.view(spec.shape))
    return updates


@pytest.mark.parametrize(("density", "sketch"), [(0.2, 4), (0.05, 1), (0.5, 2)])
def test_as_an_obvious_twin(density, sketch):
    exchange, plan = exchange_for("arctopk", workers=3, density=density, sketch=sketch)
    kept: dict = {}
    for step in range(4):
        xs_W = gradients(workers=3, step=step).tensors
        updates = exchange([x_W.clone() for x_W in xs_W], StepInfo(plan, step))
        wanted = twin_step(xs_W, kept, step, density, sketch, 3)
        for update, expected in zip(updates, wanted, strict=True):
            torch.testing.assert_close(update, expected, rtol=1e-10, atol=1e-10)
    assert kept
    found = residuals(exchange)
    for (name, worker), residual in kept.items():
        torch.testing.assert_close(found[name][worker].flatten(), residual.flatten(), rtol=1e-10, atol=1e-10)


def test_the_rows_do_not_hang_on_the_order_of_equal_norms():
    """Equal rows have equal norms: the lower ones are sent."""
    whole = torch.ones(2, 10, 64, dtype=torch.float64)
    exchange, plan = exchange_for("arctopk", 2, [TensorSpec("w", (10, 64))], error_feedback=False)
    (update,) = exchange([whole], StepInfo(plan, 0))
    assert update[:2].eq(1).all() and not update[2:].any()


@pytest.mark.parametrize(("density", "rows"), [(0.2, 13), (0.001, 1), (0.07, 5)])
def test_bytes(density, rows):
    spec = TensorSpec("w", (64, 8, 3, 3))
    assert payload_bytes(ARCTopK(density), spec, density, 4) == 4 * (64 * 4 + rows * 72)


def test_a_matrix_that_would_not_shrink_travels_dense():
    spec = TensorSpec("w", (64, 72))
    assert payload_bytes(ARCTopK(1), spec, 1, 4) == payload_bytes(ARCTopK(0.2, 64), spec, 0.2, 4) == 4 * spec.numel


@pytest.mark.parametrize(
    ("options", "said"),
    [({"density": 0}, "density must be"), ({"density": 1.5}, "density"), ({"sketch": 0}, "sketch must be")],
)
def test_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        ARCTopK(**options)
