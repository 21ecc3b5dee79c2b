"""Times of a training step: from a trial here, from an estimate, or from what `comm.timeline()` has recorded."""

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
from accordion_bench.optimizers.torch_optim import fused, without_dynamo
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.keyed_rng import kept_rng

T = TypeVar("T")
Mark = TypeVar("Mark")
FEWEST = 10  # steps from which something may be predicted without a warning
WIDEST = 0.3  # relative spread, likewise
INSTEAD = "record one with comm.timeline() of ab.attach"


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a training step of one worker alone on its device; medians over some steps.

    Args:
        specs: the trained tensors, in the model's order.
        ready: of each tensor, from the start of the step until its gradient was there.
        backward_end: from the start of the step until the backward pass was over.
        update: of the optimizer's step.
        steps: what each measured step took in all, for spread and intervals; () = not known.
        batch_size: samples of a step; 0 = not known.
        model: what it is called.
        device: `cpu`, `cuda`.
        source: where the times come from: `a trial here`, or a file; "" = they are estimated.
        on: on which device, as one says it; "" = on one like `device`.
    """

    specs: tuple[TensorSpec, ...]
    ready: tuple[float, ...]
    backward_end: float
    update: float
    steps: tuple[float, ...]
    batch_size: int
    model: str
    device: str
    source: str
    on: str = ""

    @property
    def place(self) -> str:
        """The device of the step, in words: `THIS CPU`, `an NVIDIA H100 (estimated)`."""
        return self.on or ("a CPU" if self.device == "cpu" else "a GPU")

    @property
    def estimated(self) -> bool:
        """Whether the step is estimated, not timed."""
        return not self.source

    @property
    def compute(self) -> float:
        """Seconds of a step without any communication."""
        return self.backward_end + self.update

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles of the measured steps, over their median."""
        return relative_spread(self.steps)

    def scaled(self, factor: float) -> "StepTimes":
        """The same step on a device that takes so many times as long."""
        longer = tuple(factor * seconds for seconds in self.ready)
        return replace(self, ready=longer, backward_end=factor * self.backward_end, update=factor * self.update)

    def doubts(self) -> list[str]:
        """Reasons why a prediction from these times may be wrong, a sentence each."""
        found: list[str] = []
        if self.estimated:
            return found
        if not self.steps:
            return [f"{self.source} does not say what each step took, so their spread is not known: record it again"]
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
    """Half of the distance between the quartiles, over the median; 0 of a single value."""
    if len(seconds) < 2:
        return 0.0
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return (upper - lower) / 2 / median


def step_times_from(path: str | Path, specs: Sequence[TensorSpec] | None = None) -> StepTimes:
    """Read when gradients were ready and what a step took.

    A gradient that no step has had counts as ready at the end of the backward pass. Of format 1, which lacks it, the
    spread of the steps is not known.

    Args:
        path: of the JSON file.
        specs: trained tensors of the model that advice is for; None = whatever is in the file.

    Raises:
        ConfigError: there is no such file, it is none of `comm.timeline()`, or of another model.
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


STEPS = 30  # that are measured, where there is time
BUDGET = 20.0  # seconds
WARM_UP = 2  # steps that are not counted: the first ones allocate and choose kernels

Loss = Callable[[nn.Module, Any], Tensor]
"""loss(model, batch): the mean loss of a batch, a scalar."""

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of some parameters."""


class Effort(NamedTuple):
    """How long a step is measured.

    steps: that are measured after the warm-up.
    budget: seconds after which no further step is begun; one is measured in any case.
    """

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
    """Train a copy of the model on one batch for some steps, and time forward, backward, each gradient and the update.

    Model, gradients, random numbers and mode stay as they are. Loading data is not in it.

    Args:
        model: on its device; of DistributedDataParallel, the module inside.
        example_batch: what `loss` takes, on the same device.
        loss: forward pass and loss, in whatever precision.
        optimizer: makes the optimizer of the copy's parameters; None = SGD with momentum.
        batch_size: samples in the batch, for messages; 0 = not known.
        effort: how long it is measured.

    Returns:
        the times, of a model by the name of its class.

    Raises:
        ConfigError: the model has nothing to train, does not take the batch, or does not fit into memory.
    """
    steps, budget = effort
    checks.integer("steps", steps, at_least=1, instead=STEPS)
    checks.number("budget", budget, above=0, instead=BUDGET)
    inner = trained_module(model)
    device = next(inner.parameters()).device
    with kept_rng(device), memory_told(batch_size):
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
    """The model itself; of DistributedDataParallel, the module inside.

    Raises:
        ConfigError: it has nothing to train.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if not trained_parameters(inner):
        raise ConfigError("model must have parameters that are trained, got none; pass one with requires_grad=True")
    return inner


def this_device(device: torch.device) -> str:
    """The device at hand, in words. A CPU is in capitals, because few clusters train on CPUs."""
    return "THIS CPU" if device.type == "cpu" else f"this {torch.cuda.get_device_name(device)}"


class Passes(Generic[Mark]):
    """Forward and backward passes of a model, which is in training mode from here on; gradients are the caller's.

    Args:
        model: to train.
        batch: the same in every step.
        loss: of model and batch.
        mark: gives what is noted at a moment: the time, or what has been computed up to it.
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
        """(When each gradient was there, when all of it was over); one that the loss does not reach waits for that.

        Raises:
            ConfigError: the loss cannot be computed, or is no scalar.
        """
        self._marks.clear()
        scalar_loss(self.loss, self.model, self.batch).backward()
        over = self.mark()
        return [self._marks.get(i, over) for i in range(len(self.params))], over


class Trial:
    """Steps of a model of its own, and what they have taken.

    Args:
        model, batch, loss: as for `Passes`.
        make: the optimizer; None = SGD with momentum.

    Attributes:
        ready: of each parameter, seconds from the start of each step until its gradient was there; of one that the loss
            does not reach, until the end of the backward pass.
        backward_ends, updates, totals: of each step: when its backward pass was over, what the optimizer and what all
            took.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Loss, make: MakeOptimizer | None) -> None:
        device = next(model.parameters()).device
        self.clock, self.wait = Clock(device), waiting_for(device)
        self.passes = Passes(model, batch, loss, self.clock.mark)
        self.optimizer = (make or usual_optimizer)(self.passes.params)
        self.forget()

    def forget(self) -> None:
        """Forget all steps so far."""
        self.ready: list[list[float]] = [[] for _ in self.passes.params]
        self.backward_ends: list[float] = []
        self.updates: list[float] = []
        self.totals: list[float] = []

    def step(self) -> None:
        """One step, which is over when this returns, as an exchange of gradients would have it.

        Raises:
            ConfigError: the loss cannot be computed, or is no scalar.
        """
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
    """A function that waits until all work of a device is done."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def timed(run: Callable[[], object], device: torch.device, times: int, enough: float = math.inf) -> list[float]:
    """Seconds of each of some calls, one at least; the first ones allocate and load kernels.

    Args:
        run: is called.
        device: on which it computes.
        times: calls, at most.
        enough: seconds after which no further call is begun.
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
    """All values but the first; the first if there is no other."""
    return values[1:] or values


def usual(values: Sequence[float]) -> float:
    """The median of all values but the first."""
    return float(statistics.median(counted(values)))


def scalar_loss(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    """The loss of a batch.

    Raises:
        ConfigError: it cannot be computed, or is no scalar.
    """
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
        got = "one that hangs on no parameter" if got.endswith("[]") else got
        raise ConfigError(
            f"loss(model, batch) must be a scalar tensor with a gradient, got {got}; return the mean loss of the batch"
        )
    return found


def _why(error: Exception) -> str:
    """The first line of an error; an error for lack of memory is raised again, for `memory_told`."""
    if lacks_memory(error):
        raise error
    return (str(error).splitlines() or [type(error).__name__])[0]


def usual_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, as in most runs. The tiny learning rate changes no time and keeps numbers finite."""
    made: torch.optim.Optimizer = fused(without_dynamo(torch.optim.SGD), params[0].device)(
        params, lr=1e-6, momentum=0.9, weight_decay=1e-4
    )
    return made


def copied(model: nn.Module) -> nn.Module:
    """A copy without hooks and gradients.

    Raises:
        ConfigError: the model holds what cannot be copied.
    """
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
def memory_told(batch_size: int) -> Iterator[None]:
    """A context in which a lack of memory is refused in one sentence.

    Args:
        batch_size: samples of a step; 0 = not known.

    Raises:
        ConfigError: there was not enough.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        if batch_size > 1:
            rule = "so small that a step fits into the memory of this device"
            raise checks.ValueRefused("batch_size", rule, batch_size, batch_size // 2) from error
        raise ConfigError(
            "model must fit into the memory of this device with its gradients and a batch, got one that does not; pass "
            "a smaller batch or a smaller model"
        ) from error


def lacks_memory(error: BaseException) -> bool:
    """Whether an allocation has failed; on a CPU, torch says so in the message alone."""
    words = ("can't allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in str(error) for word in words)
