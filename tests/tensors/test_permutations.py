"""Keyed permutations: what they are, the same by numba as by torch, and draws that look like drawn ones."""

import math

import numpy as np
import pytest
import torch

from accordion_bench.tensors import kernels, keyed_rng
from accordion_bench.tensors.permutations import FEW, HIGH, LONG, LOW, MANY, ROUNDS, Draws, images, words_of
from tests.kit.gpu import gpu_for_triton

SMALL = range(1, 71)
POWERS = [2**m + d for m in range(7, 18) for d in (-1, 0, 1)]
WITHIN = 4.5  # standard deviations


def own_keys(purpose: str, count: int) -> list[int]:
    return [keyed_rng.key(purpose, i) for i in range(count)]


def drawn(n: int, k: int, times: int, purpose: str = "draws") -> np.ndarray:
    """Draws of so many keys, [times, k]."""
    draws, words = Draws([n] * times, [k] * times), words_of(own_keys(f"{purpose} {n} {k}", times))
    return torch.stack(images(draws, words)).numpy()


def deviation(counts: np.ndarray, expected: float) -> float:
    """Of chi square from what is expected of equal shares, in standard deviations."""
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


# ---- what they are


@pytest.mark.parametrize("key", [0, 1, 2**63 - 1])
def test_all_images_are_all_numbers(key):
    lengths = [*SMALL, *POWERS]
    for n, own in zip(lengths, images(Draws(lengths, lengths), words_of([key] * len(lengths))), strict=True):
        assert torch.equal(own.sort().values, torch.arange(n)), n


def test_known_images():
    """What is drawn may never change."""
    lengths, counts = [1, 2, 7, 1000, 65_535, 65_536, 589_824], [1, 2, 7, 6, 5, 5, 5]
    found = images(Draws(lengths, counts), words_of([3] * len(lengths)))
    assert [own.tolist() for own in found] == [
        [0],
        [1, 0],
        [6, 4, 5, 1, 3, 0, 2],
        [940, 357, 188, 961, 899, 868],
        [46020, 49966, 40497, 44666, 5532],
        [50819, 43777, 9022, 24169, 45324],
        [418662, 403598, 89922, 320676, 342600],
    ]


def test_few_images_are_the_first_of_many():
    lengths = [5, 100, 70_000]
    words = words_of([4, 5, 6])
    many, few = images(Draws(lengths, lengths), words), images(Draws(lengths, [2, 1, 40_000]), words)
    assert all(torch.equal(own[: len(some)], some) for own, some in zip(many, few, strict=True))


def test_parts_fit_and_nearly_everything_is_within():
    lengths = [*SMALL, *POWERS, 2**31 - 1, 2**31, 2**33 + 1]
    rows = Draws(lengths, [1] * len(lengths)).rows[:-1]
    domain = rows[:, HIGH] << rows[:, LOW]
    assert ((domain >= lengths) & (domain - lengths < 1 << rows[:, LOW]) & (rows[:, LOW] > 0)).all()
    assert (rows[:, ROUNDS] == np.where(np.array(lengths) < LONG, MANY, FEW)).all()


# ---- engines


def cases() -> tuple[Draws, torch.Tensor]:
    """Lengths of every kind, from nothing to all of each."""
    lengths, counts = [], []
    for n in (0, *SMALL, *POWERS[:15], 65_535, 65_536, 65_537, 100_003):
        for k in {min(n, 1), n // 3, n}:
            lengths.append(n)
            counts.append(k)
    return Draws(lengths, counts), words_of(own_keys("engines", len(lengths)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_numba_makes_the_same(dtype):
    if not kernels.installed():
        pytest.skip("numba is not installed")
    from accordion_bench.tensors.kernels import on_cpu

    draws, words = cases()
    draws.dtype = dtype
    out = on_cpu.draw(draws, words)
    assert out.dtype == dtype
    for own, (first, last) in zip(images(draws, words), draws.spans, strict=True):
        assert torch.equal(out[first:last].long(), own)


@pytest.mark.parametrize("n", [2**31 - 1, 2**31, 2**40 + 12345])
def test_long_ones(n):
    draws, words = Draws([n], [300]), words_of([9])
    (own,) = images(draws, words)
    assert 0 <= int(own.min()) < int(own.max()) < n and len(own.unique()) == 300
    if kernels.installed():
        from accordion_bench.tensors.kernels import on_cpu

        assert torch.equal(on_cpu.draw(draws, words)[:300].long(), own)


@pytest.mark.parametrize("more", [{}, {2**33 + 1: 40}], ids=["int32", "int64"])
def test_triton_makes_the_same(more):
    some = {1: 1, 2: 2, 5: 4, 70: 70, 1025: 1025, 65_537: 33, 100_003: 1300, **more}
    draws, words = Draws(list(some), list(some.values())), words_of(own_keys("triton", len(some)))
    with gpu_for_triton() as gpu:
        from accordion_bench.tensors.kernels.on_gpu.drawn import draw

        out = draw(draws, words.to(gpu.device)).cpu()
    assert out.dtype == draws.dtype == (torch.int64 if more else torch.int32)
    for own, (first, last) in zip(images(draws, words), draws.spans, strict=True):
        assert torch.equal(out[first:last].long(), own)


# ---- draws


@pytest.mark.parametrize(
    ("n", "k"),
    [(2, 1), (3, 1), (3, 2), (4, 2), (4, 3), (5, 1), (5, 4), (6, 3), (7, 2), (8, 2), (8, 4), (9, 3), (10, 5), (12, 3)],
)
def test_every_set_is_equally_likely(n, k):
    """With 16 rounds 8 choose 4 fails."""
    sets = math.comb(n, k)
    times = 200 * sets
    codes = (1 << drawn(n, k, times)).sum(1)
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == sets and deviation(counts, times / sets) < WITHIN


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(5, 1), (7, 2), (8, 4), (16, 2), (17, 2), (30, 2), (33, 3)])
def test_every_set_is_equally_likely_in_many_draws(n, k):
    sets, counts = math.comb(n, k), {}
    per = 3000 if sets < 600 else 300
    for part in range(per // 100):
        codes = (1 << drawn(n, k, 100 * sets, f"part {part}")).sum(1)
        for code, count in zip(*np.unique(codes, return_counts=True), strict=True):
            counts[int(code)] = counts.get(int(code), 0) + int(count)
    assert len(counts) == sets and deviation(np.array(list(counts.values())), per) < WITHIN


@pytest.mark.parametrize(("n", "k"), [(5, 5), (70, 7), (128, 13), (1000, 10)])
def test_every_image_is_uniform(n, k):
    """Whatever its place in the order."""
    times = 40 * n
    for place in drawn(n, k, times).T:
        assert deviation(np.bincount(place, minlength=n), times / n) < WITHIN


def included(n: int, k: int, times: int, purpose: str = "inclusion") -> np.ndarray:
    """Which numbers each draw holds, bool [times, n]."""
    hit = np.zeros((times, n), bool)
    np.put_along_axis(hit, drawn(n, k, times, purpose), True, axis=1)
    return hit


def mean_is(values: np.ndarray, expected: float) -> bool:
    return abs(values.mean() - expected) < WITHIN * values.std() / math.sqrt(len(values))


def check_inclusion(hit: np.ndarray, k: int) -> None:
    """Each number, each pair at some distances, and successive draws, as of sets that are equally likely."""
    times, n = hit.shape
    share, both = k / n, k * (k - 1) / (n * (n - 1))
    found = ((hit.sum(0) - times * share) ** 2 / (times * share * (1 - share))).sum()
    assert abs(found * (n - 1) / n - (n - 1)) < WITHIN * math.sqrt(2 * n)
    side = 1 << int(Draws([n], [k]).rows[0, LOW])  # numbers with a half in common are as far apart
    for distance in (1, 2, side // 2, side, side + 1, 5 * side):
        assert mean_is((hit[:, distance:] & hit[:, :-distance]).mean(1), both), distance
    assert mean_is((hit[1:] & hit[:-1]).sum(1), k * share)


@pytest.mark.parametrize(("n", "k"), [(300, 30), (1000, 500), (1025, 100), (4096, 410), (65_537, 6553)])
def test_numbers_pairs_and_successive_draws(n, k):
    check_inclusion(included(n, k, max(60, 400_000 // n)), k)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(65_535, 655), (100_003, 10_000), (589_824, 58_982), (2**20, 2**20 // 100)])
def test_numbers_pairs_and_successive_draws_of_large_ones(n, k):
    check_inclusion(np.concatenate([included(n, k, 20, f"part {part}") for part in range(12)]), k)


def test_neighbouring_keys_draw_apart():
    """Keys are hashed; draws of steps have nothing in common that their order would show."""
    n, k, times = 1000, 100, 400
    hit = np.zeros((times, n), bool)
    draws = Draws([n] * times, [k] * times)
    own = torch.stack(images(draws, words_of(range(times)))).numpy()
    np.put_along_axis(hit, own, True, axis=1)
    check_inclusion(hit, k)
