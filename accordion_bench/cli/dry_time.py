"""Times of a dry run, for this machine or another device, and the step time from which dense gradients are hidden."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from accordion_bench.advising.arms import optimizer_step_seconds, random_gradients
from accordion_bench.advising.counted_step import relative_copy_time, step_on
from accordion_bench.advising.gpus import AskedDevice
from accordion_bench.advising.step_times import this_device, timed, usual
from accordion_bench.cli.example import Subject, batch_of
from accordion_bench.config.components import Components
from accordion_bench.network.link_model import Network
from accordion_bench.network.links import link_name
from accordion_bench.options.instantiate import build
from accordion_bench.options.units import duration
from accordion_bench.processes.placement import Placement
from accordion_bench.run_config import RunConfig
from accordion_bench.training.training_step import TrainingStep

TRIALS = 3  # timed steps after a first one
ENOUGH = 20.0  # seconds after which no further step starts


@dataclass(frozen=True)
class Spent:
    """Predicted seconds.

    Args:
        step: one step of all workers on this machine, one after another.
        averagings: all averagings on this machine, codec included, without links.
        comm: all exchanges on the modelled link.
    """

    step: float
    averagings: float
    comm: float


def network_of(config: RunConfig) -> Network:
    """Build the modelled link."""
    network: Network = build(config.network, "network")
    return network


def seconds_of_a_step(training: TrainingStep, trials: int = TRIALS) -> float:
    """Return the median duration of a few steps after a first one, with all workers one after another."""
    training.begin_epoch()
    left = training.position.steps_per_epoch - training.position.step_in_epoch
    return usual(timed(training.take, training.device, min(1 + trials, left), ENOUGH))


def first_line(config: RunConfig, where: Placement, asked: AskedDevice) -> str:
    """Return the line that names the device of the times."""
    if asked.gpu is not None:
        on = asked.gpu.in_words
    elif asked.compute is not None:
        kind = "CPU" if config.device == "cpu" else "GPU"
        on = f"a {kind} whose forward and backward pass take {duration(asked.compute)}"
    else:
        on = this_device(torch.device(where.device))
        on += "; for those of GPUs type gpu=h100 or compute_ms=12" if where.device == "cpu" else ""
    return f"{'dry run':<11}times are those of {on}"


def here(config: RunConfig, training: TrainingStep, where: Placement, parts: Components, spent: Spent) -> Iterator[str]:
    """Yield lines on the seconds on this machine and on the modelled link."""
    run = parts.run
    seconds = run.steps * spent.step + spent.averagings
    beside = "" if where.processes == 1 else f"; {where.processes} processes share this time if there are enough cores"
    compiled = ", without compile" if config.compile else ""
    on = this_device(torch.device(where.device))
    yield (
        f"{'time':<11}about {_seconds(seconds)} on {on} for all workers ({_seconds(spent.step)} a step, from a trial"
        f"{compiled}), without evaluation{beside}"
    )
    own = f"; {_seconds(seconds / run.workers)} of computing for one worker on its own machine"
    yield from _modelled(config, training, parts, spent.comm, own)


def elsewhere(
    config: RunConfig, training: TrainingStep, parts: Components, spent: Spent, asked: AskedDevice
) -> Iterator[str]:
    """Yield lines on the seconds of one worker per device, if this is not available here, and on the modelled link."""
    step, on = _step_elsewhere(config, training, parts, asked)
    yield (
        f"{'time':<11}about {_seconds(parts.run.steps * step)} of computing for one worker on {on}, {duration(step)} a "
        "step, without evaluation and codecs"
    )
    yield from _modelled(config, training, parts, spent.comm)


def _modelled(
    config: RunConfig, training: TrainingStep, parts: Components, comm: float, own: str = ""
) -> Iterator[str]:
    """Yield lines on communication, and on the step time below which computation cannot hide dense gradients."""
    if config.comm.hook:
        return
    run = parts.run
    dense = _ring(network_of(config), 4 * sum(spec.numel for spec in training.axis.specs), run.workers)
    yield (
        f"{'modelled':<11}{_seconds(comm)} of communication on {link_name(config.to_dict())}, hidden or not "
        f"(dense {_seconds(run.steps * dense)}){own}"
    )
    if dense:
        yield (
            f"{'':<11}if a step computes for less than about {duration(dense)}, it can no longer hide dense gradients, "
            "and communicating less starts to save time"
        )


def _step_elsewhere(
    config: RunConfig, training: TrainingStep, parts: Components, asked: AskedDevice
) -> tuple[float, str]:
    """Return (seconds of one worker's step on the requested device, name of the device)."""
    together, cpu = config.micro_batch_size or config.largest_batch, torch.device("cpu")
    subject = Subject(config, training.axis.model, batch_of(parts.dataset, cpu, together), parts.dataset)
    counted = subject.counted()
    gradients = random_gradients(counted.specs, cpu)
    update = optimizer_step_seconds(subject.optimizer, gradients) * relative_copy_time(asked.codecs_of, gradients)
    kind = "cpu" if config.device == "cpu" else "cuda"
    times = step_on(asked, counted, update, config.precision, config.deterministic, kind)
    passes = 1 if asked.compute is not None else -(-config.largest_batch // together)
    return passes * times.backward_end + update, times.place


def _ring(network: Network, nbytes: float, workers: int) -> float:
    rounds = 2 * (workers - 1)
    return network.seconds(rounds / workers * nbytes, rounds, workers)


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
