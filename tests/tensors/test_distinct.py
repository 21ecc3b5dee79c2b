"""Distinct random numbers of a generator: what they are, and that every set is equally likely."""

import itertools
from collections import Counter

import pytest
import torch

from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.keyed_rng import draw_distinct


@pytest.mark.parametrize("n", [1, 2, 5, 64, 1000, 100_003])
def test_drawn_numbers_are_distinct_ascending_and_keyed(n):
    for k in sorted({1, n // 100, n // 3, n // 2, n // 2 + 1, n - 1, n} & set(range(n + 1))):
        drawn = draw_distinct(n, k, keyed_rng.generator(7, n, k))
        assert len(drawn) == k and drawn.dtype == torch.int64
        assert bool((drawn.diff() > 0).all()) and (k == 0 or 0 <= drawn[0] <= drawn[-1] < n)
        assert torch.equal(drawn, draw_distinct(n, k, keyed_rng.generator(7, n, k)))


def test_few_numbers_are_the_same_whether_sorted_or_marked(monkeypatch):
    found = []
    for few in (1, 10**9):
        monkeypatch.setattr(keyed_rng, "FEW", few)
        found.append(draw_distinct(100_003, 40_000, keyed_rng.generator(7, "few")))
    assert torch.equal(*found)


@pytest.mark.parametrize(("n", "k"), [(5, 2), (5, 3), (6, 1), (6, 3), (4, 3)])
def test_every_set_is_equally_likely(n, k):
    generator, times = keyed_rng.generator("sets", n, k), 4000
    counts = Counter(tuple(draw_distinct(n, k, generator).tolist()) for _ in range(times))
    sets = list(itertools.combinations(range(n), k))
    expected = times / len(sets)
    statistic = sum((counts[s] - expected) ** 2 / expected for s in sets)
    freedom = len(sets) - 1
    assert set(counts) <= set(sets) and abs(statistic - freedom) < 4 * (2 * freedom) ** 0.5
