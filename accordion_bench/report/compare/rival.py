"""An arm beside the dense one that it is compared with, in words: how far off, at how many bytes, in what time."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from accordion_bench.network.link_options import show_link
from accordion_bench.options.units import digits, human_bytes
from accordion_bench.report.compare.arms import Arm, baseline, differences
from accordion_bench.report.compare.intervals import Difference
from accordion_bench.report.compare.ranking import Standing, against, standing
from accordion_bench.report.compare.show import NOT_COUNTED, ONE, in_points, show_gap, signed, size
from accordion_bench.report.compare.tidy import over, within_noise
from accordion_bench.report.compare.timed import shares_process, unlike
from accordion_bench.runs.metrics import Metric, metric


class Rival(NamedTuple):
    """An arm, its baseline, and what their seeds say of the difference."""

    arm: Arm
    dense: Arm
    found: Difference
    standing: Standing

    @property
    def label(self) -> str:
        return self.arm.label

    @property
    def judged(self) -> Metric:
        return metric(self.arm.metric)

    @property
    def dense_name(self) -> str:
        """Its label: `dense`, and more where others could be meant."""
        return self.dense.label

    @property
    def seeds(self) -> str:
        """`n = 3`, `n = 3 against 2`."""
        return f"n = {self.arm.n}" + ("" if self.arm.n == self.dense.n else f" against {self.dense.n}")

    @property
    def sent(self) -> float:
        """Bytes on the wire, to order by; those that nobody has counted come last."""
        return self.arm.mean("wire_bytes") if self.arm.values("wire_bytes") else math.inf

    def gap(self) -> str:
        """`-0.30 ± 1.10 points`."""
        return show_gap(self.judged, self.found)

    def loss(self) -> str:
        """The same where words tell the sign: `0.30 ± 1.10 points`."""
        return self.gap().lstrip("+-")

    def reach(self) -> str:
        """The ends of the interval: `-4.10 to +3.20 points`."""
        ends = " to ".join(signed(self.judged, self.found.gap + side * self.found.half) for side in (-1, 1))
        return in_points(self.judged, ends)

    def side(self) -> str:
        """`0.56 points below dense`, `equal to dense`."""
        if not self.found.gap:
            return f"equal to {self.dense_name}"
        side = "below" if self.found.gap < 0 else "above"
        return f"{in_points(self.judged, size(self.judged, self.found.gap))} {side} {self.dense_name}"

    def bytes(self) -> str:
        """`at 9.19 times fewer bytes on the wire`."""
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
        """Measured where communication was measured, else modelled, and with what; else why there is none."""
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
        """In what else the two differ."""
        found = []
        if self.arm.batch != self.dense.batch:
            same_epochs = self.arm.config["epochs"] == self.dense.config["epochs"]
            steps = ": other steps in the same epochs" if same_epochs else ""
            found.append(f"beware, {self.arm.batch_text} against {self.dense.batch}{steps}")
        if other := differences(self.arm, self.dense):
            found.append(f"beware, {self.dense_name} differs in more than compression: {', '.join(other)}")
        return found


def rivals(arms: Sequence[Arm]) -> list[Rival]:
    """Each arm of a setting that has a baseline, beside it."""
    return [one for arm in arms if (one := rival(arm, arms)) is not None]


def rival(arm: Arm, arms: Sequence[Arm]) -> Rival | None:
    """An arm beside its baseline among the arms of its setting; None where it has none, or is it."""
    dense = baseline(arm, arms)
    if dense is None or dense is arm:
        return None
    return Rival(arm, dense, against(arm, dense), standing(arm, dense))
