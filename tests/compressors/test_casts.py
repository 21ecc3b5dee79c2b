"""16-bit sums."""

from functools import reduce

import torch

from accordion_bench.position import StepInfo
from accordion_bench.tensors.sixteen_bits import share
from tests.kit.helpers import exchange_for, gradients, residuals


def test_what_float16_cannot_hold_is_cut_and_kept_as_residual():
    """Finite gradients never become infinite updates; error feedback sends the rest later."""
    for error_feedback in (False, True):
        exchange, plan = exchange_for("fp16", error_feedback=error_feedback, dtype=torch.float32)
        xs_W = [x.sign() * 3e5 for x in gradients(dtype=torch.float32).tensors]
        for update in exchange(xs_W, StepInfo(plan, 0, 0.1)):
            assert update.isfinite().all() and update.abs().max() <= 65_504
        assert all(e.isfinite().all() for e in residuals(exchange).values())
    zeros = [torch.zeros_like(x) for x in xs_W]
    total = sum(exchange(zeros, StepInfo(plan, step, 0.1))[1] for step in range(1, 30))
    assert total.abs().max() > 65_504


def test_division_comes_before_the_cast():
    exchange, plan = exchange_for("fp16", dtype=torch.float32)
    xs_W = [torch.full_like(x, 60_000.0) for x in gradients(dtype=torch.float32).tensors]
    for update in exchange(xs_W, StepInfo(plan, 0, 0.1)):
        torch.testing.assert_close(update, torch.full_like(update, 60_000.0), rtol=1e-3, atol=0)


def pairwise(parts):
    while len(parts) > 1:
        parts = [sum(parts[i : i + 2][1:], parts[i]) for i in range(0, len(parts), 2)]
    return parts[0]


def ring(parts):
    """Chunk c starts at worker c and grows along the ring, as in a reduce-scatter."""
    workers = len(parts)
    return torch.stack(
        [reduce(torch.add, [parts[(c + i) % workers][c] for i in range(workers)]) for c in range(workers)]
    )


def two_rings(parts):
    """Groups of workers first, then their sums."""
    return reduce(torch.add, [reduce(torch.add, parts[i : i + 8]) for i in range(0, len(parts), 8)])


def test_no_order_of_summation_in_half_precision_overflows():
    generator = torch.Generator().manual_seed(0)
    for workers in range(1, 65):
        huge_A = torch.full((workers, workers), 1e30)
        near_A = 66_000 * (1 - 0.02 * torch.rand(workers, workers, generator=generator))
        for x_A in (huge_A, -huge_A, near_A):
            parts = list(share(x_A, workers, torch.float16))
            for order in (lambda parts: reduce(torch.add, parts), pairwise, ring, two_rings):
                total = order(parts)
                assert total.dtype == torch.float16 and total.isfinite().all(), workers
                if x_A is huge_A:
                    assert total.min() > 65_504 * (1 - workers * torch.finfo(torch.float16).eps)
    assert share(torch.tensor([1e30]), 1, torch.float16).item() == 65_504
