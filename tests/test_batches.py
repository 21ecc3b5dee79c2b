"""Samples of each worker in each step: every sample once, at least one for each worker, shares by size."""

import pytest

from accordion_bench.batches import UnequalSteps, largest, unequal, weights


def test_a_list_of_equal_numbers_is_that_number():
    assert unequal([8, 8, 8]) == unequal(8) == () and largest([8, 8, 8]) == 8
    assert unequal([8, 4]) == (8, 4) and largest([8, 4]) == 8


def test_weights_are_one_on_average():
    assert weights([64, 32, 32, 32]) == [1.6, 0.8, 0.8, 0.8]
    assert sum(weights([7, 1, 3])) == pytest.approx(3)


@pytest.mark.parametrize("sizes", [(64, 32, 32, 32), (1, 2), (64, 1), (5, 3, 1), (2, 1, 1, 1, 1)])
def test_every_sample_is_seen_once_and_each_worker_sees_one(sizes):
    total = sum(sizes)
    for samples in range(total, 4 * total + 1):
        steps = UnequalSteps(samples, sizes)
        taken = [steps.of(step) for step in range(steps.steps)]
        assert sum(map(sum, taken)) == samples == sum(steps.of_epoch())
        assert steps.of_epoch() == tuple(map(sum, zip(*taken, strict=True)))
        assert [steps.before(step) for step in range(len(taken) + 1)] == [
            sum(map(sum, taken[:step])) for step in range(len(taken) + 1)
        ]
        assert steps.kinds() == {n for own in taken for n in own}
        assert all(own == sizes for own in taken[:-1])
        left, last = samples % total, taken[-1]
        assert min(last) >= 1
        if left >= len(sizes):  # a step of its own, within the batches
            assert sum(last) == left and all(n <= most for n, most in zip(last, sizes, strict=True))
            shares = zip(last, sizes, strict=True)
            assert all(abs(n - 1 - (left - len(sizes)) * (m - 1) / (total - len(sizes))) < 1 for n, m in shares)
        else:
            assert all(0 <= n - most <= 1 for n, most in zip(last, sizes, strict=True))
