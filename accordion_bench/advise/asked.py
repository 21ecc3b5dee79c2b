"""What the command line asks for, checked before anything is timed, and what is timed: a model with random data."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accordion_bench.advise import cluster
from accordion_bench.advise.late_workers import Wanted
from accordion_bench.advising import gpus, text
from accordion_bench.advising.arms import AdvisedArm, chosen_arms
from accordion_bench.advising.counted_step import CountedStep, counted_step
from accordion_bench.advising.gpus import AskedDevice
from accordion_bench.advising.rehearsal import Beside
from accordion_bench.advising.step_times import step_times_from
from accordion_bench.cli import command_line
from accordion_bench.cli.example import Example
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.config.components import build_model, build_optimizer, with_counts
from accordion_bench.config.compose import compose
from accordion_bench.config.declared import check_kinds
from accordion_bench.config.run_level import refuse_wrong
from accordion_bench.datasets.base import Dataset
from accordion_bench.forward.execution import autocast
from accordion_bench.forward.task import task_of
from accordion_bench.forward.trial import flops_per_kernel
from accordion_bench.network.link_model import Network
from accordion_bench.optimizers.inner import parameter_kinds
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.conf_dir import add_conf_dir, import_from_here
from accordion_bench.options.instantiate import build, target
from accordion_bench.options.override import group_of, key_of, overrides_in_todays_words
from accordion_bench.options.presets import named
from accordion_bench.processes import threads
from accordion_bench.run_config import RunConfig
from accordion_bench.tensors.keyed_rng import key, seeded

# of a model that does not say its own
USUAL_DATA = {"images": "cifar10", "text": "wikitext2", "tokens": "wikitext2_bytes"}
METHODS = ("compressor", "sync", "adaptive")  # of which all are advised on


@dataclass(frozen=True)
class Subject:
    """A model with a batch, ready to be timed.

    Args:
        config: that they are made of.
        model: with random weights, on its device.
        batch: inputs and targets.
        threads: to compute with.
        assumed: the data set, where none is typed.
    """

    config: RunConfig
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    dataset: Dataset
    threads: int
    assumed: str = ""

    @property
    def name(self) -> str:
        """`resnet18 on cifar10, batch 32`."""
        config = self.config
        composed = config.to_dict()
        return f"{named(composed, 'model')} on {named(composed, 'dataset')}, batch {config.largest_batch}"

    @property
    def device(self) -> torch.device:
        return self.batch[0].device

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Forward pass and loss, in the configuration's precision."""
        with autocast(self.config.precision, self.device):
            return self._loss(model, batch)

    def counted(self, computed: bool = False) -> CountedStep:
        """A step, counted; what is computed is the same in every precision. See `counted_step`."""
        return counted_step(self.model, self.batch, self._loss, self.config.largest_batch, self.name, computed)

    def _loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return task_of(self.dataset, batch[0].device).loss(model, *batch, 0, 0)

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The configuration's, as a dense run has it."""
        compressor, kinds = wrapped_compressor(self.config.compressor).compressor, parameter_kinds(self.model)
        return build_optimizer(self.config.optimizer, compressor, params, kinds)


def composed(overrides: Sequence[str]) -> tuple[RunConfig, str]:
    """The configuration, and the data set that was assumed for the model; "" where one was typed.

    Raises:
        ConfigError: an option has no meaning here, or breaks a rule.
    """
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


def beside(config: RunConfig) -> Beside:
    """What a step does with gradients beside exchange and optimizer."""
    return Beside(config.clip_norm, config.clip_at, config.measure.norms)


def usual_data(node: dict[str, Any]) -> str:
    """The data set that a model is usually trained on: what its class says, or what its task usually has."""
    cls = target(node, "model")
    return getattr(cls, "usual_data", USUAL_DATA[getattr(cls, "task", "images")])


def subject_of(config: RunConfig, assumed: str, workers_each: int) -> Subject:
    """Build the model, and a batch of random data.

    Args:
        config: from `composed`.
        assumed: likewise.
        workers_each: that share a machine like this one.

    Raises:
        ConfigError: model and data set do not fit, or the device is not there.
    """
    dataset: Dataset = build(config.dataset, "dataset")
    if dataset.example(1) is None:
        name = config.chosen("dataset")
        raise ConfigError(f"dataset must be one with an example, got {name}; type dataset=cifar10, or write {name}'s")
    device = device_of(config)
    with seeded(key(config.seed, "model")):
        model = build_model(config.model, dataset, config.chosen("model"), config.chosen("dataset"))
    chosen = 1 if device.type == "cuda" else _threads(config, workers_each, model, dataset)
    model = model.to(device)
    if config.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    indices = torch.arange(config.largest_batch)
    batch = next(Example(dataset, device).train_batches(0, [indices]))
    return Subject(config, model, batch, dataset, chosen, assumed)


def device_of(config: RunConfig) -> torch.device:
    """Where the step is timed.

    Raises:
        ValueRefused: there is no such device.
    """
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise ValueRefused("device", "auto or cpu on a machine without a CUDA device", "cuda", "auto")
    return torch.device("cuda" if there and config.device != "cpu" else "cpu")


def _threads(config: RunConfig, workers_each: int, model: nn.Module, dataset: Dataset) -> int:
    return threads.choose_threads(
        config.threads, workers_each, lambda: flops_per_kernel(model, dataset, config.largest_batch)
    )


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
        arms=chosen_arms(args.methods, config.optimizer, beside=beside(config)),
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
    from accordion_bench.report.read.load import find_runs

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
