"""The only words that policies and mechanism share: tensors, ladders, plans and signals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """Name and shape of one tensor that is exchanged.

    Args:
        name: the parameter's name; all state is keyed by it.
        shape: without the worker axis.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape (n, m) of the matrix view: first dimension by all others; (0, 0) where the first is 0."""
        return self.shape[0], self.numel // max(self.shape[0], 1)


@dataclass(frozen=True)
class Ladder:
    """The levels of one compressor knob, from strong (fewest bytes) to weak (most bytes).

    Args:
        knob: `rank`, `density` or `bits`; "" for a compressor without levels.
        values: the knob's values, strong first; a plan holds indices into them.
    """

    knob: str = ""
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What the workers have agreed to do until the next decision.

    Args:
        levels: per tensor name, index into the ladder.
        batch_size: samples per worker and step.
        lr_factor: multiplies the scheduled learning rate.
        codebooks: per number of bits, quantisation levels in ascending order from -1 to 1; none = the compressor's own.
    """

    levels: Mapping[str, int] = field(default_factory=dict)
    batch_size: int = 1
    lr_factor: float = 1.0
    codebooks: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    def pack(self) -> list[float]:
        """The plan as numbers, each exact in 4 bytes, for the broadcast."""
        levels = [level for codebook in self.codebooks.values() for level in codebook]
        return [*self.levels.values(), self.batch_size, self.lr_factor, *levels]

    def unpack(self, numbers: Sequence[float]) -> "Plan":
        """The plan that `pack` has made numbers of; tensor names and sizes of codebooks are this plan's."""
        rest = iter(numbers)
        levels = {name: int(next(rest)) for name in self.levels}
        batch_size, lr_factor = int(next(rest)), next(rest)
        codebooks = {bits: tuple(next(rest) for _ in codebook) for bits, codebook in self.codebooks.items()}
        return Plan(levels, batch_size, lr_factor, codebooks)

    def with_levels(self, levels: Mapping[str, int]) -> "Plan":
        """The same plan with some levels replaced."""
        return replace(self, levels={**self.levels, **levels})


@dataclass(frozen=True)
class Signals:
    """What a policy sees when it decides; it never sees a compressor.

    Args:
        epoch: the epoch that has just ended, counted from 0.
        lr: learning rate of that epoch.
        next_lr: learning rate with which the next epoch starts.
        values: the collected signals by name, each a norm per tensor name, and for the whole `model`.
        step: the step that has just been taken, where the policy decides between steps.
        statistics: what was collected of the quantiser's buckets, see `statistics.py`.
    """

    epoch: int
    lr: float
    next_lr: float
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    step: int = 0
    statistics: Mapping[str, Tensor] = field(default_factory=dict)


def plan_record(plan: Plan, ladder: Ladder) -> dict[str, Any]:
    """The plan in the field's units, for the metrics row: levels as ranks, densities or bits."""
    return {
        "batch_size": plan.batch_size,
        "lr_factor": plan.lr_factor,
        "levels": {name: ladder.values[level] for name, level in plan.levels.items()},
        **(
            {"codebooks": {str(bits): list(levels) for bits, levels in plan.codebooks.items()}}
            if plan.codebooks
            else {}
        ),
    }
