"""Products with thin factors by Triton's kernels, against float64 and torch."""

import pytest
import torch
from torch import Tensor

SIZES = [(1, 1), (1, 70), (70, 1), (3, 5), (64, 27), (130, 72), (33, 1000), (300, 129), (3, 1100)]


def batches(rank: int, workers: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices [W, G, n, m] and factors [G, m, r]: ordinary ones, zeros, and of rank one."""
    generator = torch.Generator().manual_seed(rank)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    matrices_W, factors = [], []
    for t, (n, m) in enumerate(SIZES):
        G = 1 + t % 2
        M_W = draw(workers, G, n, m) * 10.0 ** (t % 3)
        if t == 3:
            M_W.zero_()
        if t == 4:
            M_W = draw(workers, G, n, 1) @ draw(workers, G, 1, m)
        matrices_W.append(M_W)
        factors.append(draw(G, m, min(n, m, rank)))
    return matrices_W, factors


def error(found: Tensor, wide: Tensor) -> float:
    """Largest difference from float64."""
    return float((found.double() - wide).abs().max())


def near(found: Tensor, wide: Tensor, narrow: Tensor, terms: int) -> None:
    """No further from float64 than twice what torch's own arithmetic is, but for one rounding."""
    rounding = torch.finfo(narrow.dtype).eps * float(wide.abs().max())
    assert found.shape == wide.shape
    assert error(found, wide) <= 2 * error(narrow, wide) + rounding * (1 if terms > 1 else 0)


@pytest.mark.sample(6)
@pytest.mark.parametrize("transposed", ["none", "all", "some"])
@pytest.mark.parametrize(("rank", "workers"), [(1, 1), (2, 3), (4, 1), (8, 1), (11, 1)])
def test_products_are_those_of_float64(triton, rank, workers, transposed):
    matrices_W, factors = batches(rank, workers)
    given = [M_W.contiguous() for M_W in matrices_W]
    there = [triton.to(M_W.mT.contiguous()).mT if _is(transposed, t) else triton.to(M_W) for t, M_W in enumerate(given)]
    found = triton.engine.multiply(there, triton.to(factors))
    for M_W, F, own in zip(given, factors, found, strict=True):
        narrow, wide = F.mT @ M_W.mT, F.mT.double() @ M_W.mT.double()
        near(own.cpu(), wide, narrow, M_W.shape[3])


def _is(transposed: str, t: int) -> bool:
    return transposed == "all" or (transposed == "some" and t % 2 == 0)


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("rank", "workers"), [(1, 3), (2, 1), (8, 1)])
def test_factors_are_multiplied_and_subtracted(triton, rank, workers, dtype):
    """Factors lie in rows or in columns; targets in longer rows; not all of a batch are asked for."""
    matrices_W, rights = batches(rank, workers, dtype)
    lefts = [
        torch.randn(F.shape[0], M_W.shape[2], F.shape[2], dtype=dtype)
        for M_W, F in zip(matrices_W, rights, strict=True)
    ]
    made = triton.engine.products(triton.to(lefts), [triton.to(F).mT for F in rights])
    rows_W = [torch.cat([M_W, M_W], dim=1).flatten(1) for M_W in matrices_W]
    there, targets_W = triton.to(rows_W), []
    for M_W, row_W in zip(matrices_W, there, strict=True):
        shape, last = M_W.shape[2:], M_W.shape[1] - 1
        targets_W.append({last: row_W[:, last * shape.numel() : (last + 1) * shape.numel()].unflatten(1, shape)})
    expand = lambda x: x.expand(workers, -1, -1, -1)  # noqa: E731
    rights_W = [triton.to(expand(F).mT.contiguous()) for F in rights]
    triton.engine.subtract_products(targets_W, [expand(triton.to(L)) for L in lefts], rights_W, 0.25)
    for t, (M_W, L, F) in enumerate(zip(matrices_W, lefts, rights, strict=True)):
        wide, narrow, last = L.double() @ F.mT.double(), L @ F.mT, len(L) - 1
        near(made[t].cpu(), wide, narrow, rank)
        left_W, size = M_W[:, last] - 0.25 * narrow[last], M_W[0, 0].numel()
        own_W = there[t].cpu().split([last * size, size, len(rows_W[t][0]) - (last + 1) * size], dim=1)
        near(own_W[1].view_as(left_W), M_W[:, last].double() - 0.25 * wide[last], left_W, rank)
        assert torch.equal(own_W[0], rows_W[t][:, : last * size])
        assert torch.equal(own_W[2], rows_W[t][:, (last + 1) * size :])


@pytest.mark.sample(2)
@pytest.mark.parametrize("transposed", ["none", "all"])
def test_sums_are_those_of_a_worker_alone_wherever_it_lies(triton, transposed):
    matrices_W, factors = batches(2, 2)
    turn = lambda x_W: x_W.mT if transposed == "all" else x_W  # noqa: E731
    factors = [
        F if transposed == "none" else torch.randn(len(F), M_W.shape[2], 2)
        for M_W, F in zip(matrices_W, factors, strict=True)
    ]
    together = triton.engine.multiply([turn(triton.to(M_W)) for M_W in matrices_W], triton.to(factors))
    for w in range(2):
        shifted = [torch.cat([M_W.new_zeros(1), M_W[w].flatten()]) for M_W in matrices_W]  # no 16 bytes at once
        alone_W = [triton.to(row)[1:].view_as(M_W[:1]) for row, M_W in zip(shifted, matrices_W, strict=True)]
        alone = triton.engine.multiply([turn(M_W) for M_W in alone_W], triton.to(factors))
        assert all(torch.equal(a[0].cpu(), b[w].cpu()) for a, b in zip(alone, together, strict=True))


TERM_CASES = [
    (2, 3, 1, "some", torch.float32),
    (1, 1, 0, "none", torch.float32),
    (8, 1, 0, "all", torch.float64),
    (2, 2, 1, "none", torch.float32),
    (11, 2, 1, "some", torch.float32),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("rank", "workers", "shift", "transposed", "dtype"), TERM_CASES)
def test_terms_are_added_first_to_the_bit(triton, rank, workers, shift, transposed, dtype):
    """Equals an addition in place and then a product; for terms at any address, of matrices in one batch."""
    matrices_W, factors = batches(rank, workers, dtype)
    terms_W = [M_W.flip(1).sin().mul(3) for M_W in matrices_W]
    terms_W[5][0, 0, 0, 0] = torch.inf
    turn = lambda x, t: x.mT.contiguous().mT if _is(transposed, t) else x.contiguous()  # noqa: E731
    given = [turn(M_W, t) for t, M_W in enumerate(matrices_W)]
    added = [turn(M_W + T_W, t) for t, (M_W, T_W) in enumerate(zip(matrices_W, terms_W, strict=True))]

    def lay(x_W: Tensor) -> Tensor:
        """On the device, beginning after `shift` numbers, with contiguous rows or columns as before."""
        held = triton.to(torch.cat([x_W.new_zeros(shift), x_W.flatten()]))
        return held[shift:].view(x_W.shape)

    there = [lay(M_W.mT).mT if _is(transposed, t) else lay(M_W) for t, M_W in enumerate(given)]
    own_W = [[lay(T.mT).mT if _is(transposed, t) else lay(T) for T in T_W.unbind(1)] for t, T_W in enumerate(terms_W)]
    found = triton.engine.multiply(there, triton.to(factors), own_W)
    sums = [triton.to(x_W.mT).mT if _is(transposed, t) else triton.to(x_W) for t, x_W in enumerate(added)]
    expected = triton.engine.multiply(sums, triton.to(factors))
    for a, b in zip([*there, *found], [*added, *expected], strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=0, atol=0, equal_nan=True)


def test_high_ranks_are_multiplied_by_torch(triton):
    M_W, F = torch.randn(1, 1, 40, 60), torch.randn(1, 60, 20)
    (found,) = triton.engine.multiply([triton.to(M_W)], [triton.to(F)])
    torch.testing.assert_close(found.cpu(), F.mT @ M_W.mT)
    assert (
        triton.engine.multiply([], [])
        == triton.engine.products([], [])
        == triton.engine.replace_degenerate([], [])
        == []
    )


def test_new_matrices_take_the_place_of_old_ones_unless_they_are_zero(triton, there):
    news = [torch.randn(3, 50, 2), torch.randn(2, 7, 1), torch.randn(1, 2100, 3)]
    olds = [torch.randn(3, 50, 2), torch.randn(1, 7, 1), torch.randn(1, 2100, 3)]
    news[0][1], news[0][2, 3, 1], news[1][0] = 0, float("nan"), 0
    news[1][1, 2], news[2][0, 5, 0] = 1e-45, float("inf")
    expected = [torch.stack([news[0][0], olds[0][1], olds[0][2]]), torch.stack([olds[1][0], news[1][1]]), news[2]]
    for one in (triton, there):
        for turn in (False, True):
            given = [one.to(new.mT.contiguous()).mT if turn else one.to(new) for new in news]
            found = one.engine.replace_degenerate(given, one.to(olds))
            assert all(torch.equal(own.cpu(), wanted) for own, wanted in zip(found, expected, strict=True))


def thin(n: int, r: int, kind: str) -> Tensor:
    """A matrix [n, r]."""
    generator = torch.Generator().manual_seed(n + r)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    half = (r + 1) // 2
    return {
        "drawn": lambda: draw(n, r),
        "scaled": lambda: draw(n, r) * 10.0 ** -torch.arange(r),
        "zero": lambda: torch.zeros(n, r),
        "equal columns": lambda: draw(n, 1) * draw(r),
        "half the rank": lambda: draw(n, half) @ draw(half, r),
        "a zero column": lambda: draw(n, r) * (torch.arange(r) != r // 2),
        "tiny": lambda: draw(n, r) * 1e-38,
        "NaN": lambda: draw(n, r) * float("nan"),
    }[kind]()


@pytest.mark.sample(4)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", ["drawn", "scaled", "zero", "equal columns", "half the rank", "a zero column", "tiny"])
def test_orthonormal_columns_are_those_of_torch(triton, device, kind, passes):
    """Also where some depend on others, which are then replaced; matrices beside them are not touched."""
    factors = [thin(n, r, kind)[None] for n, r in ((1, 1), (40, 1), (9, 2), (70, 4), (30, 5), (600, 8))]
    factors[2:2] = [torch.stack([thin(9, 2, kind), thin(9, 2, "NaN")]), torch.stack([thin(9, 2, "drawn")] * 2)]
    expected = device.engine.orthonormalise(device.to(factors), passes)
    for turn in (False, True):
        given = [triton.to(X.mT.contiguous()).mT if turn else triton.to(X) for X in factors]
        found = triton.engine.orthonormalise(given, passes)
        for number, (own, wanted) in enumerate(zip(found, expected, strict=True)):
            assert own.shape == wanted.shape and own.dtype == wanted.dtype
            some = slice(0, 1) if number == 2 else slice(None)
            torch.testing.assert_close(own.cpu()[some], wanted.cpu()[some], rtol=1e-5, atol=1e-5)
        assert found[2].cpu()[1].isnan().all()
