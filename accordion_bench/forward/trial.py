"""Trial passes before a run: work per step, support for 16 bits, and batches too small for BatchNorm."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accordion_bench.batches import UnequalSteps, unequal
from accordion_bench.datasets.dataset import Dataset
from accordion_bench.forward.execution import autocast
from accordion_bench.forward.task import task_of
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.run_config import RunConfig
from accordion_bench.tensors.counted_work import CountedWork

FORWARD_AND_BACKWARD = 3  # a backward pass computes two matrix products for each one of the forward pass
TRIALS = 3
PATIENCE = 3.0  # timeout of a trial in seconds
CPU = torch.device("cpu")


def flops_per_kernel(model: nn.Module, dataset: Dataset, batch_size: int) -> float:
    """Return the floating-point operations of a training step per leaf module, from a forward pass of one sample.

    Infinity if the data set has no example. The model is left in evaluation mode.
    """
    example = dataset.example(1)
    if example is None:
        return math.inf
    model.eval()
    with torch.no_grad(), CountedWork() as work:
        task_of(dataset).loss(model, *example, 0, 0)
    kernels = sum(1 for module in model.modules() if next(module.children(), None) is None)
    return FORWARD_AND_BACKWARD * work.flops * batch_size / kernels


@dataclass(frozen=True)
class Slowdown:
    """Result of a trial step in 16 bits.

    Args:
        times: duration relative to float32; 0 = unknown, because the step in float32 exceeded the timeout.
        whole: whether the step was completed; otherwise `times` is a lower bound.
        seconds: duration.
    """

    times: float
    whole: bool = True
    seconds: float = 0.0


class _GivenUp(Exception):
    """A trial has exceeded its timeout."""


def slowdown(model: nn.Module, dataset: Dataset, precision: str, name: str = "this one") -> Slowdown | None:
    """Measure the duration of a tiny step in 16 bits relative to float32; None if the data set has no example.

    A step is stopped after `PATIENCE` seconds, or twice the duration in float32 if that is longer. The gradients of the
    model are lost; its `name` is for messages.

    Raises:
        ConfigError: the processor does not support it; for instance, oneDNN has no bfloat16 LSTM without AVX-512.
    """
    example = dataset.example(2)
    if example is None:
        return None
    model.train()
    usual, known = _seconds(model, dataset, "float32", example, PATIENCE)
    try:
        taken, whole = _seconds(model, dataset, precision, example, max(PATIENCE, 2 * usual))
        return Slowdown(taken / usual if known else 0.0, whole, taken)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise ConfigError(
            f"precision must be float32 for model={name} on this processor, which has failed in {precision} ({why}), "
            f"got {precision}; type precision=float32"
        ) from None


def refuse_single_sample(
    model: nn.Module, dataset: Dataset, config: RunConfig, workers: int, later: Callable[[int], Iterable[int]]
) -> None:
    """Refuse batch sizes that lead to a forward pass of a single sample, if the model cannot be trained on one.

    On maps of 1 x 1, BatchNorm then has one value per channel and no variance. The model's statistics are lost. `later`
    maps a first batch size to those that policies may derive from it.
    """
    if dataset.task != "images":
        return
    why = f"BatchNorm of model={config.chosen('model')} needs two"
    if unequal(config.batch_size):
        wrong = _refusal_of_unequal(dataset, config, why)
    else:
        wrong = _refusal_of_first(dataset, config, workers, why) or _refusal_of_later(
            -(-dataset.train_count // workers), config, later, why
        )
    if wrong is not None and _needs_two(model, dataset):
        raise wrong


def _refusal_of_unequal(dataset: Dataset, config: RunConfig, why: str) -> ConfigError | None:
    sizes = UnequalSteps(dataset.train_count, unequal(config.batch_size)).kinds()
    if 1 not in sizes | _last_passes(sizes, config.micro_batch_size):
        return None
    rule = f"a list that leaves no forward pass with one sample, {why}"
    return ValueRefused("batch_size", rule, config.batch_size, config.largest_batch)


def _refusal_of_first(dataset: Dataset, config: RunConfig, workers: int, why: str) -> ConfigError | None:
    samples, batch_size, micro = -(-dataset.train_count // workers), config.largest_batch, config.micro_batch_size
    steps = _steps(samples, batch_size)
    if 1 not in steps | _last_passes(steps, micro):
        return None
    if samples == 1:
        fewer = dataset.train_count // 2
        return ValueRefused("workers", f"at most {fewer:,}, since {why} samples in a step", workers, fewer)
    if 1 in steps:
        fits = next(size for size in range(batch_size + 1, samples + 1) if samples % size != 1)
        rule = f"a number that leaves no step with one sample ({samples:,} per worker), {why}"
        return ValueRefused("batch_size", rule, batch_size, fits)
    rule = f"a number that leaves no forward pass with one sample of {' or '.join(map(str, sorted(steps)))}, {why}"
    return ValueRefused("micro_batch_size", rule, micro, None)


def _refusal_of_later(
    samples: int, config: RunConfig, later: Callable[[int], Iterable[int]], why: str
) -> ConfigError | None:
    batch_size = config.largest_batch

    def leaves_one(size: int) -> bool:
        return 1 in _last_passes(_steps(samples, size), config.micro_batch_size)

    wrong = next(filter(leaves_one, later(batch_size)), None)
    if wrong is None:
        return None
    rule = f"a number that grows to none that leaves a forward pass one sample ({wrong} does, with {samples:,} per "
    rule += f"worker), {why}"
    others = [*range(batch_size + 1, samples + 1), *range(batch_size - 1, 0, -1)]
    fits = next((first for first in others if not any(map(leaves_one, [first, *later(first)]))), None)
    if fits is None:
        return ConfigError(f"batch_size must be {rule}, got {batch_size}; type adaptive=none")
    return ValueRefused("batch_size", rule, batch_size, fits)


def _steps(samples: int, batch_size: int) -> set[int]:
    """Return the numbers of a worker's samples in the steps of an epoch."""
    return {min(batch_size, samples), samples % batch_size} - {0}


def _last_passes(steps: set[int], micro_batch_size: int | None) -> set[int]:
    """Return the numbers of samples in the last forward pass of each of these steps."""
    return {step if micro_batch_size is None else step % micro_batch_size or micro_batch_size for step in steps}


def _needs_two(model: nn.Module, dataset: Dataset) -> bool:
    """Whether a training forward pass of one sample fails, found by trying it."""
    example = dataset.example(1)
    if example is None:
        return False
    model.train()
    try:
        with torch.no_grad():
            task_of(dataset, CPU).loss(model, *example, 0, 0)
    except ValueError as error:
        return "more than 1 value per channel" in str(error)
    return False


def _seconds(
    model: nn.Module, dataset: Dataset, precision: str, example: tuple[Tensor, Tensor], patience: float
) -> tuple[float, bool]:
    """Return the seconds of a forward and backward pass, and whether it was completed within the timeout.

    The time is the median of several passes after a warm-up pass, or of fewer if the timeout is reached.
    """
    task = task_of(dataset, CPU)
    took: list[float] = []
    begin = time.perf_counter()
    while len(took) <= TRIALS and time.perf_counter() - begin < patience:
        start = time.perf_counter()
        try:
            with _given_up_at(start + patience, model), autocast(precision, CPU):
                task.loss(model, *example, 0, 0).backward()
        except _GivenUp:
            return (statistics.median(took), True) if took else (time.perf_counter() - start, False)
        took.append(time.perf_counter() - start)
        task.begin_epoch()
    return statistics.median(took[1:] or took), True


@contextlib.contextmanager
def _given_up_at(deadline: float, model: nn.Module) -> Iterator[None]:
    """Stop forward passes before the next layer, and backward passes at the next gradient, after the deadline."""

    def look(*_: object) -> None:
        if time.perf_counter() > deadline:
            raise _GivenUp

    hooks = [module.register_forward_pre_hook(look) for module in model.modules()]
    hooks += [param.register_hook(look) for param in model.parameters() if param.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
