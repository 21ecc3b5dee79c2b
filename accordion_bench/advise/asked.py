"""What the command line asks for, checked before anything is timed."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accordion_bench.advise import cluster, subject
from accordion_bench.advise.late_workers import Wanted
from accordion_bench.advising import gpus, text
from accordion_bench.advising.arms import AdvisedArm, chosen_arms
from accordion_bench.advising.gpus import AskedDevice
from accordion_bench.advising.step_times import step_times_from
from accordion_bench.cli import command_line
from accordion_bench.network.link_model import Network
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.conf_dir import add_conf_dir, import_from_here
from accordion_bench.options.instantiate import build
from accordion_bench.options.override import group_of, overrides_in_todays_words
from accordion_bench.options.presets import named
from accordion_bench.run_config import RunConfig

OUT = "results/advice_runs"
SECONDS = 20.0  # for timing all methods
HERE = ("network", "device", "threads")  # options that say nothing of what is trained


@dataclass(frozen=True)
class Asked:
    """A command line, checked.

    Args:
        machines: of the cluster.
        typed: overrides, without those of the cluster's size.
        config: what is timed, and where.
        assumed: the data set, where none is typed.
        device: that is not here, if one is asked for.
        where: steps compute, `cpu` or `cuda`.
        at_hand: what is timed here is what the cluster's devices take.
        networks: the cluster's links, by device: their libraries choose collectives.
        link_error: relative error of a probed link's fit; 0 = the link is taken as typed.
        arms: methods that are looked at.
        seconds: for timing them.
        timeline: a file in the place of a trial.
        typed_model: whether the timeline is to be one of the configuration's model.
        wanted: what is to be simulated; None = nothing.
        known: accuracies by method.
        out: a folder that takes files.
        figures: whether they are drawn.
    """

    machines: cluster.Machines
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
        """Overrides that say what is trained; none where that is not known."""
        if self.timeline is not None and not self.typed_model:
            return []
        kept = [word for word in self.typed if group_of(word) not in HERE]
        assumed = [f"dataset={self.assumed}"] if self.assumed else []
        return [*kept, *assumed, f"workers={self.machines.workers}"]


def asked_of(args: argparse.Namespace) -> Asked:
    """Read and check everything.

    Raises:
        ConfigError: a value breaks a rule.
    """
    seconds = SECONDS if args.seconds is None else checks.number("--seconds", args.seconds, above=0, instead=SECONDS)
    if args.config_dir is not None:
        add_conf_dir(args.config_dir)
    import_from_here()
    device, overrides = gpus.split(overrides_in_todays_words(args.overrides))
    machines, overrides = cluster.split(overrides)
    command_line.refuse_unreadable(overrides)
    wanted = Wanted(args.simulate) if args.simulate else None
    link = cluster.link_of(args.link, overrides)
    each = f"network.workers_per_machine={machines.workers_each}"
    config, assumed = subject.composed([*cluster.words_of(link, machines.workers_each), *overrides, each])
    hardware = subject.device_of(config).type
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
        arms=chosen_arms(args.methods, config.optimizer, beside=subject.beside(config)),
        seconds=seconds,
        timeline=args.timeline,
        typed_model=typed_model,
        wanted=wanted,
        known=_known(args.runs, named(config.to_dict(), "model") if model else "", machines.workers),
        out=_folder(args.out, model or "timeline", machines.workers),
        figures=not args.no_figures,
    )


def _where(asked: AskedDevice, timeline: Path | None, hardware: str, typed: str) -> str:
    """On which kind of device steps compute: `cpu` or `cuda`.

    Args:
        asked: a device that is not here.
        timeline: of a step, refused here before anything is made.
        hardware: of this machine.
        typed: the option `device`.

    Raises:
        ConfigError: two of them tell of the same thing.
    """
    recorded = None if timeline is None else step_times_from(timeline).device
    on_cpu = "a --timeline of a CPU" if recorded == "cpu" else "device=cpu" if typed == "cpu" and not recorded else ""
    if asked.gpu is not None and on_cpu:
        raise ConfigError(f"gpu must stand without {on_cpu}, got gpu={asked.gpu.key}; type one of them")
    if asked.compute is not None and timeline is not None:
        told = f"{1000 * asked.compute:g}"
        raise ConfigError(f"compute_ms must stand without --timeline, which tells it, got {told}; type one of them")
    if recorded:  # older files do not say
        return "cpu" if recorded == "cpu" else "cuda"
    return "cuda" if asked and typed != "cpu" else hardware


def _known(folders: Sequence[str], model: str, workers: int) -> dict[str, str]:
    if not folders:
        return {}
    from accordion_bench.report.compare.verdicts import known_accuracies  # and with it pandas
    from accordion_bench.report.read.find import find_runs

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
