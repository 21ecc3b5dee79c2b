"""Time series of repeated operations, and their usual values as medians, which single stalls do not affect."""

import heapq
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

MOST = 1024  # largest number of values in a series
LONGEST = 256  # number of longest steps stored for each phase
SIGMA = 1.4826  # standard deviation over median absolute deviation, of normally distributed numbers
FAR = 3.0  # ratio to the usual time from which a step is an outlier

PARTS = ("compute", "update", "policy", "exposed")  # of a step
OWN = PARTS[:3]  # parts without waiting for other workers


class Series:
    """Series of seconds; of a long series every second, every fourth, ... value is stored."""

    def __init__(self, values: Iterable[float] = (), count: int = 0, stride: int = 1) -> None:
        self.values, self.count, self.stride = array("d", values), count, stride

    def add(self, seconds: float) -> None:
        """Append a value."""
        if self.count % self.stride == 0:
            self.values.append(seconds)
        self.count += 1
        if len(self.values) == MOST:
            self.values = self.values[::2]
            self.stride *= 2

    def median(self) -> float:
        """Return the median."""
        return float(np.median(self.values))

    def deviation(self) -> float:
        """Return 1.4826 median |x_t - x_(t-1)| / sqrt(2), which stalls and slow drifts of the machine do not affect.

        Equals the standard deviation of independent, normally distributed values.
        """
        if len(self.values) < 2:
            return 0.0
        return SIGMA * float(np.median(np.abs(np.diff(self.values)))) / math.sqrt(2)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        return {"values": torch.tensor(self.values, dtype=torch.float64), "count": self.count, "stride": self.stride}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Series":
        """Create an instance from `state_dict()`."""
        return cls(state["values"].tolist(), state["count"], state["stride"])


class Phase(NamedTuple):
    """A class of steps with equal expected duration."""

    samples: int  # samples of one worker, on which the computing time depends; 0 = work between two steps
    # names of events in the step (exchanges, decisions), on which the times of all other parts depend
    events: tuple[str, ...] = ()


class Usual(NamedTuple):
    """Usual time of one part of the steps of a phase."""

    part: str  # `compute`, including data; `update`; `policy`
    phase: int | tuple[str, ...]  # samples of a worker for `compute`, events for the others
    steps: int  # number of steps
    seconds: float  # median time


class Alike:
    """Seconds by part of the steps of one phase: sums, a subsample (every second, fourth, ... step), the longest steps.

    Memory is bounded independent of the number of steps.
    """

    def __init__(self) -> None:
        self.count, self.stride = 0, 1
        self.sums = [0.0] * len(PARTS)
        self.rows = array("d")  # of steps 0, stride, 2 stride, ...
        self.longest: list[float] = []  # heap of total seconds

    def add(self, seconds: Sequence[float]) -> None:
        """Add the seconds of a step by part."""
        if self.count % self.stride == 0:
            self.rows.extend(seconds)
        self.count += 1
        self.sums = [total + more for total, more in zip(self.sums, seconds, strict=True)]
        push = heapq.heappush if len(self.longest) < LONGEST else heapq.heappushpop
        push(self.longest, sum(seconds))
        if len(self.rows) == MOST * len(PARTS):
            self.rows = array("d", self.kept()[::2].ravel())
            self.stride *= 2

    def kept(self) -> NDArray[np.float64]:
        """Return the stored seconds [steps, parts]."""
        return np.array(self.rows).reshape(-1, len(PARTS))

    def longest_totals(self) -> list[float]:
        """Return total seconds of all steps, or of the longest ones, to find outliers."""
        return self.kept().sum(axis=1).tolist() if self.stride == 1 else self.longest

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        kept, longest = (torch.tensor(values, dtype=torch.float64) for values in (self.rows, self.longest))
        return {"count": self.count, "stride": self.stride, "sums": self.sums, "rows": kept, "longest": longest}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Alike":
        """Create an instance from `state_dict()`."""
        alike = cls()
        alike.count, alike.stride, alike.sums = state["count"], state["stride"], list(state["sums"])
        alike.rows = array("d", state["rows"].tolist())
        alike.longest = state["longest"].tolist()
        return alike


class Steps:
    """Seconds of the steps by part and phase, subsampled in phases with many steps."""

    def __init__(self) -> None:
        self.phases: dict[Phase, Alike] = {}

    def add(self, phase: Phase, seconds: Mapping[str, float]) -> None:
        """Add a step, or the work between two steps."""
        self.phases.setdefault(phase, Alike()).add([seconds.get(part, 0.0) for part in PARTS])

    @property
    def timed(self) -> int:
        """Number of steps, without work between them."""
        return sum(alike.count for phase, alike in self.phases.items() if phase.samples)

    def usual(self) -> list[Usual]:
        """Return the usual times of the parts in `OWN` that are not zero."""
        return [
            Usual(part, deciding, sum(alike.count for alike in phases), _median(phases, PARTS.index(part)))
            for part in OWN
            for deciding, phases in self._by(part).items()
            if any(alike.sums[PARTS.index(part)] for alike in phases)
        ]

    def excess(self) -> float:
        """Return seconds of the parts in `OWN` beyond steps x median by phase; negative if fast steps are rare."""
        taken = sum(alike.sums[PARTS.index(part)] for part in OWN for alike in self.phases.values())
        return taken - sum(usual.steps * usual.seconds for usual in self.usual())

    def outliers(self) -> tuple[int, float]:
        """Return the number of steps that took at least three times their usual time, and the seconds beyond the usual.

        Work between steps counts if it took at least two usual steps longer than usual. In a phase with more than
        `MOST` steps, only the `LONGEST` longest are considered.
        """
        medians = {
            (part, deciding): _median(phases, number)
            for number, part in enumerate(PARTS)
            for deciding, phases in self._by(part).items()
        }
        usual = {phase: sum(medians[part, _deciding(part, phase)] for part in PARTS) for phase in self.phases}
        of_all = _median_of([(usual[phase], alike.count) for phase, alike in self.phases.items()])
        far = [
            total - usual[phase]
            for phase, alike in self.phases.items()
            for total in alike.longest_totals()
            if total - usual[phase] >= (FAR - 1) * max(usual[phase], of_all)
        ]
        return len(far), float(sum(far))

    def _by(self, part: str) -> dict[int | tuple[str, ...], list[Alike]]:
        found: dict[int | tuple[str, ...], list[Alike]] = {}
        for phase, alike in self.phases.items():
            found.setdefault(_deciding(part, phase), []).append(alike)
        return found

    def state_dict(self) -> list[list[Any]]:
        """Return the state for checkpoints."""
        return [[*phase, alike.state_dict()] for phase, alike in self.phases.items()]

    def load_state_dict(self, state: Iterable[Any]) -> None:
        """Restore the state from `state_dict()`."""
        self.phases = {Phase(samples, tuple(events)): Alike.from_state(alike) for samples, events, alike in state}


def _median(phases: Sequence[Alike], part: int) -> float:
    """Return the median of a part over some phases, weighted by the strides of their subsamples."""
    least = min(alike.stride for alike in phases)
    taken = [np.repeat(alike.kept()[:, part], alike.stride // least) for alike in phases]
    return float(np.median(np.concatenate(taken)))


def _median_of(counted: Sequence[tuple[float, int]]) -> float:
    """Return the lower median of (value, count) pairs; 0 if there are none."""
    half, passed = sum(count for _, count in counted) / 2, 0
    for value, count in sorted(counted):
        passed += count
        if passed >= half:
            return value
    return 0.0


def _deciding(part: str, phase: Phase) -> int | tuple[str, ...]:
    return phase.samples if part == "compute" else phase.events
