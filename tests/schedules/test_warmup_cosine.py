"""Warm-up and cosine decay, step by step."""

import math

import pytest

from accordion_bench.options.checks import ConfigError
from accordion_bench.schedules.learning_rate import WarmupCosine


def schedule(epochs: int = 10, workers: int = 4, **options) -> WarmupCosine:
    return WarmupCosine(epochs, workers, **{"lr_scaling": "none"} | options)


@pytest.mark.parametrize("scaling, scale", [("none", 1), ("sqrt", 2), ("linear", 4)])
def test_ends_and_middle(scaling, scale):
    factor = schedule(warmup=0.2, start=0.01, final=0.1, lr_scaling=scaling)
    expected = {0: 0.01, 1: 0.505, 2: 1, 6: 0.55, 10: 0.1}
    assert {e: factor(e) / scale for e in expected} == pytest.approx(expected)
    assert factor.rises_until == 2


def test_a_share_and_epochs_are_the_same_warm_up():
    share, epochs = schedule(warmup=0.3), schedule(warmup=3)
    assert [share(e / 7) for e in range(70)] == pytest.approx([epochs(e / 7) for e in range(70)])


def test_it_rises_then_falls():
    values = [schedule(warmup=0.25)(e / 10) for e in range(101)]
    assert values[:26] == sorted(values[:26]) and values[25:] == sorted(values[25:], reverse=True)
    assert max(values) == values[25] == 1 and min(values) > 0


def test_without_warm_up_it_is_the_cosine_alone():
    factor = schedule(warmup=0, final=0)
    assert [factor(e) for e in (0, 5, 10)] == pytest.approx([1, (1 + math.cos(math.pi / 2)) / 2, 0])
    assert factor.rises_until == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"warmup": 10}, "warmup must be shorter than the run of epochs=10, got 10; type warmup=0.05"),
        ({"warmup": -1}, "warmup must be a number at least 0, got -1; type warmup=0.05"),
        ({"start": 0}, "start must be a number above 0 and at most 1, got 0; type start=0.01"),
        ({"final": 2}, "final must be a number at least 0 and at most 1, got 2; type final=0.1"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ConfigError) as refused:
        schedule(**options)
    assert str(refused.value) == message
