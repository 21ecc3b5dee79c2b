"""The only words that policies and mechanism share: tensors, ladders, plans and signals."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from accordion_bench.batches import UnequalSteps
from accordion_bench.requests import BucketStatistic

DROP = 0.7  # a learning rate that falls at once to at most this times what it was has dropped


@dataclass(frozen=True)
class TensorSpec:
    """Name and shape of one tensor that is exchanged.

    Args:
        name: the parameter's name; all state is keyed by it.
        shape: without the worker axis.
        table: it is an embedding or the output layer: a token or a class has a row of its own.
    """

    name: str
    shape: tuple[int, ...]
    table: bool = field(default=False, compare=False)  # files of tensors do not say it

    @cached_property
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
        pair: the compressor's own (strong, weak) values, for policies that have not been told any.
    """

    knob: str = ""
    values: tuple[float, ...] = ()
    pair: tuple[float, float] = (0, 0)


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run before it starts.

    Args:
        epochs: of the run.
        workers: A.
        train_size: training samples.
        batch_size: samples per worker and step at the start; of the worker with most, where `batches` differ.
        schedule: learning-rate factor at a time in epochs.
        warmup_epochs: in which the learning rate still rises; 0 where it never does.
        bandwidth, latency: of a worker's modelled link, in bit/s and in seconds for each round of a collective.
        specs: the trained tensors; empty while the configuration is checked.
        batches: samples per step of each worker, where they differ; () = all have `batch_size`.
    """

    epochs: int = 1
    workers: int = 1
    train_size: int = 1
    batch_size: int = 1
    schedule: Callable[[float], float] = lambda _: 1.0
    warmup_epochs: float = 0
    bandwidth: float = 1e9
    latency: float = 5e-5
    specs: Sequence[TensorSpec] = ()
    batches: tuple[int, ...] = ()

    def with_specs(self, specs: Sequence[TensorSpec]) -> "RunFacts":
        """The same, once the trained tensors are known; reads no other fact, because some may be unknown."""
        found = copy.copy(self)
        object.__setattr__(found, "specs", tuple(specs))
        return found

    @property
    def per_worker(self) -> int:
        """Training samples that each worker sees per epoch; the worker with most, where batches differ."""
        return max(self._unequal.of_epoch()) if self.batches else -(-self.train_size // self.workers)

    @property
    def per_step(self) -> int:
        """Samples of all workers in a step."""
        return sum(self.batches) or self.workers * self.batch_size

    @property
    def _unequal(self) -> UnequalSteps:
        return UnequalSteps(self.train_size, self.batches)

    def steps_per_epoch(self, batch_size: int | None = None) -> int:
        """Optimizer steps per epoch at a batch size (default: the starting one)."""
        return self._unequal.steps if self.batches else -(-self.per_worker // (batch_size or self.batch_size))

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run at the starting batch size."""
        return self.epochs * self.steps_per_epoch()

    def first_drop(self) -> int | None:
        """The epoch that starts with the first drop of the learning rate, at once to 0.7 of what it was or less."""
        for epoch in range(1, self.epochs):
            before, after = self.schedule(math.nextafter(epoch, 0)), self.schedule(epoch)
            if after < before and after <= DROP * before:
                return epoch
        return None


@dataclass(frozen=True)
class Plan:
    """What the workers have agreed to do until the next decision.

    Args:
        levels: per tensor name, index into the ladder.
        batch_size: samples per worker and step; of the worker with most, where batches differ.
        lr_factor: multiplies the scheduled learning rate.
        period: H, local steps between two exchanges of a local method; 1 = in every step.
        codebooks: per number of bits, quantisation levels in ascending order from -1 to 1; none = the compressor's own.
    """

    levels: Mapping[str, int] = field(default_factory=dict)
    batch_size: int = 1
    lr_factor: float = 1.0
    period: int = 1
    codebooks: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    def pack(self) -> list[float]:
        """The plan as numbers, each exact in 4 bytes, for the broadcast."""
        levels = [level for codebook in self.codebooks.values() for level in codebook]
        return [*self.levels.values(), self.batch_size, self.lr_factor, self.period, *levels]

    def unpack(self, numbers: Sequence[float]) -> "Plan":
        """The plan that `pack` has made numbers of; tensor names and sizes of codebooks are this plan's."""
        rest = iter(numbers)
        levels = {name: int(next(rest)) for name in self.levels}
        batch_size, lr_factor, period = int(next(rest)), next(rest), int(next(rest))
        codebooks = {bits: tuple(next(rest) for _ in codebook) for bits, codebook in self.codebooks.items()}
        return Plan(levels, batch_size, lr_factor, period, codebooks)

    def with_levels(self, levels: Mapping[str, int]) -> "Plan":
        """The same plan with some levels replaced."""
        return replace(self, levels={**self.levels, **levels})


class Measured(NamedTuple):
    """What one tensor of worker 0 would cost and lose at one level, p being what would be sent (residual included).

    error: ||p - C(p)||^2.
    norm: ||p||.
    sent_norm: ||C(p)||.
    wire_bytes: sent by one worker's own link, as the ledger counts it.
    """

    error: float
    norm: float
    sent_norm: float
    wire_bytes: float


class SquareNorms(NamedTuple):
    """Squared norms of the gradients of one step, for the noise scale.

    small: |g_w|^2, mean over the workers.
    big: |mean_w g_w|^2.
    batch_size: samples per worker in this step (fewer in the last one of an epoch).
    """

    small: float
    big: float
    batch_size: int


@dataclass(frozen=True)
class Signals:
    """What a policy sees when it decides; it never sees a compressor.

    Args:
        epoch: the epoch that is running, or has just ended, counted from 0.
        lr: learning rate of the last step; for a policy that decides per epoch, of that epoch.
        next_lr: learning rate of the next step, or with which the next epoch starts; for all but the policy that
            drives the batch, as that one has just decided. After the last epoch, `lr`.
        values: the collected signals by name, each a number per tensor name, and for the whole `model`.
        step: optimizer steps taken before the one that has just been taken.
        exchange: exchanges made before the one that has just been made; with sync=every_step, the step.
        steps_left: optimizer steps to the end of the run, at the present batch size.
        warming_up: the schedule still raises the learning rate, at the time of the next step.
        statistics: what was collected of the quantiser's buckets, see `signals/bucket_statistics.py`.
        loss: training loss of all workers, mean over the steps since it was last read; where asked for.
        probes: per index into the ladder, per tensor name, what that level would cost and lose; where asked for.
        square_norms: of this exchange's gradients, where asked for; None at the end of an epoch.
        epoch_steps: optimizer steps of the epoch that has ended, over which `values` were summed; 0 within an epoch.
        local: the exchange was an averaging of local steps; false for one in a synchronous step.
        end_lr: learning rate with which the epoch ends, an instant before the next one; None = `lr`.
    """

    epoch: int
    lr: float
    next_lr: float
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    step: int = 0
    exchange: int = 0
    steps_left: int = 0
    warming_up: bool = False
    statistics: Mapping[BucketStatistic, Tensor] = field(default_factory=dict)
    loss: float | None = None
    probes: Mapping[int, Mapping[str, Measured]] = field(default_factory=dict)
    square_norms: SquareNorms | None = None
    epoch_steps: int = 0
    local: bool = True
    end_lr: float | None = None


def plan_record(plan: Plan, ladder: Ladder) -> dict[str, Any]:
    """The plan in the field's units, for the metrics row: levels as ranks, densities or bits."""
    return {
        "batch_size": plan.batch_size,
        "lr_factor": plan.lr_factor,
        "period": plan.period,
        "levels": {name: ladder.values[level] for name, level in plan.levels.items()},
        **(
            {"codebooks": {str(bits): list(levels) for bits, levels in plan.codebooks.items()}}
            if plan.codebooks
            else {}
        ),
    }


WHOLE_MODEL = "model"
BLOCK = "bucket from "  # and its first tensor
