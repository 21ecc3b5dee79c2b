"""What each method has cost in accuracy, in runs that are at hand."""

from collections.abc import Sequence
from pathlib import Path

from accordion_bench.report.compare.arms import Arm, baseline, differences
from accordion_bench.report.compare.grouping import group, settings
from accordion_bench.report.compare.ranking import against
from accordion_bench.report.compare.show import NO_DIFFERENCE, show_gap
from accordion_bench.report.read.load import read_runs
from accordion_bench.runs.metrics import metric

PERIOD = ", H "  # of a local method, in its label


def known_accuracies(paths: Sequence[Path], model: str, workers: int) -> dict[str, str]:
    """The difference to dense of every method that was run with this model, in words, by its label.

    Of several settings, that with so many workers counts, else that with the most seeds; of several periods of a local
    method, the longest, and it is told; of several arms that differ in other options, the one most like its dense run.

    Args:
        paths: run folders, or folders of some.
        model: as it was chosen, with options of its own in brackets; "" = whichever the runs have.
        workers: of the cluster.
    """
    arms, _ = group(read_runs(paths))
    found: dict[str, tuple[tuple[bool, int, float, int], str]] = {}
    for members in settings([arm for arm in arms if not model or arm.named("model") == model]):
        for arm in members:
            dense = baseline(arm, members)
            if dense is None or dense is arm or not arm.values("metric"):
                continue
            name = arm.method
            method, _, period = name.partition(PERIOD)
            if not period.replace(".", "", 1).isdigit():  # none, or a local method with more beside it: another method
                method, period = name, ""
            rank = (arm.workers == workers, arm.n, float(period or 0), -len(differences(arm, dense)))
            if method not in found or rank > found[method][0]:
                found[method] = rank, told(arm, dense, f"at H {period}: " if period else "")
    return {name: said for name, (_, said) in found.items()}


def told(arm: Arm, dense: Arm, begin: str = "") -> str:
    """`-0.28 ± 1.31 points, n = 3 (resnet20 on digits, 4 workers)`; what tells it from others like it comes last."""
    judged, found = metric(arm.metric), against(arm, dense)
    same = f"{NO_DIFFERENCE}: " if found.shown is False else ""
    where = f"{arm.named('model')} on {arm.named('dataset')}, {arm.workers} workers"
    apart = f", {arm.label}" if arm.called else arm.label.removeprefix(arm.method)
    return f"{begin}{same}{show_gap(judged, found)}, n = {arm.n} ({where}{apart})"
