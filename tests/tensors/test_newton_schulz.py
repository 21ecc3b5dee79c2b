"""Newton-Schulz: what it does to singular values, to scale, to shapes, and to many matrices at once."""

import pytest
import torch

from accordion_bench.codecs.orthonormal import COEFFICIENTS, orthogonalise

SHAPES = [(6, 6), (4, 9), (9, 4), (2, 30)]


def matrices(count, n, m, seed=0):
    return torch.randn(count, n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def polynomial(s, steps=5):
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return s


@pytest.mark.parametrize("n, m", SHAPES)
def test_singular_vectors_stay_and_the_polynomial_acts_on_singular_values(n, m):
    x_G = matrices(3, n, m)
    u, s, v = torch.linalg.svd(x_G, full_matrices=False)
    s = s / s.norm(dim=1, keepdim=True)
    expected = u @ torch.diag_embed(polynomial(s)) @ v
    assert float((orthogonalise(x_G) - expected).abs().max()) < 1e-12


def test_singular_values_end_in_the_band_of_the_coefficients():
    """As the docstring says; and smaller ones are still raised 400 times."""
    s = torch.linspace(0.002, 1, 100_001, dtype=torch.float64)
    assert float(polynomial(s).min()) > 0.68 and float(polynomial(s).max()) < 1.21
    tiny = torch.linspace(1e-6, 1e-4, 100, dtype=torch.float64)
    assert float((polynomial(tiny) / tiny).min()) > 400


@pytest.mark.parametrize("n, m", SHAPES)
def test_a_multiple_of_an_orthogonal_matrix_stays_one(n, m):
    q = torch.linalg.svd(matrices(1, n, m), full_matrices=False)
    orthogonal = q.U @ q.Vh
    found = orthogonalise(7.3 * orthogonal)
    factor = float((found * orthogonal).sum() / orthogonal.square().sum())
    assert 0.68 < factor < 1.21
    assert float((found - factor * orthogonal).abs().max()) < 1e-13


def test_scale_does_not_matter():
    x_G = matrices(2, 5, 8)
    assert float((orthogonalise(x_G) - orthogonalise(1e-3 * x_G)).abs().max()) < 1e-12
    assert torch.equal(orthogonalise(x_G), orthogonalise(1024 * x_G))


@pytest.mark.parametrize("n, m", SHAPES)
def test_the_transposed_matrix_gives_the_transposed_result(n, m):
    x_G = matrices(2, n, m)
    if n == m:
        assert float((orthogonalise(x_G.mT) - orthogonalise(x_G).mT).abs().max()) < 1e-12
    else:
        assert torch.equal(orthogonalise(x_G.mT), orthogonalise(x_G).mT)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_many_at_once_are_one_by_one(dtype):
    x_G = matrices(5, 6, 10).float()
    alone = torch.cat([orthogonalise(x[None], 5, dtype) for x in x_G])
    batched = orthogonalise(x_G, 5, dtype)
    assert batched.dtype == torch.float32
    assert float((batched - alone).abs().max()) < (1e-5 if dtype is None else 0.02)


def test_zero_stays_zero():
    x_G = torch.stack([torch.zeros(3, 4, dtype=torch.float64), matrices(1, 3, 4)[0]])
    found = orthogonalise(x_G)
    assert not found[0].any() and torch.isfinite(found).all()


def test_more_steps_are_no_more_than_the_same_again():
    x_G = matrices(1, 4, 4)
    _, s, _ = torch.linalg.svd(orthogonalise(x_G, 9))
    assert float(s.min()) > 0.68 and float(s.max()) < 1.14  # from where everything has come into the inner band
