"""What the same thing has taken again and again, and what it usually takes: medians, which one stall cannot move."""

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

MOST = 1024  # values that a series keeps
SIGMA = 1.4826  # standard deviation over median absolute deviation, of normally distributed numbers
FAR = 3.0  # times what it usually takes, from which a step is an outlier
MATTERS = 0.01  # of the training time, from which outliers are told

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


class Steps:
    """Seconds of each step by part: 32 bytes a step."""

    def __init__(self) -> None:
        self.phases: dict[Phase, array[float]] = {}

    def add(self, phase: Phase, seconds: Mapping[str, float]) -> None:
        """One more step, or what has happened between two."""
        self.phases.setdefault(phase, array("d")).extend(seconds.get(part, 0.0) for part in PARTS)

    def usual(self) -> list[Usual]:
        """What own parts usually take, where they take anything."""
        grouped = [(part, phase, taken) for part in OWN for phase, taken in self._of(part).items() if taken.any()]
        return [Usual(part, phase, len(taken), float(np.median(taken))) for part, phase, taken in grouped]

    def excess(self) -> float:
        """Seconds that own parts have taken beyond steps x median by phase; negative where fast steps are the rare."""
        taken = sum(float(taken.sum()) for part in OWN for taken in self._of(part).values())
        return taken - sum(usual.steps * usual.seconds for usual in self.usual())

    def outliers(self) -> tuple[int, float]:
        """How many steps took three times what is usual in their phase, or longer, and the seconds beyond the usual.

        What happens between steps counts where it took two usual steps longer than it usually does.
        """
        medians = {part: {phase: np.median(taken) for phase, taken in self._of(part).items()} for part in PARTS}
        beyond, usual = [], []
        for phase, taken in self._taken().items():
            expected = sum(float(medians[part][_deciding(part, phase)]) for part in PARTS)
            beyond.append(taken.sum(axis=1) - expected)
            usual.append(np.full(len(taken), expected))
        if not beyond:
            return 0, 0.0
        over, least = np.concatenate(beyond), np.concatenate(usual)
        far = over[over >= (FAR - 1) * np.maximum(least, np.median(least))]
        return len(far), float(far.sum())

    def _taken(self) -> dict[Phase, NDArray[np.float64]]:
        """Seconds [steps, parts] by phase."""
        return {phase: np.array(taken).reshape(-1, len(PARTS)) for phase, taken in self.phases.items()}

    def _of(self, part: str) -> dict[Any, NDArray[np.float64]]:
        """Seconds [steps] of one part, by what decides it."""
        found: dict[Any, list[NDArray[np.float64]]] = {}
        for phase, taken in self._taken().items():
            found.setdefault(_deciding(part, phase), []).append(taken[:, PARTS.index(part)])
        return {key: np.concatenate(taken) for key, taken in found.items()}

    def state_dict(self) -> list[list[Any]]:
        """For checkpoints."""
        return [[*phase, torch.tensor(taken, dtype=torch.float64)] for phase, taken in self.phases.items()]

    def load_state_dict(self, state: Iterable[Any]) -> None:
        """Continue from `state_dict()`."""
        self.phases = {Phase(samples, tuple(events)): array("d", taken.tolist()) for samples, events, taken in state}


def _deciding(part: str, phase: Phase) -> int | tuple[str, ...]:
    return phase.samples if part == "compute" else phase.events
