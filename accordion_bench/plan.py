"""Vocabulary shared by policies and exchanges: tensor specs, ladders, plans, signals, and requests for signals."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from accordion_bench.batches import UnequalSteps

if TYPE_CHECKING:  # descriptions of compressors are read without torch
    from torch import Tensor


class Request:
    """Base class of requests."""


@dataclass(frozen=True)
class Probe(Request):
    """Cost and loss of a level for the tensors that worker 0 sends, including the residual.

    Args:
        level: index into the ladder.
    """

    level: int


@dataclass(frozen=True)
class RecentMean(Request):
    """Add this exchange to a mean. With a `Probe`, a later `RecentMean` probes this mean instead and resets it."""


@dataclass(frozen=True)
class GradientNoise(Request):
    """When an exchange is due: squared norms of the gradients and of their mean, see `signals/statistics.py`."""


@dataclass(frozen=True)
class TrainingLoss(Request):
    """When an exchange is due: mean training loss since the previous read."""


class BucketStatistic(Request):
    """Statistic of a quantiser's buckets, see `signals/statistics.py`.

    Args:
        lengths: collect in exchanges whose buckets are all `equal` in length, whose lengths `differ`, or in `any`.
    """

    lengths: str

    @property
    def name(self) -> str:
        """Name in checkpoints; statistics are collected and sent in the order of their names."""
        raise NotImplementedError


@dataclass(frozen=True)
class BucketMoments(BucketStatistic):
    """Mean, standard deviation and weight of the coordinates of the largest buckets by norm, for each length.

    The weight of a bucket is its length times its norm, scaled so that a length has the weight of all its buckets.

    Args:
        count: number of buckets of each length.
        weight: whether the norm enters `squared`, in its `first` power, or not (`none`).
    """

    count: int
    weight: str = "squared"
    lengths: str = "any"

    @property
    def name(self) -> str:
        return f"largest_buckets:{self.count}:{self.weight}:{self.lengths}"


@dataclass(frozen=True)
class PooledMoments(BucketStatistic):
    """Sums over all buckets that determine mean and variance of all coordinates."""

    lengths: str = "any"

    @property
    def name(self) -> str:
        return "pooled_moments"


@dataclass(frozen=True)
class CoordinateHistogram(BucketStatistic):
    """Histogram of the magnitudes of the coordinates.

    Args:
        weight: weight of a coordinate by its bucket's norm: `squared`, its `first` power, or `none`.
    """

    weight: str
    lengths: str = "any"

    @property
    def name(self) -> str:
        return f"histogram:{self.weight}" if self.lengths == "any" else f"histogram:{self.weight}:{self.lengths}"


def statistic_named(name: str) -> BucketStatistic:
    """Return the statistic with a name from a checkpoint.

    Raises:
        ValueError: no statistic has this name.
    """
    kind, *arguments = name.split(":")
    match kind:
        case "largest_buckets":
            return BucketMoments(int(arguments[0]), *arguments[1:])
        case "pooled_moments":
            return PooledMoments()
        case "histogram":
            return CoordinateHistogram(*arguments)
    raise ValueError(f"no statistic of buckets has the name {name}")


DROP = 0.7  # a sudden fall of the learning rate to at most this factor counts as a drop


@dataclass(frozen=True)
class TensorSpec:
    """Name and shape of an exchanged tensor.

    Args:
        name: name of the parameter; key of all state.
        shape: without the worker axis.
        table: whether it is an embedding or the output layer, in which each token or class has its own row.
    """

    name: str
    shape: tuple[int, ...]
    table: bool = field(default=False, compare=False)  # files of tensors do not record it

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape (n, m) of the matrix view: first dimension by all others; (0, 0) if the first is 0."""
        return self.shape[0], self.numel // max(self.shape[0], 1)


@dataclass(frozen=True)
class Ladder:
    """Levels of a compressor's knob, from strong (fewest bytes) to weak (most bytes).

    Args:
        knob: `rank`, `density` or `bits`; "" for a compressor without levels.
        values: values of the knob, strong first; a plan contains indices into them.
        pair: the compressor's own (strong, weak) values, for policies that are configured without levels.
    """

    knob: str = ""
    values: tuple[float, ...] = ()
    pair: tuple[float, float] = (0, 0)


@dataclass(frozen=True)
class RunFacts:
    """Facts that are known before a run starts.

    Args:
        epochs: number of epochs of the run.
        workers: A.
        train_size: number of training samples.
        batch_size: samples per worker and step at the start; the largest one if `batches` differ.
        schedule: learning-rate factor as a function of time in epochs.
        warmup_epochs: epochs in which the learning rate rises; 0 = none.
        bandwidth, latency: modelled link of a worker, in bit/s and in seconds per round of a collective.
        specs: the trained tensors; empty while the configuration is checked.
        batches: samples per step of each worker, if they differ; () = all have `batch_size`.
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
        """Return a copy with the trained tensors; it reads no other fact, because some may be unknown."""
        found = copy.copy(self)
        object.__setattr__(found, "specs", tuple(specs))
        return found

    @property
    def per_worker(self) -> int:
        """Training samples per worker and epoch; the largest number if batches differ."""
        return max(self._unequal.of_epoch()) if self.batches else -(-self.train_size // self.workers)

    @property
    def per_step(self) -> int:
        """Samples of all workers in a step."""
        return sum(self.batches) or self.workers * self.batch_size

    @property
    def _unequal(self) -> UnequalSteps:
        return UnequalSteps(self.train_size, self.batches)

    def steps_per_epoch(self, batch_size: int | None = None) -> int:
        """Return the optimizer steps per epoch at a batch size, by default the initial one."""
        return self._unequal.steps if self.batches else -(-self.per_worker // (batch_size or self.batch_size))

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run at the initial batch size."""
        return self.epochs * self.steps_per_epoch()

    def first_drop(self) -> int | None:
        """Return the epoch that starts with the first sudden fall of the learning rate to at most 0.7 of it."""
        for epoch in range(1, self.epochs):
            before, after = self.schedule(math.nextafter(epoch, 0)), self.schedule(epoch)
            if after < before and after <= DROP * before:
                return epoch
        return None


@dataclass(frozen=True)
class Plan:
    """Decisions that all workers follow until the next decision.

    Args:
        levels: index into the ladder, by tensor name.
        batch_size: samples per worker and step; the largest one if batches differ.
        lr_factor: factor of the scheduled learning rate.
        period: H, local steps between two exchanges of a local method; 1 = exchange in every step.
        codebooks: by number of bits, quantisation levels in ascending order from -1 to 1; none = the compressor's own.
    """

    levels: Mapping[str, int] = field(default_factory=dict)
    batch_size: int = 1
    lr_factor: float = 1.0
    period: int = 1
    codebooks: Mapping[int, tuple[float, ...]] = field(default_factory=dict)

    def pack(self) -> list[float]:
        """Return the plan as numbers, each exact in 4 bytes, for the broadcast."""
        levels = [level for codebook in self.codebooks.values() for level in codebook]
        return [*self.levels.values(), self.batch_size, self.lr_factor, self.period, *levels]

    def unpack(self, numbers: Sequence[float]) -> "Plan":
        """Return the plan for the numbers of `pack`; tensor names and sizes of codebooks are those of this plan."""
        rest = iter(numbers)
        levels = {name: int(next(rest)) for name in self.levels}
        batch_size, lr_factor, period = int(next(rest)), next(rest), int(next(rest))
        codebooks = {bits: tuple(next(rest) for _ in codebook) for bits, codebook in self.codebooks.items()}
        return Plan(levels, batch_size, lr_factor, period, codebooks)

    def with_levels(self, levels: Mapping[str, int]) -> "Plan":
        """Return a copy with some levels replaced."""
        return replace(self, levels={**self.levels, **levels})


class Measured(NamedTuple):
    """Cost and loss of one tensor p of worker 0 at one level; p includes the residual.

    Args:
        error: ||p - C(p)||^2.
        norm: ||p||.
        sent_norm: ||C(p)||.
        wire_bytes: bytes sent by one worker's link, as counted by the ledger.
    """

    error: float
    norm: float
    sent_norm: float
    wire_bytes: float


class SquareNorms(NamedTuple):
    """Squared norms of the gradients of one step, for the noise scale.

    Args:
        small: |g_w|^2, mean over the workers.
        big: |mean_w g_w|^2.
        batch_size: samples per worker in this step (fewer in the last one of an epoch).
    """

    small: float
    big: float
    batch_size: int


@dataclass(frozen=True)
class Signals:
    """Information on which a policy decides; it has no access to the compressor.

    Args:
        epoch: current epoch, or the one that has just ended, counted from 0.
        lr: learning rate of the last step; for a policy that decides per epoch, of that epoch.
        next_lr: learning rate of the next step, or at the start of the next epoch, after the decision of the policy
            that drives the batch; that policy itself sees it before. After the last epoch, `lr`.
        values: collected signals by name, each a number per tensor name, and for the whole `model`.
        step: number of optimizer steps before the last one.
        exchange: number of exchanges before the last one; with sync=every_step, equal to `step`.
        steps_left: optimizer steps until the end of the run, at the current batch size.
        warming_up: whether the schedule still raises the learning rate at the next step.
        statistics: collected statistics of the quantiser's buckets, see `signals/statistics.py`.
        loss: training loss of all workers, mean over the steps since it was last read; if requested.
        probes: by index into the ladder and tensor name, cost and loss of that level; if requested.
        square_norms: of this exchange's gradients, if requested; None at the end of an epoch.
        epoch_steps: optimizer steps of the epoch that has ended, over which `values` were summed; 0 within an epoch.
        local: whether the exchange averaged local steps; False for an exchange in a synchronous step.
        end_lr: learning rate at the end of the epoch, immediately before the next one; None = `lr`.
    """

    epoch: int
    lr: float
    next_lr: float
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    step: int = 0
    exchange: int = 0
    steps_left: int = 0
    warming_up: bool = False
    statistics: "Mapping[BucketStatistic, Tensor]" = field(default_factory=dict)
    loss: float | None = None
    probes: Mapping[int, Mapping[str, Measured]] = field(default_factory=dict)
    square_norms: SquareNorms | None = None
    epoch_steps: int = 0
    local: bool = True
    end_lr: float | None = None


def plan_record(plan: Plan, ladder: Ladder) -> dict[str, Any]:
    """Return the plan for the metrics row, with levels as ranks, densities or bits."""
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
BLOCK = "bucket from "  # followed by the name of its first tensor
