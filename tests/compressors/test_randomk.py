"""RandomK: the draw, the twin that keeps the drawn entries, and the factor that error feedback decides."""

import pytest
import torch

from accordion_bench.codecs.bucket import Bucket, Context
from accordion_bench.codecs.engine import Engine
from accordion_bench.compressors.randomk import RandomK
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from tests.kit.helpers import SPECS, compressor, exchange_for, gradients, residuals


def drawn(spec: TensorSpec, density: float, ctx: Context) -> torch.Tensor:
    """The coordinates [k] of a step, in the order of their values."""
    bucket = Bucket(ctx.step, [spec], [density], ctx.seed)
    return RandomK(density).places(Engine(), bucket, torch.device("cpu"))[0]


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("density", [0.01, 0.1, 0.6, 1.0])
def test_update_is_the_mean_at_the_drawn_entries(density, error_feedback):
    exchange, plan = exchange_for("randomk", density=density, error_feedback=error_feedback)
    for step in range(2):
        kept_W = {name: x.clone() for name, x in residuals(exchange).items()}
        xs_W = gradients(step=step).tensors
        ctx = exchange.context(StepInfo(plan, step, 0.1))
        for spec, x_W, update in zip(SPECS, xs_W, exchange(xs_W, StepInfo(plan, step, 0.1)), strict=True):
            if spec.ndim < 2:
                torch.testing.assert_close(update, x_W.mean(0))
                continue
            p_W = (x_W + kept_W.get(spec.name, 0)).reshape(4, -1)
            chosen = torch.zeros(spec.numel, dtype=torch.bool)
            chosen[drawn(spec, density, ctx)] = True
            k = max(1, int(density * spec.numel))
            assert int(chosen.sum()) == k
            factor = 1 if error_feedback else spec.numel / k
            expected = torch.where(chosen, p_W.mean(0) * factor, 0)
            torch.testing.assert_close(update.reshape(-1), expected, rtol=1e-12, atol=1e-12)
            if error_feedback:  # a projection: what was sent is gone, the rest is kept
                left_W = residuals(exchange)[spec.name].reshape(4, -1)
                assert torch.equal(left_W, torch.where(chosen, torch.zeros(()).double(), p_W))


def test_one_all_reduce_of_values_alone():
    exchange, plan = exchange_for("randomk", 4, density=0.1, dtype=torch.float32)
    exchange(gradients(dtype=torch.float32).tensors, StepInfo(plan, 0, 0.1))
    columns = exchange.comm.ledger.columns()
    values = sum(max(1, spec.numel // 10) if spec.ndim > 1 else spec.numel for spec in SPECS)
    assert columns["payload_bytes"] == 4 * values
    assert columns["rounds"] == 2 * 3  # of one ring


def test_every_step_and_tensor_has_a_draw_of_its_own():
    exchange, plan = exchange_for("randomk")
    found = [
        tuple(drawn(TensorSpec(name, (50, 20)), 0.1, exchange.context(StepInfo(plan, step, 0.1))).tolist())
        for name in "ab"
        for step in range(3)
    ]
    assert len(set(found)) == 6


def test_error_feedback_sends_everything_in_the_end():
    """A constant gradient, density 0.2: of 60 steps almost all of it has been sent."""
    exchange, plan = exchange_for("randomk", density=0.2)
    xs_W = gradients().tensors
    total = [torch.zeros_like(x[0]) for x in xs_W]
    for step in range(60):
        for t, update in zip(total, exchange(xs_W, StepInfo(plan, step, 0.1)), strict=True):
            t += update
    for t, x_W in zip(total, xs_W, strict=True):
        assert (t / 60 - x_W.mean(0)).norm() < 0.15 * x_W.mean(0).norm()


def test_error_feedback_decides_the_factor():
    assert compressor("randomk", error_feedback=False).compressor.traits.unbiased
    assert not compressor("randomk").compressor.traits.unbiased
    assert RandomK(0.25, False).factor(TensorSpec("m", (8, 5)), 0.25) == 4
    assert RandomK(0.25, True).factor(TensorSpec("m", (8, 5)), 0.25) == 1
