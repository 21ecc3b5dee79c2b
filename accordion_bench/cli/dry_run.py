"""Dry run (`--dry-run`): predict plan, bytes, memory and time of a run from sizes and a short trial.

A dry run creates no folder and needs no data.
"""

import copy
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from accordion_bench import train
from accordion_bench.advising.arms import optimizer_step_seconds, random_gradients
from accordion_bench.advising.counted_step import relative_copy_time, step_on
from accordion_bench.advising.gpus import AskedDevice
from accordion_bench.advising.step_times import this_device, timed, usual
from accordion_bench.cli.command_line import DRY_RUN
from accordion_bench.cli.example import Example, Subject, batch_of
from accordion_bench.comm.collectives import Comm
from accordion_bench.config.components import Components, with_counts
from accordion_bench.config.validate import options_without_effect, validate
from accordion_bench.exchange.dry_exchange import size_of, state_bytes, tensors_in
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.network.link_model import Network
from accordion_bench.network.links import link_name
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import Config, build
from accordion_bench.options.units import counted, duration, human_bytes, samples
from accordion_bench.plan import Plan
from accordion_bench.position import StepInfo
from accordion_bench.processes.machine import run_settings
from accordion_bench.processes.placement import Placement, place
from accordion_bench.run_config import RunConfig
from accordion_bench.sync.outer import exchanges_of_buffers
from accordion_bench.sync.scheme import Sync
from accordion_bench.tensors import keyed_rng
from accordion_bench.training.training_step import TrainingStep

HERE = AskedDevice()
AVERAGED = ("difference", "replica")  # exchanges that the trial of a step does not contain
SMALL = 1e-3  # standard deviation of random gradients
TRIALS = 3  # timed steps after a first one
ENOUGH = 20.0  # seconds after which no further step starts


@dataclass(frozen=True)
class DryExchanges:
    """Exchanges of one kind in a run. Means are over the compressor's cycle (`Traits.cycle`).

    Args:
        exchange: the exchange.
        times: number of exchanges in the run.
        info: position of a step with this exchange, after a dense start.
        seconds: mean duration of one averaging with the codecs of all workers, without links and without compiling
            kernels; 0 for exchanges of gradients, which the trial of a step contains.
        wire: mean bytes sent over one worker's link per exchange.
        rounds: number of successive rounds per exchange.
    """

    exchange: Exchange
    times: int
    info: StepInfo
    seconds: float
    wire: float
    rounds: int

    def payload(self, plan: Plan | None = None) -> int:
        """Return the mean payload of one worker in bytes per exchange, with the given plan or that of `info`."""
        return self.exchange.mean_bytes(self.info if plan is None else replace(self.info, plan=plan))


def run(cfg: Config, typed: dict[str, Any], cell: str = "", asked: AskedDevice = HERE) -> float:
    """Print plan, bytes, memory and time of a run without training; return NaN, as the metric for a sweep.

    Args:
        cfg: resolved configuration.
        typed: keys on the command line.
        cell: name of the sweep's cell for the user; "" = no sweep.
        asked: device of the predicted times; false = this one.

    Raises:
        ConfigError: a value is invalid, or the configuration resumes a run.
    """
    if cfg["choices"].get("experiment") == "smoke":
        raise ConfigError(f"{DRY_RUN} tells of one run, got +experiment=smoke, whose cells are computed; type it alone")
    if cfg["resume"] is not None:
        raise ConfigError(f"{DRY_RUN} must stand beside a new run's options, got resume={cfg['resume']}; type those")
    config = with_counts(RunConfig.from_dict(cfg))
    where = place(config)
    parts = validate(config, where, set(typed))
    if parts.dataset.example(1) is None:
        name = config.chosen("dataset")
        raise ConfigError(f"{DRY_RUN} needs a data set with an example, got dataset={name}; write its method example")
    config = replace(config, workers=where.workers)
    if where.rank == 0:
        for warning in options_without_effect(config, set(typed), parts):
            print(f"warning: {warning}", file=sys.stderr)
        print(first_line(config, where, asked))
        if cell:
            print(cell.rstrip(": "))
        print(train.header(config, where, parts), flush=True)
        print("\n".join(told(config, where, parts, asked)), flush=True)
    return float("nan")


def told(config: RunConfig, where: Placement, parts: Components, asked: AskedDevice = HERE) -> Iterator[str]:
    """Yield the lines on plan, bytes, memory and time."""
    settings = run_settings(where.device, where.threads or parts.threads, config.deterministic)
    with settings:
        training = training_of(config, where, parts)
        step = seconds_of_a_step(training, 0 if asked else TRIALS)
        made = exchanges(training, parts)
        yield from plan_lines(training, parts)
        if parts.sync.quorum is not None:
            yield f"{'':<11}as if all workers took part in each averaging, since late workers cannot be predicted"
        if config.comm.hook:
            yield f"{'bytes':<11}not counted: what comm.hook={config.comm.hook} sends is known to the hook alone"
        else:
            yield from byte_lines(training, parts, made)
        yield from memory_lines(training, where, made)
        averagings = sum(one.times * one.seconds for one in made)
        network = network_of(config)
        comm = sum(one.times * network.seconds(one.wire, one.rounds, one.exchange.comm.workers) for one in made)
        spent = Spent(step, averagings, comm)
        if asked:
            yield from elsewhere(config, training, parts, spent, asked)
        else:
            yield from here(config, training, where, parts, spent)


def training_of(config: RunConfig, where: Placement, parts: Components) -> TrainingStep:
    """Return the run's training step with all workers in this process, on random data."""
    device = torch.device(where.device)
    dataset = copy.copy(parts.dataset)
    setattr(dataset, "load", lambda *_: Example(parts.dataset, device))  # noqa: B010
    alone = replace(config.comm, engine="exchange", backend="simulated", interface=None, processes=1)
    alone = replace(alone, hook=None, hook_state=None, hook_options=None)
    config = replace(config, comm=alone, compile=None)
    sync = copy.copy(parts.sync)
    if sync.quorum is not None and getattr(sync, "lateness", None) is None:  # none is really late in one process
        sync.quorum = None
    parts = replace(parts, dataset=dataset, exchange=replace(parts.exchange, engine="exchange"), sync=sync)
    return TrainingStep(config, Comm(where.workers, 1, 0, where.device), parts)


def exchanges(training: TrainingStep, parts: Components) -> list[DryExchanges]:
    """Make an exchange of each kind of the run with random tensors, and return all kinds."""
    run, runner, plan, device = parts.run, training.communicating.runner, training.position.plan, training.device.type
    local = training.sync.local_steps(run)
    if own := training.sync.makes(run):
        info = StepInfo(plan, run.steps, epoch=run.epochs)
        return [_made(exchange, times, info) for exchange, times in own if times]
    made = []
    if local < run.steps:
        exchange = runner.new_exchange(of_differences=not training.sync.gradient_exchange)
        phases = _phases(exchange, plan, run.steps - local, run.steps_per_epoch())
        made += [_made(exchange, times, info) for times, info in phases]
    if local:
        info = StepInfo(plan, run.steps, epoch=run.epochs)
        for exchange, times_in in _averagings(training.sync, plan.period, training.comm.workers, device):
            dense = times_in(min(max(exchange.start_step - (run.steps - local), 0), local))
            made += [_made(exchange, dense, StepInfo(plan))] if dense else []
            made.append(_made(exchange, times_in(local) - dense, info))
        made += [_made(exchange, local, info) for exchange in training.sync.between()]
        of_buffers = exchanges_of_buffers(training.inner, Comm(training.comm.workers, 1, 0, device))
        times_of = {key: training.sync.buffer_averagings(local, plan.period, key) for key in of_buffers}
        made += [_made(exchange, times_of[key], info) for key, exchange in of_buffers.items() if times_of[key]]
    return made


def _averagings(sync: Sync, period: int, workers: int, device: str) -> Iterator[tuple[Exchange, Callable[[int], int]]]:
    """Yield each exchange of a local method, with a function from local steps to the number of exchanges."""
    if sync.split is not None:
        whole = sync.new_exchange(Comm(workers, 1, 0, device))
        for number, tensors in enumerate(sync.split):
            yield whole.part(number, tensors), functools.partial(_times_of_part, sync, number)
        return
    groups = sync.groups or [(period, workers)]
    for (every, size), longer in zip(groups, [*(period for period, _ in groups[1:]), math.inf], strict=True):
        yield sync.new_exchange(Comm(size, 1, 0, device)), functools.partial(_times_of_group, every, longer)


def _times_of_part(sync: Sync, number: int, steps: int) -> int:
    return sync.averagings(steps)[number]


def _times_of_group(period: int, longer: float, steps: int) -> int:
    return steps // period - int(steps // longer)


def _phases(exchange: Exchange, plan: Plan, steps: int, per_epoch: int) -> list[tuple[int, StepInfo]]:
    """Return (number of steps, first step) of each phase with constant levels: dense start, warm-up, remainder."""
    found: list[tuple[int, StepInfo]] = []
    starts = {*range(0, steps, per_epoch), min(exchange.start_step, steps)} - {steps}
    for first, end in itertools.pairwise([*sorted(starts), steps]):
        info = StepInfo(plan, first, epoch=first / per_epoch)
        if found and exchange.levels(found[-1][1]) == exchange.levels(info):
            found[-1] = found[-1][0] + end - first, found[-1][1]
        else:
            found.append((end - first, info))
    return found


def _made(exchange: Exchange, times: int, info: StepInfo) -> DryExchanges:
    generator = keyed_rng.generator(0, "dry run")
    workers, ledger = exchange.comm.workers, exchange.comm.ledger
    shapes = [(workers, *spec.shape) for spec in exchange.specs]
    xs_W = [SMALL * torch.randn(shape, generator=generator).to(exchange.comm.device) for shape in shapes]
    turns = exchange.compressor.traits.cycle

    def cycle() -> None:
        for _ in range(turns):
            exchange(xs_W, info)

    exchange.comm.clock.start()
    before = ledger.columns()
    cycle()  # also compiles or loads kernels, which takes seconds
    after = ledger.columns()
    took = timed(cycle, exchange.comm.device, 1)[0] if exchange.what in AVERAGED else 0.0
    wire, rounds = ((after[key] - before[key]) / turns for key in ("wire_bytes", "rounds"))
    return DryExchanges(exchange, times, info, took / turns, wire, round(rounds))


def plan_lines(training: TrainingStep, parts: Components) -> Iterator[str]:
    """Yield lines on epochs, steps, levels, and the policies that may change them."""
    run, plan, ladder = parts.run, training.position.plan, parts.ladder
    steps = f"{counted(run.epochs, 'epoch')} of {counted(run.steps_per_epoch(), 'step')}, {run.steps} in all"
    batch = f"{samples(run.batches or run.batch_size)} per worker and step, {run.per_step} in all"
    yield f"{'plan':<11}{steps}; {batch}"
    if plan.levels:
        values = sorted({ladder.values[level] for level in plan.levels.values()})
        shown = ", ".join(f"{value:g}" for value in values)
        first = " at first" if any(policy.drives == "level" for policy in parts.policies.values()) else ""
        yield f"{'':<11}{ladder.knob} {shown} for {counted(len(plan.levels), 'tensor')}{first}"
    for name, policy in parts.policies.items():
        if policy.drives == "level":
            yield f"{'':<11}adaptive={name} chooses {ladder.knob} {', '.join(f'{v:g}' for v in ladder.values)}"
        elif policy.drives:
            yield f"{'':<11}adaptive={name} may change the {policy.drives}, and thus the numbers below"


def byte_lines(training: TrainingStep, parts: Components, made: list[DryExchanges]) -> Iterator[str]:
    """Yield lines on payload and wire bytes of each exchange and of the run, compared with dense."""
    dense = 4 * sum(spec.numel for spec in training.axis.specs)
    workers, run = training.comm.workers, parts.run
    for one in made:
        number = one.exchange.number
        part = "" if number is None else f" in fragment {number + 1}"
        what = f"{counted(one.times, 'exchange')} of {one.exchange.what}s{part}" + (
            f" among {counted(one.exchange.comm.workers, 'worker')}" if one.exchange.comm.workers != workers else ""
        )
        sizes = f"payload {human_bytes(one.payload())}, wire {human_bytes(one.wire)}, per worker and exchange"
        yield f"{'bytes':<11}{what}: {sizes}"
        if said := one.exchange.dense_warning(one.info):
            yield f"{'':<11}{said}"
    ring = 2 * (workers - 1) / workers
    payload, wire = totals(training, parts, made)
    if averages_at_the_end(training, parts):
        yield f"{'':<11}and an exact average of {human_bytes(dense)} at the end"
    yield (
        f"{'':<11}in all payload {human_bytes(payload)} (dense {human_bytes(run.steps * dense)}), wire "
        f"{human_bytes(wire)} (dense {human_bytes(run.steps * dense * ring)}) per worker"
    )
    levels = training.position.plan.levels
    if levels and any(policy.drives == "level" for policy in parts.policies.values()):
        ends = (0, len(parts.ladder.values) - 1)
        plans = [training.position.plan.with_levels(dict.fromkeys(levels, level)) for level in ends]
        low, high = (totals(training, parts, made, plan)[0] for plan in plans)
        yield f"{'':<11}between {human_bytes(low)} and {human_bytes(high)} of payload, as the policies decide"


def averages_at_the_end(training: TrainingStep, parts: Components) -> bool:
    """Whether the run ends with an exact average of the replicas."""
    sync = training.sync
    return sync.ends_apart(sync.local_steps(parts.run), training.position.plan.period)


def totals(
    training: TrainingStep, parts: Components, made: list[DryExchanges], plan: Plan | None = None
) -> tuple[float, float]:
    """Return (payload, wire) bytes of one worker over the run, with the given or the initial plan."""
    dense = 4 * sum(spec.numel for spec in training.axis.specs) * averages_at_the_end(training, parts)
    ring = 2 * (training.comm.workers - 1) / training.comm.workers
    wire = sum(one.times * one.wire for one in made)
    return sum(one.times * one.payload(plan) for one in made) + dense, wire + ring * dense


def memory_lines(training: TrainingStep, where: Placement, made: list[DryExchanges]) -> Iterator[str]:
    """Yield the line on the estimated bytes of persistent tensors per process, without activations and libraries."""
    axis, inner, share = training.axis, training.inner, where.workers_per_process / where.workers
    params = size_of(axis.params)
    common = params * (1 + where.workers_per_process * training.sync.local)
    optimizers = [inner.common, *inner.of_replicas]
    in_optimizers = [size_of(tensors_in(optimizer.state)) for optimizer in optimizers]
    optimizer = in_optimizers[0] + share * sum(in_optimizers[1:])
    if training.sync.local and not inner.of_replicas:
        optimizer *= where.workers_per_process
    state = max((state_bytes(one.exchange, share) for one in made), default=0)
    parts = {
        "parameters": common,
        "gradients": params * where.workers_per_process,
        "buffers": share * size_of(x for x_W in axis.buffers_W.values() for x in x_W),
        "error feedback and other state of the compressor": state,
        "optimizer": optimizer,
        "scheme": _kept_by(training.sync, training.comm.local_workers, share),
    }
    shown = ", ".join(f"{name} {human_bytes(size)}" for name, size in parts.items() if size)
    yield f"{'memory':<11}about {human_bytes(sum(parts.values()))} per process, without activations: {shown}"


def _kept_by(sync: Sync, workers: int, share: float) -> float:
    """Return the bytes of a scheme's state, besides replicas and exchanges, in a process with this share of workers."""
    own = sum(size_of(tensors_in(sync.worker_state(row))) for row in range(workers))
    return size_of(tensors_in(sync.state_dict())) + size_of(sync.derived()) + share * own


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
