"""Orthonormal vectors by Cholesky, as a device makes them, against QR."""

import pytest
import torch

from accordion_bench.codecs.orthonormal import orthonormal

SIZES = [(5, 3), (64, 2), (64, 64), (512, 64), (4608, 4)]


def matrix(n: int, r: int, condition: float) -> torch.Tensor:
    """A matrix [n, r] of float32 with singular values from 1 down."""
    generator = torch.Generator().manual_seed(n + r)
    left, right = (torch.randn(side, r, generator=generator, dtype=torch.float64) for side in (n, r))
    spread = torch.logspace(0, -torch.tensor(condition).log10().item(), r, dtype=torch.float64)
    return ((torch.linalg.qr(left).Q * spread) @ torch.linalg.qr(right).Q.T).float()


def of_one(x: torch.Tensor) -> torch.Tensor:
    """Columns [n, r] of one matrix."""
    return orthonormal(x.mT.reshape(-1), [(1, x.shape[1], x.shape[0])]).view(x.mT.shape).mT


def departure(q: torch.Tensor) -> float:
    """Largest entry of Q^T Q - 1."""
    q = q.double()
    return float((q.mT @ q - torch.eye(q.shape[1])).abs().max())


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference of the projections onto two spans, which is the sine of the angle between them."""
    a, b = a.double(), b.double()
    return float(torch.linalg.matrix_norm(a - b @ (b.mT @ a), 2))


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize(("n", "r"), SIZES)
def test_spans_are_those_of_qr(n, r, condition):
    """Nearer to QR in float64 than 1e-7; QR in float32 is condition x 2e-7 away from both, its own span made exactly
    orthonormal, which some LAPACKs leave it by 1e-6."""
    x = matrix(n, r, condition)
    ours, theirs = of_one(x), torch.linalg.qr(torch.linalg.qr(x).Q.double()).Q
    assert departure(ours) < 1e-6
    assert apart(ours, torch.linalg.qr(x.double()).Q) < 1e-7
    assert apart(ours, theirs) < 1e-6 + 2e-7 * condition


@pytest.mark.parametrize(("n", "r"), SIZES)
def test_the_first_vectors_span_what_the_first_given_ones_do(n, r):
    x = matrix(n, r, 100.0)
    for k in range(1, r, max(1, r // 4)):
        assert apart(of_one(x)[:, :k], torch.linalg.qr(x[:, :k].double()).Q) < 1e-6


@pytest.mark.parametrize(("n", "r"), [(2, 2), (6, 3), (64, 16), (64, 64), (300, 64)])
@pytest.mark.parametrize("kind", ["zero", "equal columns", "one row", "half the rank", "tiny", "tiny equal columns"])
def test_dependent_vectors_are_replaced(n, r, kind):
    """As by QR: orthonormal, and what was given is in their span."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x = {
        "zero": lambda: torch.zeros(n, r),
        "equal columns": lambda: draw(n, 1) * draw(r),
        "one row": lambda: torch.cat([torch.zeros(n - 1, r), draw(1, r)]),
        "half the rank": lambda: draw(n, (r + 1) // 2) @ draw((r + 1) // 2, r),
        "tiny": lambda: draw(n, r) * 1e-38,
        "tiny equal columns": lambda: torch.full((n, r), 1e-44),
    }[kind]()
    q = of_one(x)
    assert departure(q) < 1e-6
    rest = x.double() - q.double() @ (q.double().mT @ x.double())
    assert rest.norm() <= 1e-6 * x.double().norm()


def test_a_single_zero_stays_zero():
    assert of_one(torch.zeros(5, 1)).tolist() == [[0.0]] * 5


def test_many_sizes_together_are_each_alone():
    """Padding, neighbours and order change nothing but the last bits, also beside NaN and infinity."""
    sizes = [(3, 2, 20), (1, 4, 20), (2, 1, 7), (2, 4, 33)]
    generator = torch.Generator().manual_seed(2)
    for columns in (False, True):
        parts = [torch.randn(count * r * n, generator=generator) for count, r, n in sizes]
        parts[0][: 2 * 20] = float("nan")
        parts[3][-1] = float("inf")
        together = orthonormal(torch.cat(parts), sizes, columns).split([len(part) for part in parts])
        for part, found, (_, r, n) in zip(parts, together, sizes, strict=True):
            for alone, ours in zip(part.split(r * n), found.split(r * n), strict=True):
                if alone.isfinite().all():
                    expected = orthonormal(alone, [(1, r, n)], columns)
                    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_one_pass_keeps_the_span():
    x = matrix(200, 4, 1e4)
    (q,) = orthonormal(x.reshape(-1), [(1, 4, 200)], columns=True, passes=1).view(1, 200, 4)
    assert departure(q) < 1e-3 and apart(torch.linalg.qr(q.double()).Q, torch.linalg.qr(x.double()).Q) < 1e-6
