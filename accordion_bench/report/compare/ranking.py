"""Which arms may be ranked: those that intervals over the seeds separate. No mean by itself ranks anything."""

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
    loss = -found.gap if judged.higher_is_better else found.gap
    margin = MARGIN if judged.percent else MARGIN * abs(dense.mean("metric"))
    half = 0.0 if found.constant else found.half
    return Standing.KEEPS if loss + half <= margin else Standing.UNDECIDED


def separated(arms: Sequence[Arm]) -> bool:
    """Whether intervals separate any two arms: only then may a figure zoom in on what is between them."""
    several = [arm for arm in arms if arm.n > 1]
    return any(against(arm, other).shown for i, arm in enumerate(several) for other in several[:i])


def beaten(arms: Sequence[Arm], cost: str) -> set[int]:
    """Numbers of the arms that another one beats: it is shown better, and costs no more.

    Args:
        arms: of one setting.
        cost: a column of summary.json, such as `wire_bytes` or `modelled_seconds`; who has none neither beats nor is
            beaten.
    """
    several = [(i, arm) for i, arm in enumerate(arms) if arm.n > 1 and arm.values(cost)]
    return {
        i
        for i, arm in several
        if any(
            _costs_no_more(other, arm, cost) and shown_better(other, arm) for _, other in several if other is not arm
        )
    }


def _costs_no_more(arm: Arm, other: Arm, cost: str) -> bool:
    """Whether an arm costs less and noise does not explain it, or exactly as much."""
    found = difference(arm.values(cost), other.values(cost))
    return found.gap == 0 or (found.gap < 0 and found.shown is not False)
