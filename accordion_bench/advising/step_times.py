"""Step times: duration of the parts of a training step, measured here, estimated, or read from a timeline file."""

import contextlib
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from accordion_bench.attaching.own_parameters import trained_parameters, trained_specs, unwrapped
from accordion_bench.comm.clock import Clock
from accordion_bench.network.timeline_file import NoTimeline, read_timeline, refuse_other_model
from accordion_bench.optimizers.inner import fused, without_dynamo
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.keyed_rng import kept_rng

T = TypeVar("T")
Mark = TypeVar("Mark")
FEWEST = 10  # fewer measured steps cause a warning
WIDEST = 0.3  # a larger relative spread causes a warning
INSTEAD = "record one with comm.timeline() of ab.attach"


@dataclass(frozen=True)
class StepTimes:
    """Median seconds of a training step of one worker alone on its device."""

    specs: tuple[TensorSpec, ...]  # the trained tensors, in the model's order
    ready: tuple[float, ...]  # for each tensor, time from the start of the step until its gradient is available
    backward_end: float  # time from the start of the step to the end of the backward pass
    update: float  # duration of the optimizer's step
    steps: tuple[float, ...]  # total duration of each measured step, for spread and intervals; () = unknown
    batch_size: int  # samples per step; 0 = unknown
    model: str  # name of the model
    device: str  # device type, `cpu` or `cuda`
    source: str  # source of the times: `a trial here`, or a file; "" = estimated
    on: str = ""  # name of the device; "" = any device of this type

    @property
    def place(self) -> str:
        """Name of the device in a sentence: `THIS CPU`, `an NVIDIA H100 (estimated)`."""
        return self.on or ("a CPU" if self.device == "cpu" else "a GPU")

    @property
    def estimated(self) -> bool:
        """Whether the times are estimated rather than measured."""
        return not self.source

    @property
    def compute(self) -> float:
        """Seconds per step without communication."""
        return self.backward_end + self.update

    @property
    def spread(self) -> float:
        """Half the interquartile range of the measured steps over their median."""
        return relative_spread(self.steps)

    def scaled(self, factor: float) -> "StepTimes":
        """Return the same step on a device that takes `factor` times as long."""
        longer = tuple(factor * seconds for seconds in self.ready)
        return replace(self, ready=longer, backward_end=factor * self.backward_end, update=factor * self.update)

    def doubts(self) -> list[str]:
        """Return reasons why a prediction from these times may be wrong, one clause each."""
        found: list[str] = []
        if self.estimated:
            return found
        if not self.steps:
            return [f"{self.source} lacks the duration of each step, so their spread is unknown: record it again"]
        if len(self.steps) < FEWEST:
            found.append(
                f"{self.source} has {len(self.steps)} steps, fewer than {FEWEST}: record more before you rely on this"
            )
        if self.spread > WIDEST:
            found.append(
                f"the steps of {self.source} differ by {100 * self.spread:.0f} % about their median, more than "
                f"{100 * WIDEST:.0f} %: measure again on a quiet machine"
            )
        return found


def relative_spread(seconds: Sequence[float]) -> float:
    """Return half the interquartile range over the median; 0 for fewer than two values."""
    if len(seconds) < 2:
        return 0.0
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return (upper - lower) / 2 / median


def step_times_from(path: str | Path, specs: Sequence[TensorSpec] | None = None) -> StepTimes:
    """Read step times from a timeline file of the model with these trained tensors; None = of any model.

    A tensor without a gradient is ready at the end of the backward pass. Files of format 1 do not contain the spread of
    the steps.

    Raises:
        ConfigError: the file does not exist, was not written by `comm.timeline()`, or is of another model.
    """
    try:
        step = read_timeline(path)
        if specs is not None:
            refuse_other_model(step, specs)
    except NoTimeline as why:
        told = f"timeline must be a file that comm.timeline() has written, got {path}: {why}; {INSTEAD}"
        raise ConfigError(told) from None
    return StepTimes(
        specs=step.specs if specs is None else tuple(specs),
        ready=step.ready,
        backward_end=step.backward_end,
        update=step.update,
        steps=step.steps,
        batch_size=0,
        model=step.model,
        device=step.device,
        source=str(path),
        on=f"the {'CPU' if step.device == 'cpu' else 'GPU'} of {Path(path).name}" if step.device else "",
    )


STEPS = 30  # measured steps if time allows
BUDGET = 20.0  # seconds
WARM_UP = 2  # steps that are not measured: the first ones allocate memory and choose kernels

Loss = Callable[[nn.Module, Any], Tensor]
"""loss(model, batch): the mean loss of a batch, a scalar."""

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Function that makes an optimizer from a list of parameters."""


class Effort(NamedTuple):
    """Limits: steps after the warm-up, and seconds after which none starts; at least one is measured."""

    steps: int = STEPS
    budget: float = BUDGET


USUAL_EFFORT = Effort()


def measured_step(
    model: nn.Module,
    example_batch: Any,
    loss: Loss,
    optimizer: MakeOptimizer | None = None,
    batch_size: int = 0,
    effort: Effort = USUAL_EFFORT,
) -> StepTimes:
    """Train a copy of the model on one batch for some steps, and time both passes, each gradient and the update.

    Model, gradients, random state and training mode do not change. The times do not include data loading.

    Args:
        model: model on its device; for DistributedDataParallel, the wrapped module is used.
        example_batch: input of `loss`, on the same device.
        loss: forward pass and loss, in any precision.
        optimizer: function that makes the optimizer of the copy's parameters; None = SGD with momentum.
        batch_size: samples in the batch, for messages; 0 = unknown.

    Raises:
        ConfigError: the model has no trained parameters, does not accept the batch, or does not fit into memory.
    """
    steps, budget = effort
    checks.integer("steps", steps, at_least=1, instead=STEPS)
    checks.number("budget", budget, above=0, instead=BUDGET)
    inner = trained_module(model)
    device = next(inner.parameters()).device
    with kept_rng(device), explained_memory_errors(batch_size):
        trial = Trial(copied(inner), example_batch, loss, optimizer)
        began = time.perf_counter()
        for _ in range(WARM_UP):
            trial.step()
            if time.perf_counter() - began > budget:
                break
        trial.forget()
        while len(trial.totals) < steps and (not trial.totals or time.perf_counter() - began < budget):
            trial.step()
    return StepTimes(
        specs=tuple(trained_specs(inner)),
        ready=tuple(map(statistics.median, trial.ready)),
        backward_end=statistics.median(trial.backward_ends),
        update=statistics.median(trial.updates),
        steps=tuple(trial.totals),
        batch_size=batch_size,
        model=type(unwrapped(inner)).__name__,
        device=device.type,
        source="a trial here",
        on=this_device(device),
    )


def trained_module(model: nn.Module) -> nn.Module:
    """Return the model itself, or the module in DistributedDataParallel; ConfigError if nothing is trained."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if not trained_parameters(inner):
        raise ConfigError("model must have parameters that are trained, got none; pass one with requires_grad=True")
    return inner


def this_device(device: torch.device) -> str:
    """Return the name of the available device. A CPU is in capitals, because few clusters train on CPUs."""
    return "THIS CPU" if device.type == "cpu" else f"this {torch.cuda.get_device_name(device)}"


class Passes(Generic[Mark]):
    """Forward and backward passes of a model, with a mark at each gradient. The caller resets gradients.

    Args:
        model: model, which is set to training mode.
        batch: batch of every step.
        loss: loss of model and batch.
        mark: returns the mark of the current point, such as the time or the work done so far.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Loss, mark: Callable[[], Mark]) -> None:
        self.model, self.batch, self.loss, self.mark = model, batch, loss, mark
        if not model.training:
            model.train()
        self.params = [param for _, param in trained_parameters(model)]
        self._marks: dict[int, Mark] = {}
        for i, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(lambda _, i=i: self._marks.update({i: mark()}))

    def take(self) -> tuple[list[Mark], Mark]:
        """Return (marks of the gradients, mark at the end); without a gradient, a parameter has the mark at the end."""
        self._marks.clear()
        scalar_loss(self.loss, self.model, self.batch).backward()
        over = self.mark()
        return [self._marks.get(i, over) for i in range(len(self.params))], over


class Trial:
    """Timed training steps of a model, which it changes; by default with SGD with momentum.

    Attributes:
        ready: for each parameter, seconds from the start of each step until its gradient is available; if the loss does
            not depend on it, until the end of the backward pass.
        backward_ends, updates, totals: for each step, seconds from its start to the end of the backward pass, of the
            optimizer's step, and in total.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Loss, make: MakeOptimizer | None) -> None:
        device = next(model.parameters()).device
        self.clock, self.wait = Clock(device), waiting_for(device)
        self.passes = Passes(model, batch, loss, self.clock.mark)
        self.optimizer = (make or usual_optimizer)(self.passes.params)
        self.forget()

    def forget(self) -> None:
        """Discard the times of all steps so far."""
        self.ready: list[list[float]] = [[] for _ in self.passes.params]
        self.backward_ends: list[float] = []
        self.updates: list[float] = []
        self.totals: list[float] = []

    def step(self) -> None:
        """Take one step, and synchronise with the device at its end, as an exchange of gradients would."""
        for param in self.passes.params:
            param.grad = None
        began = self.clock.mark()
        marks, end = self.passes.take()
        self.optimizer.step()
        over = self.clock.mark()
        self.wait()
        for taken, mark in zip(self.ready, marks, strict=True):
            taken.append(self.clock.between(began, mark))
        self.backward_ends.append(self.clock.between(began, end))
        self.updates.append(self.clock.between(end, over))
        self.totals.append(self.clock.between(began, over))


def waiting_for(device: torch.device) -> Callable[[], None]:
    """Return a function that synchronises with the device; on a CPU it does nothing."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def timed(run: Callable[[], object], device: torch.device, times: int, enough: float = math.inf) -> list[float]:
    """Return the seconds of at least one and at most `times` calls; after `enough` seconds no further call starts.

    The first calls also allocate memory and load kernels.
    """
    wait, taken, began = waiting_for(device), list[float](), time.perf_counter()
    while not taken or (len(taken) < times and time.perf_counter() - began < enough):
        wait()
        start = time.perf_counter()
        run()
        wait()
        taken.append(time.perf_counter() - start)
    return taken


def counted(values: Sequence[T]) -> Sequence[T]:
    """Return all values except the first, or the first if it is the only one."""
    return values[1:] or values


def usual(values: Sequence[float]) -> float:
    """Return the median of `counted(values)`."""
    return float(statistics.median(counted(values)))


def scalar_loss(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch; ConfigError if it cannot be computed, or is no scalar."""
    try:
        found = loss(model, batch)
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"example_batch must be a batch that the model takes, got one with which loss(model, batch) fails "
            f"({_why(error)}); pass one as it comes from your data loader, on the model's device"
        ) from error
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
        got = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        got = "one that depends on no parameter" if got.endswith("[]") else got
        raise ConfigError(
            f"loss(model, batch) must be a scalar tensor with a gradient, got {got}; return the mean loss of the batch"
        )
    return found


def _why(error: Exception) -> str:
    """Return the first line of an error; raise an out-of-memory error again, for `explained_memory_errors`."""
    if is_out_of_memory(error):
        raise error
    return (str(error).splitlines() or [type(error).__name__])[0]


def usual_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum. The tiny learning rate does not affect the times and keeps numbers finite."""
    made: torch.optim.Optimizer = fused(without_dynamo(torch.optim.SGD), params[0].device)(
        params, lr=1e-6, momentum=0.9, weight_decay=1e-4
    )
    return made


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy of the model without its gradients and hooks; ConfigError if it cannot be copied."""
    try:
        return copy.deepcopy(model)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigError(
            f"model must be one that copy.deepcopy can copy, got one that it cannot ({_why(error)}); pass a model "
            "that was just built"
        ) from error


@contextlib.contextmanager
def explained_memory_errors(batch_size: int) -> Iterator[None]:
    """Context that reports an out-of-memory error as a one-sentence ConfigError."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if batch_size > 1:
            rule = "so small that a step fits into the memory of this device"
            raise checks.ValueRefused("batch_size", rule, batch_size, batch_size // 2) from error
        raise ConfigError(
            "model must fit into the memory of this device with its gradients and a batch, got one that does not; pass "
            "a smaller batch or a smaller model"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation; on a CPU, torch reports it only in the message."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in str(error) for word in words)
