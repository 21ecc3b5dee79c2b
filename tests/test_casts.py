"""16-bit sums."""

import torch

from tests.helpers import exchange_for, gradients, residuals


def test_what_float16_cannot_hold_is_cut_and_kept_as_residual():
    """Finite gradients never become infinite updates; error feedback sends the rest later."""
    for error_feedback in (False, True):
        exchange, plan = exchange_for("fp16", error_feedback=error_feedback, dtype=torch.float32)
        xs_W = [x.sign() * 3e5 for x in gradients(dtype=torch.float32).tensors]
        for update in exchange(xs_W, plan, 0, 0.1):
            assert update.isfinite().all() and update.abs().max() <= 65_504
        assert all(e.isfinite().all() for e in residuals(exchange).values())
    zeros = [torch.zeros_like(x) for x in xs_W]
    total = sum(exchange(zeros, plan, step, 0.1)[1] for step in range(1, 30))
    assert total.abs().max() > 65_504


def test_division_comes_before_the_cast():
    exchange, plan = exchange_for("fp16", dtype=torch.float32)
    xs_W = [torch.full_like(x, 60_000.0) for x in gradients(dtype=torch.float32).tensors]
    for update in exchange(xs_W, plan, 0, 0.1):
        torch.testing.assert_close(update, torch.full_like(update, 60_000.0), rtol=1e-3, atol=0)
