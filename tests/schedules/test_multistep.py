"""Decays at milestones, epoch by epoch."""

import pytest

from accordion_bench.schedules.learning_rate import MultiStep


def factors(epochs: int, **options) -> list[float]:
    factor = MultiStep(epochs, workers=1, warmup_epochs=0, **options)
    return [factor(epoch) for epoch in range(epochs)]


def test_shares_are_rounded_to_epochs():
    assert factors(12) == pytest.approx([1] * 6 + [0.1] * 4 + [0.01] * 2)
    assert factors(4, milestones=(0.5, 3), gamma=0.5) == [1, 1, 0.5, 0.25]
    assert factors(3) == pytest.approx([1, 1, 0.01])  # both shares fall on epoch 2


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_nothing_decays_before_the_first_epoch_is_over(epochs):
    assert factors(epochs, milestones=(0.1, 0.2, 0.3))[0] == factors(epochs)[0] == 1
