"""Implementation of `python -m accordion_bench.advise`: check the command line, time, and print and write the advice.

It times a step of the model, unless a timeline is given, and the exchange of every method. Accuracies are read from
earlier runs.
"""

import argparse
import functools
import json
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from accordion_bench import output
from accordion_bench.advising import api, cluster, gpus, text
from accordion_bench.advising.advice import Advice, AdviceRow
from accordion_bench.advising.api import Basis, TimedMethods
from accordion_bench.advising.arms import AdvisedArm, chosen_arms
from accordion_bench.advising.cluster import Cluster, Machines, cluster_like_here
from accordion_bench.advising.gpus import AskedDevice
from accordion_bench.advising.rehearsal import Beside
from accordion_bench.advising.simulation import Wanted
from accordion_bench.advising.step_times import Effort, measured_step, step_times_from
from accordion_bench.advising.verdict import verdict
from accordion_bench.attaching.own_parameters import trained_specs
from accordion_bench.cli import command_line
from accordion_bench.cli.example import Subject, device_of, subject_of, usual_data
from accordion_bench.config.components import with_counts
from accordion_bench.config.compose import compose
from accordion_bench.config.value_checks import check_kinds, refuse_wrong
from accordion_bench.network.link_model import Network
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.conf_dir import add_conf_dir, import_from_here
from accordion_bench.options.instantiate import build
from accordion_bench.options.override import group_of, key_of, translate_renamed_overrides
from accordion_bench.options.presets import named
from accordion_bench.processes import machine
from accordion_bench.processes.machine import computing_with, run_settings
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import environment

METHODS = ("compressor", "sync", "adaptive")  # groups that cannot be overridden, since all methods are compared
OUT = "results/advice_runs"
SECONDS = 20.0  # for timing all methods
HERE = ("network", "device", "threads")  # options without effect on the trained result
OF_A_STEP = 15.0  # budget for timing the step, seconds
OWN_LOOP = (
    "{} was recorded in a loop of your own; a run of this program also keeps freed memory, chooses its threads and "
    "lets cuDNN search for the fastest kernels"
)
PROBED = Path("link.json")
PROBE_SECONDS = 20.0
PIPED = 110  # characters per line if standard output is no terminal


def composed(overrides: Sequence[str]) -> tuple[RunConfig, str]:
    """Return the configuration, and the data set assumed for the model; "" if the user gave one."""
    typed = {key_of(override): override.partition("=")[2] for override in overrides}
    for group in METHODS:
        if taken := next((name for name in typed if name.partition(".")[0] == group), None):
            raise ConfigError(
                f"{taken} must be left out, got {taken}={typed[taken]}, because all methods are advised on; type "
                f"--methods {typed.get(group, 'NAME ...')} for some"
            )
    cfg = compose(overrides)
    assumed = ""
    if "model" in typed and "dataset" not in typed and "experiment" not in typed:
        assumed = usual_data(cfg["model"])
        cfg = compose([*overrides, f"dataset={assumed}"])
    config = with_counts(RunConfig.from_dict(cfg))
    refuse_wrong(config)
    check_kinds(config)
    for key_, value in (("compile", config.compile), ("micro_batch_size", config.micro_batch_size)):
        if value is not None:
            raise ValueRefused(key_, "null here, where a step is timed without it", value, None)
    return config, assumed


@dataclass(frozen=True)
class Asked:
    """Checked command line.

    Args:
        typed: overrides, without those of the cluster's size.
        assumed: data set assumed for the model; "" = given by the user.
        device: requested device other than the available one, if any.
        where: device type of the cluster's steps, `cpu` or `cuda`.
        at_hand: whether the cluster's devices are like this one, so that methods are timed here.
        networks: links of the cluster by device type, whose backends use different collectives.
        link_error: relative error of a probed link's fit; 0 = exact.
        seconds: approximate time for timing the methods.
        timeline: timeline file that replaces timing a step; None = time it.
        typed_model: whether the timeline must match the configuration's model.
        wanted: requested simulation; None = none.
        known: accuracies by method, in words.
    """

    machines: Machines
    typed: list[str]
    config: RunConfig
    assumed: str
    device: AskedDevice
    where: str
    at_hand: bool
    networks: dict[str, Network]
    link_error: float
    arms: list[AdvisedArm]
    seconds: float
    timeline: Path | None
    typed_model: bool
    wanted: Wanted | None
    known: dict[str, str]
    out: Path
    figures: bool

    @property
    def trained(self) -> list[str]:
        """Overrides of a training run with this model and cluster; empty if the model is unknown."""
        if self.timeline is not None and not self.typed_model:
            return []
        kept = [word for word in self.typed if group_of(word) not in HERE]
        assumed = [f"dataset={self.assumed}"] if self.assumed else []
        return [*kept, *assumed, f"workers={self.machines.workers}"]


def checked_options(args: argparse.Namespace) -> Asked:
    """Check the command line; ConfigError for an invalid value."""
    seconds = SECONDS if args.seconds is None else checks.number("--seconds", args.seconds, above=0, instead=SECONDS)
    if args.config_dir is not None:
        add_conf_dir(args.config_dir)
    import_from_here()
    device, overrides = gpus.split(translate_renamed_overrides(args.overrides))
    machines, overrides = cluster.split(overrides)
    command_line.refuse_unreadable(overrides)
    wanted = Wanted(args.simulate) if args.simulate else None
    link = cluster.link_of(args.link, overrides)
    each = f"network.workers_per_machine={machines.workers_each}"
    config, assumed = composed([*cluster.words_of(link, machines.workers_each), *overrides, each])
    hardware = device_of(config).type
    where = _where(device, args.timeline, hardware, config.device)
    by_backend = {
        kind: cluster.with_algorithm(config.network, overrides, link.backend if link else backend)
        for kind, backend in (("cpu", "gloo"), ("cuda", "nccl"))
    }
    networks = {kind: build(options, "network") for kind, options in by_backend.items()}
    config = replace(config, network=by_backend[where])
    if wanted is not None:
        wanted.check(machines.workers, machines.workers_each)
        steps = () if device else None if args.timeline is None else step_times_from(args.timeline).steps
        if steps == () and wanted.disturbances.spread is None:
            raise ValueRefused("spread", "a number where no single step is timed", None, 0.1)
    typed_model = any(word.startswith("model=") for word in overrides)
    model = config.chosen("model") if args.timeline is None or typed_model else ""
    return Asked(
        machines=machines,
        typed=overrides,
        config=config,
        assumed=assumed if args.timeline is None or typed_model else "",
        device=device,
        where=where,
        at_hand=where in ("cpu", hardware) and device.gpu is None,
        networks=networks,
        link_error=cluster.error_of(link, machines.workers_each),
        arms=chosen_arms(
            args.methods, config.optimizer, beside=Beside(config.clip_norm, config.clip_at, config.measure.norms)
        ),
        seconds=seconds,
        timeline=args.timeline,
        typed_model=typed_model,
        wanted=wanted,
        known=_known(args.runs, named(config.to_dict(), "model") if model else "", machines.workers),
        out=_folder(args.out, model or "timeline", machines.workers),
        figures=not args.no_figures,
    )


def _where(asked: AskedDevice, timeline: Path | None, hardware: str, typed: str) -> str:
    """Return the device type of the cluster's steps, `cpu` or `cuda`; an invalid timeline is refused here.

    Args:
        hardware: device type of this machine.
        typed: the option `device`.
    """
    recorded = None if timeline is None else step_times_from(timeline).device
    on_cpu = "a --timeline of a CPU" if recorded == "cpu" else "device=cpu" if typed == "cpu" and not recorded else ""
    if asked.gpu is not None and on_cpu:
        raise ConfigError(f"gpu must stand without {on_cpu}, got gpu={asked.gpu.key}; type one of them")
    if asked.compute is not None and timeline is not None:
        told = f"{1000 * asked.compute:g}"
        raise ConfigError(f"compute_ms must stand without --timeline, which tells it, got {told}; type one of them")
    if recorded:  # older files do not contain the device
        return "cpu" if recorded == "cpu" else "cuda"
    return "cuda" if asked and typed != "cpu" else hardware


def _known(folders: Sequence[str], model: str, workers: int) -> dict[str, str]:
    if not folders:
        return {}
    from accordion_bench.report.compare.verdicts import known_accuracies  # imports pandas
    from accordion_bench.report.read import find_runs

    paths = [Path(folder) for folder in folders]
    for path in paths:
        if not find_runs([path]):
            raise ValueRefused("--runs", "a run folder, or a folder of some", path, "results/runs")
    return known_accuracies(paths, model, workers)


def _folder(out: Path | None, name: str, workers: int) -> Path:
    if out is None:
        out = Path(OUT) / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{name}-{workers}w"
    text.refuse_taken(out)
    return out


def measured(asked: Asked) -> tuple[Basis, int]:
    """Time the step and the methods, with progress messages; return the inputs of the prediction, and the threads."""
    device = torch.device("cpu") if asked.where == "cpu" else device_of(asked.config)
    chosen = asked.config.threads or torch.get_num_threads()
    made = None
    if asked.timeline is None or asked.typed_model:
        made = subject_of(asked.config, asked.machines.workers_each)
        chosen = made.threads
    doing = "timing" if asked.at_hand else "counting the messages of"
    methods = TimedMethods(asked.arms, device, asked.seconds, functools.partial(_next, doing))
    if asked.timeline is not None:
        with computing_with(chosen):
            found = _of_timeline(asked, methods, made)
    else:
        assert made is not None
        with run_settings(device.type, chosen, asked.config.deterministic):
            found = _of_model(asked, methods, made)
    if asked.assumed:
        assumed = f"dataset={asked.assumed} is assumed for this model; type dataset=NAME for another"
        found = replace(found, doubts=(assumed, *found.doubts))
    return found, chosen


def _next(doing: str, method: str) -> None:
    """Return freed memory to the system, and report the next method."""
    machine.give_back()
    output.progress(f"{doing} {method}")


def _of_model(asked: Asked, methods: TimedMethods, made: Subject) -> Basis:
    if asked.device:
        output.progress(f"counting a step of {made.name}")
        rates = asked.config.precision, asked.config.deterministic
        return api.asked_for(asked.device, made.counted(), methods, *rates, at_hand=asked.at_hand)
    output.progress(f"timing a step of {made.name}")
    effort = Effort(budget=OF_A_STEP)
    times = measured_step(made.model, made.batch, made.loss, made.optimizer, asked.config.largest_batch, effort)
    times = replace(times, model=made.name)
    return api.here(times, methods, made.counted(computed=True) if methods.device.type == "cpu" else None)


def _of_timeline(asked: Asked, methods: TimedMethods, made: Subject | None) -> Basis:
    assert asked.timeline is not None
    times = step_times_from(asked.timeline, None if made is None else trained_specs(made.model))
    times = replace(times, device=asked.where)
    if asked.at_hand:
        found = api.here(times, methods)
    else:
        found = api.on_gpu(asked.device.codecs_of, lambda _: times, times.specs, methods)
    return replace(found, doubts=(OWN_LOOP.format(asked.timeline.name), *found.doubts))


def run(args: argparse.Namespace) -> None:
    """Compute, print and write the advice, or probe the link; ConfigError for an invalid value."""
    if args.probe:
        probe(args)
        return
    asked = checked_options(args)
    basis, threads = measured(asked)
    advice = advised(asked, basis, threads)
    said, shown = text.text(advice), text.short_text(advice, shutil.get_terminal_size((PIPED, 24)).columns)
    timed_with = {"device": asked.where, "on": advice.on, **environment(threads)}
    late = []
    if asked.wanted is not None:
        output.progress("simulating")
        cluster = cluster_of(asked, asked.where, threads)
        late = asked.wanted.run(basis.times, basis.costs, cluster, advice)
        simulated = f"\n{text.simulated_text(late, advice, asked.wanted)}"
        said, shown = said + simulated, shown + simulated
    text.write(advice, asked.out, timed_with, said)
    if late:
        rows = [one.flat() for one in late]
        (asked.out / "simulated.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if asked.figures:
        from accordion_bench.report.render.figures.speed_ups import draw_advice  # imported late: takes a second

        output.progress("drawing")
        draw_advice(advice, asked.out)
    output.progress_over()
    print(f"{shown}\nwhole table{' and figures' * asked.figures}: {asked.out}")


def advised(asked: Asked, basis: Basis, threads: int) -> Advice:
    """Compute the advice with accuracies and verdict."""
    options = {key: value for key, value in asked.config.network.items() if key != "_target_"}
    advice = api.advised(basis, lambda kind: cluster_of(asked, kind, threads), options, asked.link_error)
    advice = with_accuracies(advice, asked.known, asked.trained)
    return replace(advice, verdict=verdict(advice))


def cluster_of(asked: Asked, device: str, threads: int) -> Cluster:
    """Return the cluster for steps on `cpu` or on `cuda`."""
    return cluster_like_here(asked.networks[device], asked.machines.workers, device, threads)


def probe(args: argparse.Namespace) -> None:
    """Time collectives between the processes of torchrun, and write the link file."""
    beside = ("overrides", "timeline", "methods", "runs", "link", "simulate")
    if name := next((name for name in beside if getattr(args, name)), None):
        taken = name if name == "overrides" else f"--{name}"
        raise ConfigError(f"--probe must stand without {taken}, got both; type --probe alone, then ask for advice")
    from accordion_bench.network.link_probe import probe_link

    probe_link(PROBE_SECONDS if args.seconds is None else args.seconds, args.out or PROBED)


def with_accuracies(advice: Advice, known: Mapping[str, str], typed: Sequence[str]) -> Advice:
    """Return the advice with its columns `accuracy` and `command`.

    Args:
        known: accuracies by method from earlier runs; local methods are named without their period.
        typed: overrides of the trained model; empty if it is unknown, as with a timeline.
    """

    def told(row: AdviceRow) -> AdviceRow:
        name = row.method.partition(", H ")[0] if row.local else row.method
        return replace(row, accuracy="" if row.method == "dense" else known.get(name, ""), command=command(row, typed))

    return replace(advice, rows=tuple(map(told, advice.rows)))


def command(row: AdviceRow, typed: Sequence[str]) -> str:
    """Return the command that trains with one method; "" if the trained model is unknown."""
    if not typed:
        return ""
    period = [f"sync.period={row.period}"] if row.local and not row.every_local_step else []
    kept = [word for word in row.overrides if not word.startswith("sync.period=")]
    chosen = {word.partition("=")[0] for word in kept}
    trained = [word for word in typed if chosen.isdisjoint((key_of(word), group_of(word)))]
    return " ".join(["python -m accordion_bench", *map(shlex.quote, trained), *kept, *period])
