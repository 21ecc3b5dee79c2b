"""The dynamic programming of `lgreco` and `advised` against trying everything, in bytes and in time."""

import itertools
import math
import sys

import numpy as np
import pytest

from accordion_bench.adaptive.lgreco import CELLS, Turn, choose, earliest_end, end, total


def instance(seed, tensors=4, levels=4):
    """Errors that fall and bytes that rise with the level, at random."""
    draw = np.random.default_rng(seed)
    errors = np.sort(draw.exponential(size=(tensors, levels)), axis=1)[:, ::-1].copy()
    return errors, np.sort(draw.integers(1, 1000, size=(tensors, levels)), axis=1).astype(float)


def at_once(tensors=4):
    return [Turn(0.0, 0.0, range(tensors))]


def turns_at_random(seed, tensors=4):
    """Tensors in some buckets, the last ones first, which are ready at some times; and when the backward pass ends."""
    draw = np.random.default_rng(1000 + seed)
    cuts = sorted(draw.choice(range(1, tensors), size=seed % tensors, replace=False).tolist())
    groups = [list(range(a, b)) for a, b in itertools.pairwise([0, *cuts, tensors])][::-1]
    ready = np.sort(draw.uniform(0, 1500, len(groups)))
    turns = [Turn(float(at), float(draw.integers(0, 100)), group) for at, group in zip(ready, groups, strict=True)]
    turns.insert(int(draw.integers(0, len(turns) + 1)), Turn(float(draw.uniform(0, 1500)), 50.0, []))  # dense tensors
    return turns, float(draw.uniform(0, 2500))


@pytest.mark.parametrize("seed", range(40))
def test_fewest_bytes_equal_trying_everything(seed):
    errors, payload = instance(seed)
    limit = [50, 100, 400, CELLS][seed % 4]
    cells = np.maximum(np.ceil(errors / (errors.max() / limit * 1.5)), 1)
    found = earliest_end(cells, payload, limit, at_once())
    feasible = [c for c in itertools.product(range(4), repeat=4) if total(cells, c) <= limit]
    if not feasible:
        assert found is None
        return
    best = min((total(payload, c), total(cells, c)) for c in feasible)
    assert found is not None and (total(payload, found), total(cells, found)) == best


@pytest.mark.parametrize("seed", range(80))
def test_earliest_end_with_the_least_error_equals_trying_everything(seed):
    errors, seconds = instance(seed)
    turns, wait = turns_at_random(seed)
    limit = [50, 100, 400, CELLS][seed % 4]
    cells = np.maximum(np.ceil(errors / (errors.max() / limit * 1.5)), 1)
    found = earliest_end(cells, seconds, limit, turns, wait)
    feasible = [c for c in itertools.product(range(4), repeat=4) if total(cells, c) <= limit]
    if not feasible:
        assert found is None
        return
    best = min((end(seconds, c, turns, wait), total(cells, c)) for c in feasible)
    assert found is not None and (end(seconds, found, turns, wait), total(cells, found)) == best


@pytest.mark.parametrize("seed", range(40))
def test_of_levels_that_lose_the_same_the_one_with_fewer_bytes(seed):
    """Where all is hidden, too: a tensor never gets a level for which another one of fewer bytes would do as well."""
    errors, seconds = instance(seed)
    errors[:, 2] = errors[:, 3]
    turns, wait = turns_at_random(seed)
    found = choose(errors, seconds, [3] * 4, total(errors, [1] * 4), turns, wait)
    assert 3 not in found


@pytest.mark.parametrize("seed", range(40))
def test_what_is_hidden_costs_no_error(seed):
    """Slow computation: the least error that the levels can reach. A slow link, nothing hidden: the fewest bytes."""
    errors, seconds = instance(seed)
    limit = total(errors, [1] * 4)
    turns, _ = turns_at_random(seed)
    assert choose(errors, seconds, [1] * 4, limit, turns, wait=1e6) == [3] * 4
    fewest = choose(errors, seconds, [1] * 4, limit, at_once())
    late = [turn._replace(ready=0.0) for turn in turns]
    exposed = choose(errors, seconds, [1] * 4, limit, late)
    assert total(seconds, exposed) == total(seconds, fewest) and total(errors, exposed) <= limit * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_neither_later_nor_more_error_than_what_is_refined(seed):
    errors, seconds = instance(seed, tensors=6)
    turns, wait = turns_at_random(seed, tensors=6)
    refined = np.random.default_rng(seed).integers(0, 4, 6).tolist()
    for own, least in ((turns, wait), (at_once(6), 0.0)):
        before = math.inf
        for alpha in (0.25, 1.0, 1.5, 4.0):
            limit = alpha * total(errors, refined)
            found = choose(errors, seconds, refined, limit, own, least)
            if total(errors, errors.argmin(1)) <= limit * (1 - len(refined) / CELLS):
                assert total(errors, found) <= limit * (1 + 1e-12)
            if alpha >= 1:
                now = end(seconds, found, own, least)
                assert now <= end(seconds, refined, own, least)
                assert now <= before  # more error allowed, never a later end
                before = now


def test_within_the_cells_of_the_true_optimum():
    """Rounding up costs at most one cell per tensor: it is as good as the exact optimum of a limit less that much."""
    for seed in range(20):
        errors, seconds = instance(seed)
        for turns, wait in ((at_once(), 0.0), turns_at_random(seed)):
            limit = total(errors, [1] * 4)
            found = choose(errors, seconds, [1] * 4, limit, turns, wait)
            smaller = limit * (1 - 4 / CELLS)
            within = [c for c in itertools.product(range(4), repeat=4) if total(errors, c) <= smaller]
            assert end(seconds, found, turns, wait) <= min(end(seconds, c, turns, wait) for c in within)


def test_edges_of_the_limit():
    errors, payload = np.array([[2.0, 1.0], [2.0, 1.0]]), np.array([[1.0, 5.0], [2.0, 5.0]])
    two = at_once(2)
    assert choose(errors, payload, [1, 1], 1.5, two) == [1, 1]  # below what the levels can reach
    found = choose(errors, payload, [0, 1], 3.0, two)
    assert found == [1, 0] or total(payload, found) == 6
    assert choose(errors * 0, payload, [1, 0], 0.0, two) == [1, 0]  # nothing to lose
    # what is refined fills the limit exactly, although rounding would hide it
    third = np.array([[1 / 3, 0.0]] * 3)
    assert choose(third, np.array([[1.0, 9.0]] * 3), [0, 0, 0], total(third, [0, 0, 0]), at_once(3)) == [0, 0, 0]


def lines(function, *args) -> int:
    """How many lines of `function` itself are carried out."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, _):
        nonlocal count
        count += event == "line"
        return trace if frame.f_code is function.__code__ else None

    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return count


def test_the_work_in_python_does_not_grow_with_the_cells():
    """A loop over tensors and levels; what is done for each of the 10,000 cells of the axis is NumPy's."""
    errors, payload = instance(0, tensors=60, levels=8)
    counts = []
    for limit in (1000, CELLS):
        cells = np.maximum(np.ceil(errors / (total(errors, [4] * 60) / limit)), 1)
        assert earliest_end(cells, payload, limit, at_once(60)) is not None
        counts.append(lines(earliest_end, cells, payload, limit, at_once(60)))
    assert counts[0] <= 10 * 60 * 8 and counts[1] <= 10 * 60 * 8
