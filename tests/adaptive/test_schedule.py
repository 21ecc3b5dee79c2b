"""Levels by the calendar: the arms of the ablation, critical epochs, refusals."""

import re

import pytest

from accordion_bench.adaptive.schedule import LevelSchedule
from accordion_bench.plan import RunFacts, Signals
from accordion_bench.schedules.learning_rate import Constant, Cosine, MultiStep
from tests.kit.policies import components, refused, started, values


def by_epoch(knob="rank", epochs=300, schedule=lambda _: 1.0, **options):
    """The level of each epoch, decision by decision."""
    policy, ladder, plan = started(LevelSchedule(**options), knob, run=RunFacts(epochs=epochs, schedule=schedule))
    out = []
    for epoch in range(epochs):
        (level,) = set(values(plan, ladder))
        out.append(level)
        plan = policy.update(Signals(epoch, 0.1, 0.1), plan)
    return out


CRITICAL = [*range(20), *range(150, 170)]


@pytest.mark.parametrize(
    ("inside", "outside", "levels"),
    [
        ("weak", "weak", (2, 2)),
        ("weak", "strong", (2, 1)),
        ("strong", "weak", (1, 2)),
        ("strong", "strong", (1, 1)),
        ("strong", "dense", (1, 1_000_000)),
        (4, 3, (4, 3)),
        (None, None, (2, 1)),
    ],
)
def test_the_arms_of_the_ablation(inside, outside, levels):
    """The level is in force from the first step of an epoch; by default in the paper's 20 + 20 of 300 epochs."""
    expected = [levels[0] if epoch in CRITICAL else levels[1] for epoch in range(300)]
    assert by_epoch(schedule=MultiStep(300, 4), inside=inside, outside=outside) == expected
    assert by_epoch(critical=[[0, 20], [150, 170]], inside=inside, outside=outside) == expected
    ranges = [[0, 20, inside], [20, 150, outside], [150, 170, inside], [170, None, outside]]
    if inside is not None:
        assert by_epoch(ranges=ranges) == expected


def test_the_default_critical_epochs_know_sudden_drops_alone():
    def critical(schedule, epochs=60):
        levels = by_epoch(epochs=epochs, schedule=schedule)
        return [epoch for epoch, level in enumerate(levels) if level == 2]

    assert critical(Cosine(60, 4)) == critical(Constant(60, 4)) == list(range(4))  # a cosine ends in steep epochs
    assert critical(MultiStep(60, 4, milestones=[2])) == list(range(6))  # one range where they overlap
    assert critical(MultiStep(60, 4, milestones=[58])) == [*range(4), 58, 59]
    assert critical(MultiStep(60, 4, gamma=0.8)) == list(range(4))  # no drop to 0.7


def test_words_and_numbers_of_a_density():
    ranges = [[0, 1, "weak"], [1, 3, 0.5], [3, 4, "strong"], [4, 6, "dense"]]
    assert by_epoch("density", 6, ranges=ranges) == [0.99, 0.5, 0.5, 0.1, 1.0, 1.0]
    assert by_epoch("density", 3, critical=[]) == [0.1] * 3
    assert by_epoch("density", 3, critical=[[0, None]]) == [0.99] * 3
    assert LevelSchedule(critical=[]).required_facts == {"epochs"}  # none is critical, whatever the learning rate does


SCHEDULE = ["adaptive=schedule", "compressor=powersgd", "epochs=60"]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("ranges=[[0,20,weak],[30,null,strong]]", r"epoch 20 has none.*type .*ranges=\[\[0,30,weak\],\[30,null,strong"),
        ("ranges=[[0,20,weak],[10,60,strong]]", r"epoch 10 has two.*=\[\[0,10,weak\],\[10,null,strong\]\]"),
        ("ranges=[[0,20,weak],[20,70,strong]]", r"\[20,70,strong\] exceeds the run.*=\[\[0,20,weak\],\[20,null,"),
        ("ranges=[[0,20,weak],[20,59,strong]]", "gives each of the 60 epochs one level .epoch 59 has none"),
        ("ranges=[[5,null,weak]]", r"epoch 0 has none.*type .*=\[\[0,null,weak\]\]"),
        ("ranges=[[0,60,feeble]]", "ranges must be null or a list of .first epoch, end, level., got"),
        ("ranges=[[0,60,1.5]]", r"ranges must be an integer from 1 .*, as a rank, got 1.5; .*ranges=\[\[0,60,weak\]\]"),
        ("ranges=[]", "ranges must be null or a list"),
        ("critical=[[0,20],[10,30]]", r"epoch 10 has two.*type .*critical=\[\[0,10\],\[10,30\]\]"),
        ("critical=[[0,20],[50,70]]", r"\[50,70\] exceeds the run.*critical=\[\[0,20\],\[50,null\]\]"),
        ("critical=[[20,10]]", "critical must be null or a list"),
        ("inside=strng", "inside must be one of weak, strong, dense"),
        ("outside=0", "outside must be .* number above 0, got 0"),
    ],
)
def test_refused_schedules(option, told):
    sentence = refused(*SCHEDULE, f"adaptive.schedule.{option}")
    assert sentence.startswith("adaptive.schedule.") and re.search(told, sentence), sentence


def test_a_suggested_schedule_is_accepted():
    """What a refusal says to type is not refused."""
    for option in (
        "ranges=[[3,20,weak],[10,70,1],[65,80,2]]",
        "ranges=[[70,90,weak]]",
        "critical=[[0,20],[10,70]]",
        "critical=[[60,70]]",
    ):
        again = refused(*SCHEDULE, f"adaptive.schedule.{option}").rpartition("; type ")[2]
        components(*SCHEDULE, again)


def test_other_refusals():
    told = refused(*SCHEDULE, "adaptive.schedule.ranges=[[0,null,weak]]", "adaptive.schedule.inside=strong")
    assert "inside must be null together with ranges" in told
    told = refused("adaptive=schedule", "compressor=qsgd", "adaptive.schedule.outside=dense")
    assert "outside must be weak, strong or a number (there is no dense level of bits)" in told
    assert "an integer from 2 to 8, as a number of bits" in refused(
        "adaptive=schedule", "compressor=qsgd", "adaptive.schedule.outside=9"
    )
