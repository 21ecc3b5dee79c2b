"""Which arms may be ranked: those that intervals over the seeds separate. No mean by itself ranks anything."""

import itertools
from collections.abc import Sequence
from enum import Enum

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.intervals import NO_DIFFERENCE, Difference, difference
from accordion_bench.runs.metrics import metric

MARGIN = 0.02  # of an accuracy, or of dense's value of any other metric: what an arm may lose and keep dense's


class Standing(Enum):
    """Where an arm is beside dense, by the interval of their difference."""

    KEEPS = "its worse end is within the margin, and no loss is shown"
    LOSES = "it holds only losses"
    UNDECIDED = "it holds 0, and losses beyond the margin"
    NO_INTERVAL = "there is none"


def against(arm: Arm, other: Arm | None) -> Difference:
    """The metric of an arm minus another's, paired by seed where both have the same seeds."""
    if other is None or other is arm:
        return NO_DIFFERENCE
    return difference(arm.values("metric"), other.values("metric"), (tuple(arm.seeds), tuple(other.seeds)))


def shown_better(arm: Arm, other: Arm) -> bool:
    """Whether the interval of the difference holds only gains."""
    found = against(arm, other)
    return bool(found.shown) and metric(arm.metric).better(found.gap, 0)


def standing(arm: Arm, dense: Arm) -> Standing:
    """Where an arm is beside its baseline."""
    judged, found = metric(arm.metric), against(arm, dense)
    if found.shown is None:
        return Standing.NO_INTERVAL
    if found.shown and not judged.better(found.gap, 0):
        return Standing.LOSES
    return Standing.KEEPS if within_margin(arm, dense) else Standing.UNDECIDED


def within_margin(arm: Arm, dense: Arm) -> bool:
    """Whether the worse end of the interval is within it, be a loss shown or not."""
    judged, found = metric(arm.metric), against(arm, dense)
    loss = -found.gap if judged.higher_is_better else found.gap
    margin = MARGIN if judged.percent else MARGIN * abs(dense.mean("metric"))
    return loss + (0.0 if found.constant else found.half) <= margin


def apart(arms: Sequence[Arm]) -> bool:
    """Whether the intervals separate any two arms."""
    several = [arm for arm in arms if arm.n > 1]
    return any(against(arm, other).shown for arm, other in itertools.combinations(several, 2))


def beaten(arms: Sequence[Arm], cost: str) -> list[int]:
    """The numbers of arms beside which another one is shown to be better, and costs no more.

    Args:
        cost: a column of the summary.
    """
    return [
        i
        for i, arm in enumerate(arms)
        if any(shown_better(other, arm) and _at_most(other, arm, cost) for other in arms)
    ]


def front(arms: Sequence[Arm], cost: str) -> list[Arm]:
    """By rising cost the arms that are shown to be better than every one that costs no more.

    Args:
        cost: a column of the summary.
    """
    cheaper = {arm.label: [other for other in arms if other is not arm and not _less(arm, other, cost)] for arm in arms}
    buys = [arm for arm in arms if all(shown_better(arm, other) for other in cheaper[arm.label])]
    return sorted(buys, key=lambda arm: arm.mean(cost))


def _less(arm: Arm, other: Arm, cost: str) -> bool:
    """Whether an arm is shown to cost less than another: bytes that are the same at every seed have no noise."""
    found = difference(arm.values(cost), other.values(cost))
    return found.gap < 0 and (found.constant or bool(found.shown))


def _at_most(arm: Arm, other: Arm, cost: str) -> bool:
    """Whether an arm is shown to cost less than another, or costs exactly the same."""
    return _less(arm, other, cost) or arm.values(cost) == other.values(cost)
