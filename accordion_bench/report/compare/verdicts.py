"""Verdicts in words: a sentence for each arm compared with its baseline, and the answer at the top of the report.

The answer states which arms keep dense's metric, at how many fewer bytes, and which do not. Arms are ordered by bytes,
which are counted exactly, and never by means that the seeds do not separate.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accordion_bench.network.links import show_link
from accordion_bench.options.units import counted, digits, human_bytes
from accordion_bench.report.compare.arms import Arm, baseline, dense_command, differences
from accordion_bench.report.compare.columns import over, tidy, within_noise
from accordion_bench.report.compare.grouping import group, settings
from accordion_bench.report.compare.intervals import (
    MARGIN,
    NOT_COUNTED,
    NOT_SHOWN,
    ONE,
    SAME,
    ComparisonOutcome,
    Difference,
    against,
    in_points,
    listed,
    show_bytes,
    show_gap,
    show_times,
    shown_better,
    signed,
    size,
    standing,
    within_margin,
)
from accordion_bench.report.compare.times import shares_process, unlike
from accordion_bench.report.read import read_runs
from accordion_bench.runs.metrics import Metric, metric


class ComparedArm(NamedTuple):
    """An arm, its baseline, and the statistics of their difference."""

    arm: Arm
    dense: Arm
    found: Difference
    standing: ComparisonOutcome

    @property
    def label(self) -> str:
        return self.arm.label

    @property
    def judged(self) -> Metric:
        return metric(self.arm.metric)

    @property
    def dense_name(self) -> str:
        """Label of the baseline: `dense`, or longer if there are several."""
        return self.dense.label

    @property
    def seeds(self) -> str:
        """Number of seeds: `n = 3`, `n = 3 against 2`."""
        return f"n = {self.arm.n}" + ("" if self.arm.n == self.dense.n else f" against {self.dense.n}")

    @property
    def sent(self) -> float:
        """Bytes on the wire, as a sort key; infinite if uncounted."""
        return self.arm.mean("wire_bytes") if self.arm.values("wire_bytes") else math.inf

    def gap(self) -> str:
        """Return the difference: `-0.30 ± 1.10 points`."""
        return show_gap(self.judged, self.found)

    def loss(self) -> str:
        """Return the difference without sign: `0.30 ± 1.10 points`."""
        return self.gap().lstrip("+-")

    def reach(self) -> str:
        """Return the ends of the interval: `-4.10 to +3.20 points`."""
        ends = " to ".join(signed(self.judged, self.found.gap + side * self.found.half) for side in (-1, 1))
        return in_points(self.judged, ends)

    def side(self) -> str:
        """Return the direction of the difference: `0.56 points below dense`, `equal to dense`."""
        if not self.found.gap:
            return f"equal to {self.dense_name}"
        side = "below" if self.found.gap < 0 else "above"
        return f"{in_points(self.judged, size(self.judged, self.found.gap))} {side} {self.dense_name}"

    def bytes(self) -> str:
        """Return the ratio of bytes: `at 9.19 times fewer bytes on the wire`."""
        own, theirs = self.arm.mean("wire_bytes"), self.dense.mean("wire_bytes")
        if math.isnan(own) or math.isnan(theirs):
            return f"at bytes that are {NOT_COUNTED}"
        if own == theirs:
            return "at as many bytes on the wire"
        if own == 0:
            return "with nothing on the wire"
        if theirs == 0:
            return f"at {human_bytes(own)} on the wire, where {self.dense_name} sends nothing"
        times, fewer = (theirs / own, "fewer") if own < theirs else (own / theirs, "more")
        if times < ONE:
            return "at as many bytes on the wire, to within 0.5 %"
        return f"at {digits(times)} times {fewer} bytes on the wire"

    def time(self) -> str:
        """Return the ratio of times: measured if communication was measured, else modelled; or why there is none."""
        if why := unlike([self.arm, self.dense]):
            return f"their times do not compare, because {why}"
        if not shares_process(self.arm) and not shares_process(self.dense):
            return self._time("seconds", "measured")
        if self.arm.config.get("network") == self.dense.config.get("network") and self.arm.values("modelled_seconds"):
            return self._time("modelled_seconds", f"modelled on {show_link(self.arm.config['network'])}")
        return "no difference in time was measured, because workers share a process"

    def _time(self, column: str, how: str) -> str:
        ratio = over(self.arm, self.dense, column)
        if math.isnan(ratio):
            return "no times of both compare"
        if within_noise(self.arm, self.dense, column):
            return f"no difference in time is shown ({how})"
        few = "" if self.arm.n > 1 and self.dense.n > 1 else ", one run"
        return f"it takes {ratio:.2f} times {self.dense_name}'s time ({how}{few})"

    def beware(self) -> list[str]:
        """Return warnings if the two differ in more than the method."""
        found = []
        if self.arm.batch != self.dense.batch:
            same_epochs = self.arm.config["epochs"] == self.dense.config["epochs"]
            steps = ": other steps in the same epochs" if same_epochs else ""
            found.append(f"beware, {self.arm.batch_text} against {self.dense.batch}{steps}")
        if other := differences(self.arm, self.dense):
            found.append(f"beware, {self.dense_name} differs in more than compression: {', '.join(other)}")
        return found


def rivals(arms: Sequence[Arm]) -> list[ComparedArm]:
    """Return each arm of a setting that has a baseline, paired with it."""
    return [one for arm in arms if (one := rival(arm, arms)) is not None]


def rival(arm: Arm, arms: Sequence[Arm]) -> ComparedArm | None:
    """Pair an arm with its baseline among the arms of its setting; None if it has none or is it."""
    dense = baseline(arm, arms)
    if dense is None or dense is arm:
        return None
    return ComparedArm(arm, dense, against(arm, dense), standing(arm, dense))


def verdicts(arms: Sequence[Arm]) -> list[str]:
    """Return one sentence per arm with a baseline."""
    rows = zip(arms, tidy(arms).to_dict("records"), strict=True)
    return [verdict(one, row) for arm, row in rows if (one := rival(arm, arms)) is not None]


def verdict(one: ComparedArm, row: dict[Any, Any]) -> str:
    """Describe bytes, metric and noise of one arm against dense; `row` is the arm's row of `columns.tidy`."""
    gap = f"{one.judged.words} {one.side()}"
    images = one.arm.runs[0].summary.get("test_size") if one.judged.name == "accuracy" else None
    if images and one.found.gap:
        gap += f" ({_count(abs(one.found.gap) * images)} of {images:,} test images)"
    return f"{one.label}: {'; '.join([_sent(row, one), gap, _noise(one), *one.beware()])}."


def _sent(row: dict[Any, Any], one: ComparedArm) -> str:
    """Return `payload 9.19x less than dense, wire 12x less`."""
    if math.isnan(row["payload_bytes"]):
        return f"bytes {NOT_COUNTED}"
    name = one.dense_name
    if one.dense.mean("payload_bytes") == 0 and row["payload_bytes"]:
        return f"payload {show_bytes(row['payload_bytes'])}, where {name} sends nothing"
    if math.isnan(row["payload_times_less"]):
        return f"bytes {NOT_COUNTED} of {name}"
    payload, wire = show_times(row["payload_times_less"]), show_times(row["wire_times_less"])
    joined = f"{payload} than {name}"
    if payload.startswith(SAME):
        joined = payload.replace(SAME, f"{SAME} as {name}")
    elif payload == "nothing sent":
        joined = payload
    return f"payload {joined}" + (f", wire {wire}" if wire != payload else "")


def _count(images: float) -> str:
    return f"{images:.2g}" if images < 99.5 else f"{images:.0f}"


def _noise(one: ComparedArm) -> str:
    found = one.found
    if found.constant:
        return f"{NOT_SHOWN}, the same at every seed" if not found.gap else "the same at every seed: no interval"
    if found.shown is None:
        return f"{'one' if one.arm.n == 1 else f'{one.dense_name} has one'} seed: no statement about noise"
    better = "better" if one.judged.better(found.gap, 0) else "worse"
    told = f"{better} by more than noise" if found.shown else NOT_SHOWN
    return f"{told}, the 95 % interval of the difference is {one.reach()} ({found.how}, {one.seeds})"


MOST = 2  # arms named in one clause


def answers(arms: Sequence[Arm]) -> list[str]:
    """Return at most two sentences about the arms of one setting, without markup, the answer first."""
    if not any(arm.dense for arm in arms):
        return [no_dense(arms)]
    by_bytes = sorted((one for one in rivals(arms) if not one.arm.control), key=lambda one: one.sent)
    keep, lose, undecided, unknown = ([one for one in by_bytes if one.standing is kind] for kind in ComparisonOutcome)
    denser = _better_dense(by_bytes, [arm for arm in arms if arm.dense])
    if keep:
        leanest, *others = keep
        beside = [*_too(leanest, others), *_worse(lose), *_open(undecided), *_without_interval(unknown)]
        return [_kept(leanest), *_sentence([*beside, *denser])]
    if undecided:
        return [_undecided(undecided, lose), *_sentence([*_worse(lose), *_without_interval(unknown), *denser])]
    if lose:
        return [_none_keeps(lose), *_sentence([*_without_interval(unknown), *denser])]
    if unknown:
        return _unranked(unknown, denser)
    if sum(arm.dense for arm in arms) > 1:
        return ["Only dense arms have run: there is no other method to compare them with.", *_sentence(denser)]
    return ["Only dense has run: there is nothing to compare it with."]


def no_dense(arms: Sequence[Arm]) -> str:
    """Return the sentence for a setting without a dense run, with the command that adds one."""
    return (
        f"No dense run of this setting is among those given: nothing is said about {metric(arms[0].metric).words}, "
        f"bytes or time against dense. Add one: {dense_command(arms[0])}"
    )


def _kept(one: ComparedArm) -> str:
    """Describe the arm with the fewest bytes among those that keep dense's metric."""
    better = one.found.shown and one.judged.better(one.found.gap, 0)
    said = f"is better than {one.dense_name} in" if better else f"keeps {one.dense_name}'s"
    clauses = [f"{one.label} {said} {one.judged.words} ({one.gap()}, {one.seeds}) {one.bytes()}", one.time()]
    return f"{'; '.join([*clauses, *one.beware()])}."


def _undecided(undecided: Sequence[ComparedArm], lose: Sequence[ComparedArm]) -> str:
    """Report the narrowest interval if none is narrow enough; a shown loss may still be within the margin."""
    one = min(undecided, key=lambda one: one.found.half)
    margin = f"{100 * MARGIN:g} {one.judged.points if one.judged.percent else '%'}"
    whose = "no arm without a shown loss" if any(within_margin(one.arm, one.dense) for one in lose) else "no arm"
    return (
        f"Undecided: {whose} is shown to keep {one.dense_name}'s {one.judged.words} within {margin}; the narrowest "
        f"interval, of {one.label} ({one.seeds}), reaches from {one.reach()} {one.bytes()}; {one.time()}."
    )


def _none_keeps(lose: Sequence[ComparedArm]) -> str:
    told = [f"{one.label} is worse by {one.loss()} {one.bytes()}" for one in lose]
    return f"No arm keeps {lose[0].dense_name}'s {lose[0].judged.words}: {listed(told, MOST)}."


def _unranked(unknown: Sequence[ComparedArm], denser: Sequence[str]) -> list[str]:
    """List differences without an interval, in the order of the table."""
    single = all(one.arm.n == one.dense.n == 1 for one in unknown)
    told = [f"{one.label} ended {one.side()} {one.bytes()}" for one in reversed(unknown)]
    return [f"{'One seed' if single else 'No interval'}: nothing is ranked.", *_sentence([listed(told, MOST), *denser])]


def _too(leanest: ComparedArm, others: Sequence[ComparedArm]) -> list[str]:
    """Name other arms that keep dense's metric: those not separated from the leanest, and better ones."""
    found = [(other, against(other.arm, leanest.arm)) for other in others]
    alike = [other.label for other, gap in found if not gap.shown]
    better = [
        f"{other.label} is better than it by {show_gap(other.judged, gap).lstrip('+-')} {other.bytes()}"
        for other, gap in found
        if shown_better(other.arm, leanest.arm)
    ]
    told = [f"{listed(alike, MOST)} cannot be told apart from it in {leanest.judged.words}"] if alike else []
    return told + _clause(better)


def _worse(lose: Sequence[ComparedArm]) -> list[str]:
    told = [f"{one.label} is worse by {one.loss()}" for one in lose]
    if len(told) <= MOST + 1:
        return _clause(told)
    return [f"{', '.join(told[:MOST])}; {len(told) - MOST} more are worse, too"]


def _open(undecided: Sequence[ComparedArm]) -> list[str]:
    return _clause([f"{one.label} is undecided (from {one.reach()})" for one in undecided])


def _without_interval(unknown: Sequence[ComparedArm]) -> list[str]:
    alone = all(min(one.arm.n, one.dense.n) == 1 for one in unknown)
    why = "one seed, so no interval" if alone else "no interval"
    if len(unknown) < 2:
        return [f"{one.label} has {why}" for one in unknown]
    return [f"{len(unknown)} arms have {why}"]


def _better_dense(told: Sequence[ComparedArm], dense: Sequence[Arm]) -> list[str]:
    """Name dense arms that are shown to be better than a baseline, except those already named as rivals."""
    rivals_too = {one.label for one in told}
    bases = {one.dense.label: one.dense for one in told} or {arm.label: arm for arm in dense}
    better = [
        f"{arm.label} is better than {base.label} by {show_gap(metric(arm.metric), against(arm, base)).lstrip('+-')}"
        for base in bases.values()
        for arm in dense
        if arm.label not in rivals_too and shown_better(arm, base)
    ]
    return _clause(better)


def _clause(told: Sequence[str]) -> list[str]:
    return [listed(told, MOST)] if told else []


def _sentence(clauses: Sequence[str]) -> list[str]:
    return [f"{'; '.join(clauses)}."] if clauses else []


PERIOD = ", H "  # before the period in a local method's label


def known_accuracies(paths: Sequence[Path], model: str, workers: int) -> dict[str, str]:
    """Return, by label, the difference to dense in words of every method that was run with this model.

    Of several settings, one with `workers` workers is preferred, then that with the most seeds. Of several periods of a
    local method the longest is used and named; of several arms that differ in other options, the one most like its
    baseline.

    Args:
        paths: run folders, or folders that contain some.
        model: choice of the model, with its own options in brackets; "" = any.
        workers: number of workers of the cluster.
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
            if not period.replace(".", "", 1).isdigit():  # no period, or a local method combined with another
                method, period = name, ""
            rank = (arm.workers == workers, arm.n, float(period or 0), -len(differences(arm, dense)))
            if method not in found or rank > found[method][0]:
                found[method] = rank, told(arm, dense, f"at H {period}: " if period else "")
    return {name: said for name, (_, said) in found.items()}


def told(arm: Arm, dense: Arm, begin: str = "") -> str:
    """Format a difference: `-0.28 ± 1.31 points, n = 3 (resnet20 on digits, 4 workers)`; distinguishing parts last."""
    judged, found = metric(arm.metric), against(arm, dense)
    same = f"{NOT_SHOWN}: " if found.shown is False else ""
    where = f"{arm.named('model')} on {arm.named('dataset')}, {counted(arm.workers, 'worker')}"
    apart = f", {arm.label}" if arm.called else arm.label.removeprefix(arm.method)
    return f"{begin}{same}{show_gap(judged, found)}, n = {arm.n} ({where}{apart})"
