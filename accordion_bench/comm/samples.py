"""What the same thing has taken again and again, and what it usually takes: medians, which one stall cannot move."""

import heapq
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

MOST = 1024  # values that a series keeps
LONGEST = 256  # steps of a phase that are kept beside
SIGMA = 1.4826  # standard deviation over median absolute deviation, of normally distributed numbers
FAR = 3.0  # times what it usually takes, from which a step is an outlier

PARTS = ("compute", "update", "policy", "exposed")  # of a step
OWN = PARTS[:3]  # what a worker does by itself


class Series:
    """Seconds, one after another; of a long series every second, every fourth, ... value is kept."""

    def __init__(self, values: Iterable[float] = (), count: int = 0, stride: int = 1) -> None:
        self.values, self.count, self.stride = array("d", values), count, stride

    def add(self, seconds: float) -> None:
        """One more."""
        if self.count % self.stride == 0:
            self.values.append(seconds)
        self.count += 1
        if len(self.values) == MOST:
            self.values = self.values[::2]
            self.stride *= 2

    def median(self) -> float:
        """What it usually takes."""
        return float(np.median(self.values))

    def deviation(self) -> float:
        """How much one differs from the next: 1.4826 median |x_t - x_(t-1)| / sqrt(2).

        The standard deviation of independent, normally distributed numbers; stalls are not in it, nor that the machine
        was slower for a while.
        """
        if len(self.values) < 2:
            return 0.0
        return SIGMA * float(np.median(np.abs(np.diff(self.values)))) / math.sqrt(2)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"values": torch.tensor(self.values, dtype=torch.float64), "count": self.count, "stride": self.stride}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Series":
        """What `state_dict()` was made of."""
        return cls(state["values"].tolist(), state["count"], state["stride"])


class Phase(NamedTuple):
    """Steps that are to take equally long.

    samples: of one worker, which decide what computing takes; 0 = no step, but what happens between steps.
    events: what takes place beside it (exchanges, decisions), which decides what all other parts take.
    """

    samples: int
    events: tuple[str, ...] = ()


class Usual(NamedTuple):
    """What a part of the steps of one phase usually takes.

    part: `compute`, with data; `update`; `policy`.
    phase: samples of a worker, for `compute`; the events of the others.
    steps: how many there were.
    seconds: their median.
    """

    part: str
    phase: int | tuple[str, ...]
    steps: int
    seconds: float


class Alike:
    """Seconds by part of the steps of one phase: sums, every second, every fourth, ... step, and the longest ones.

    As much memory after a million steps as after a thousand.
    """

    def __init__(self) -> None:
        self.count, self.stride = 0, 1
        self.sums = [0.0] * len(PARTS)
        self.rows = array("d")  # of steps 0, stride, 2 stride, ...
        self.longest: list[float] = []  # a heap: what all parts have taken

    def add(self, seconds: Sequence[float]) -> None:
        """One more step, by part."""
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
        """Seconds [steps, parts] of those that are kept."""
        return np.array(self.rows).reshape(-1, len(PARTS))

    def longest_totals(self) -> list[float]:
        """Seconds of the steps among which outliers are: of all, or of the longest."""
        return self.kept().sum(axis=1).tolist() if self.stride == 1 else self.longest

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        kept, longest = (torch.tensor(values, dtype=torch.float64) for values in (self.rows, self.longest))
        return {"count": self.count, "stride": self.stride, "sums": self.sums, "rows": kept, "longest": longest}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Alike":
        """What `state_dict()` was made of."""
        alike = cls()
        alike.count, alike.stride, alike.sums = state["count"], state["stride"], list(state["sums"])
        alike.rows = array("d", state["rows"].tolist())
        alike.longest = state["longest"].tolist()
        return alike


class Steps:
    """Seconds of each step by part and phase; of a phase with very many steps, of some."""

    def __init__(self) -> None:
        self.phases: dict[Phase, Alike] = {}

    def add(self, phase: Phase, seconds: Mapping[str, float]) -> None:
        """One more step, or what has happened between two."""
        self.phases.setdefault(phase, Alike()).add([seconds.get(part, 0.0) for part in PARTS])

    @property
    def timed(self) -> int:
        """How many steps there were, without what happens between them."""
        return sum(alike.count for phase, alike in self.phases.items() if phase.samples)

    def usual(self) -> list[Usual]:
        """What own parts usually take, where they take anything."""
        return [
            Usual(part, deciding, sum(alike.count for alike in phases), _median(phases, PARTS.index(part)))
            for part in OWN
            for deciding, phases in self._by(part).items()
            if any(alike.sums[PARTS.index(part)] for alike in phases)
        ]

    def excess(self) -> float:
        """Seconds that own parts have taken beyond steps x median by phase; negative where fast steps are the rare."""
        taken = sum(alike.sums[PARTS.index(part)] for part in OWN for alike in self.phases.values())
        return taken - sum(usual.steps * usual.seconds for usual in self.usual())

    def outliers(self) -> tuple[int, float]:
        """How many steps took three times what is usual in their phase, or longer, and the seconds beyond the usual.

        What happens between steps counts where it took two usual steps longer than it usually does. Of a phase with
        more than `MOST` steps, the `LONGEST` longest are looked at.
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
        """The phases, by what decides what a part takes in them."""
        found: dict[int | tuple[str, ...], list[Alike]] = {}
        for phase, alike in self.phases.items():
            found.setdefault(_deciding(part, phase), []).append(alike)
        return found

    def state_dict(self) -> list[list[Any]]:
        """For checkpoints."""
        return [[*phase, alike.state_dict()] for phase, alike in self.phases.items()]

    def load_state_dict(self, state: Iterable[Any]) -> None:
        """Continue from `state_dict()`."""
        self.phases = {Phase(samples, tuple(events)): Alike.from_state(alike) for samples, events, alike in state}


def _median(phases: Sequence[Alike], part: int) -> float:
    """Of a part in the steps of some phases; where every fourth is kept, each stands for four."""
    least = min(alike.stride for alike in phases)
    taken = [np.repeat(alike.kept()[:, part], alike.stride // least) for alike in phases]
    return float(np.median(np.concatenate(taken)))


def _median_of(counted: Sequence[tuple[float, int]]) -> float:
    """Of values that are there so many times; of two in the middle the lower one, 0 where there is none."""
    half, passed = sum(count for _, count in counted) / 2, 0
    for value, count in sorted(counted):
        passed += count
        if passed >= half:
            return value
    return 0.0


def _deciding(part: str, phase: Phase) -> int | tuple[str, ...]:
    return phase.samples if part == "compute" else phase.events
