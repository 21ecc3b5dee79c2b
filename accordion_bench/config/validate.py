"""Validate a whole configuration before data or devices are used."""

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from accordion_bench.config import capture_rules, ddp_rules
from accordion_bench.config.components import Components, build_components, build_model, build_optimizer
from accordion_bench.config.compose import refuse_unwritable
from accordion_bench.config.declared import check_kinds
from accordion_bench.config.run_level import refuse_wrong
from accordion_bench.datasets.dataset import Dataset
from accordion_bench.exchange.partition import sent_specs
from accordion_bench.forward import execution, trial
from accordion_bench.forward.execution import HALF
from accordion_bench.forward.task import task_of
from accordion_bench.methods.compatibility import refuse_clipping_after
from accordion_bench.optimizers.inner import parameter_kinds
from accordion_bench.optimizers.sgd_plus_gradient import SGDPlusGradient
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import build, target
from accordion_bench.options.option import options_of
from accordion_bench.options.units import counted
from accordion_bench.plan import TensorSpec
from accordion_bench.processes import threads
from accordion_bench.processes.placement import Placement, processes_here, with_placement
from accordion_bench.run_config import RunConfig
from accordion_bench.tensors import keyed_rng


def refuse_out_of_range(
    config: RunConfig, parts: Components, specs: Sequence[TensorSpec], typed: Collection[str] = ()
) -> None:
    """Refuse numbers that exceed the size of the data, the run or the tensors.

    Only typed values are refused for schedules and levels; defaults adapt to a short run or a small model.

    Args:
        config: the configuration.
        parts: components of the run.
        specs: the model's tensors.
        typed: keys on the command line.

    Raises:
        ConfigError: for the first such number.
    """
    run, batch = parts.run, config.largest_batch
    samples = counted(run.train_size, "training sample")
    whole = parts.dataset.whole
    if (subset := parts.dataset.subset) is not None and subset > whole:
        raise ValueRefused("dataset.subset", f"at most {whole}, the whole training set", subset, None)
    if run.workers > run.train_size:
        made_of = {f"comm.{name}": getattr(config.comm, name) for name in ("workers_per_process", "processes")}
        key = next((key for key in made_of if key in typed), "workers")
        got = made_of.get(key, run.workers)
        most = max(1, run.train_size // (run.workers // got))
        raise ValueRefused(key, f"at most {most}, one worker for each training sample", got, min(4, most))
    if batch > run.train_size:
        rule = f"at most {run.train_size}, because there are {samples}"
        raise ValueRefused("batch_size", rule, batch, min(32, run.train_size))
    grows = any(policy.drives == "batch" for policy in parts.policies.values())
    if config.micro_batch_size is not None and config.micro_batch_size > batch and not grows:
        raise ValueRefused("micro_batch_size", f"at most batch_size={batch}", config.micro_batch_size, batch)
    if "schedule.warmup_epochs" in typed and config.schedule["warmup_epochs"] > config.epochs:
        warmup = config.schedule["warmup_epochs"]
        raise ValueRefused("schedule.warmup_epochs", f"at most epochs={config.epochs}", warmup, config.epochs)
    steps = config.epochs * run.steps_per_epoch()
    if config.profile >= steps and config.profile:
        rule = f"below {steps}, the steps of the run, of which the first is not recorded"
        raise ValueRefused("profile", rule, config.profile, min(10, steps - 1))
    _refuse_levels(config, parts, specs, typed)


def _refuse_levels(config: RunConfig, parts: Components, specs: Sequence[TensorSpec], typed: Collection[str]) -> None:
    """Refuse a typed rank above that of every matrix, and a typed density below one entry of the largest tensor."""
    wrapped, knob = parts.wrapped, parts.wrapped.compressor.traits.knob
    sent = sent_specs(specs, wrapped.scope, wrapped.block_size)
    sizes = [spec for spec in sent if spec.ndim >= wrapped.compressor.traits.min_ndim]
    if not sizes or knob not in ("rank", "density"):
        return
    options = {f"compressor.{knob}": config.compressor.get(knob)}
    for name, policy in parts.policies.items():
        if policy.drives == "level":
            options |= {f"adaptive.{name}.{key}": config.adaptive[name].get(key) for key in policy.level_keys}
    for key in [key for key in options if key in typed]:
        given = options[key]
        for value in given if isinstance(given, list) else [given]:
            if not isinstance(value, int | float):  # null, or a range of epochs
                continue
            if knob == "rank" and value > (most := max(min(spec.matrix) for spec in sizes)):
                raise ValueRefused(key, f"at most {most}, the rank of the model's largest matrix", value, most)
            least = 1 / max(spec.numel for spec in sizes)
            if knob == "density" and value < least:
                rule = f"at least 1/{round(1 / least)}, one entry of the model's largest tensor"
                raise ValueRefused(key, rule, f"{value:g}", f"{1.05 * least:.2g}")


def _refuse_elastic(config: RunConfig, where: Placement) -> None:
    """Refuse elastic runs where no process can be lost, on GPUs, and with options they do not support."""
    if where.backend != "gloo" or where.device != "cpu":
        raise ConfigError(
            "sync.elastic needs a run over comm=gloo on CPUs, where processes can be lost, got true elsewhere",
            {"comm": "gloo", "device": "cpu"},
            {"sync.elastic": False},
        )
    if config.comm.engine == "ddp":
        raise ValueRefused("comm.engine", "own where workers may join and leave (sync.elastic)", "ddp", "own")
    if config.precision == "float16":
        rule = (
            "float32 or bfloat16 where workers may join and leave (sync.elastic), because workers skip a step together"
        )
        raise ValueRefused("precision", rule, "float16", "bfloat16")
    if config.bn == "recompute":
        raise ValueRefused("bn", "pooled where workers may join and leave (sync.elastic)", config.bn, "pooled")


def validate(config: RunConfig, where: Placement, typed: Collection[str] = ()) -> Components:
    """Refuse every wrong value before data or devices are used.

    Args:
        config: the configuration.
        where: its placement.
        typed: keys on the command line.

    Returns:
        the components of the run.

    Raises:
        ConfigError: one sentence: key, rule, value, what to type instead.
    """
    refuse_wrong(config)
    check_kinds(config)
    optimizer = config.optimizer
    declared = options_of(target(optimizer, "optimizer")) or options_of(SGDPlusGradient)  # torch's declare none
    for key in [key for key in declared if key in ("lr", *optimizer)]:
        declared[key].checked(optimizer.get(key), f"optimizer.{key}")
    if optimizer.get("nesterov") and not optimizer.get("momentum"):
        raise ValueRefused("optimizer.nesterov", "false where optimizer.momentum is 0", True, False)
    parts = build_components(with_placement(config, where), where.workers)
    if parts.sync.elastic:
        _refuse_elastic(config, where)
    if config.compile is not None:
        execution.refuse_backend(config.compile, parts.dataset.task, where.device)
    capture_rules.refuse(config, parts, where)
    if config.channels_last and parts.dataset.task != "images":
        raise ValueRefused("channels_last", "null for a language model, which has no images", True, None)
    if config.precision == "float16" and parts.sync.local:
        rule = "float32 or bfloat16 where workers take local steps, because workers skip a step together"
        raise ValueRefused("precision", rule, "float16", "bfloat16")
    if config.clip_at == "after":
        refuse_clipping_after(parts.sync, parts.wrapped.compressor)
    ddp_rules.refuse_elsewhere(config)
    if config.comm.engine == "ddp":
        ddp_rules.refuse(config, where, parts)
    if config.target is not None:
        judged = task_of(parts.dataset).metric
        if judged.percent:
            checks.number("target", config.target, above=0, at_most=1, instead=judged.typical)
        else:
            checks.number("target", config.target, at_least=judged.least, instead=judged.typical)
    # a real model takes a tenth of a second; on the meta device, imports alone take seconds
    with keyed_rng.kept_rng():
        model = build_model(config.model, parts.dataset, config.chosen("model"), config.chosen("dataset"))
    specs = [TensorSpec(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    refuse_out_of_range(config, parts, specs, typed)
    parts.sync.refuse_tensors(specs)
    trained = [param for param in model.parameters() if param.requires_grad]
    build_optimizer(config.optimizer, parts.wrapped.compressor, trained, parameter_kinds(model))
    describe_split = getattr(target(config.optimizer, "optimizer"), "describe_split", lambda model: "")
    parts = replace(parts, threads=_threads(config, where, model, parts.dataset), split=describe_split(model))
    parts = replace(parts, buffers=any(True for _ in model.buffers()))

    def later(first: int) -> list[int]:
        return [size for policy in parts.policies.values() for size in policy.later_batches(first)]

    if parts.run.batches:
        trial.refuse_unequal_single_sample(model, parts.dataset, config)
    else:
        batches = where.workers, config.largest_batch, config.micro_batch_size, config.chosen("model")
        trial.refuse_single_sample(model, parts.dataset, *batches)
        trial.refuse_later_single_sample(model, parts.dataset, *batches, later)
    if config.precision in HALF and where.device == "cpu":
        parts = replace(parts, slowdown=trial.slowdown(model, parts.dataset, config.precision, config.chosen("model")))
    for tracker in config.trackers:
        build(tracker, "tracker")
    build(config.network, "network")
    if config.resume is not None:
        refuse_unwritable("resume", config.resume)
    else:
        refuse_unwritable("paths.runs", config.paths.runs)
    return parts


def _threads(config: RunConfig, where: Placement, model: nn.Module, dataset: Dataset) -> int:
    here = where.processes if where.launcher == "self" else processes_here(os.environ)

    def work() -> float:
        return math.inf if where.device == "cuda" else trial.flops_per_kernel(model, dataset, config.largest_batch)

    return threads.choose_threads(config.threads, here, work)
