"""Decays at milestones, a cosine behind the warm-up, and the schedule of transformers."""

import math

import pytest

from accordion_bench.options.checks import ConfigError
from accordion_bench.options.component import RunContext, idle_options
from accordion_bench.schedules.learning_rate import Cosine, MultiStep, WarmupCosine

# ---- decays at milestones, epoch by epoch


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


# ---- half a cosine behind the warm-up, which delays it even where it is flat


def test_a_warm_up_to_one_delays_the_cosine():
    at_once, later = (Cosine(10, workers=1, warmup_epochs=epochs) for epochs in (0, 5))
    assert [later(epoch) for epoch in range(6)] == [1] * 6
    assert [later(5 + epoch / 2) for epoch in range(10)] == [at_once(epoch) for epoch in range(10)]


def test_so_it_has_an_effect_with_one_worker():
    told = dict(idle_options(Cosine, {"warmup_epochs": 5, "lr_scaling": "none"}, RunContext(workers=1, epochs=10)))
    assert list(told) == ["lr_scaling"]


# ---- warm-up and cosine decay, step by step


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
