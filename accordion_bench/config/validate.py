"""Validate a whole configuration before data or devices are used, and warn of options without effect."""

import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from torch import nn

from accordion_bench.compressors import assemble
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.compressors.error_feedback import growing
from accordion_bench.config import engine_rules
from accordion_bench.config.components import Components, build_components, build_model, build_optimizer
from accordion_bench.config.compose import refuse_unwritable
from accordion_bench.config.value_checks import check_kinds, refuse_wrong
from accordion_bench.datasets.dataset import Dataset
from accordion_bench.exchange.partition import sent_specs
from accordion_bench.forward import execution, trial
from accordion_bench.forward.execution import HALF
from accordion_bench.forward.task import task_of
from accordion_bench.forward.trial import PATIENCE
from accordion_bench.methods.compatibility import refuse_clipping_after
from accordion_bench.optimizers.elementwise import SGDPlusGradient
from accordion_bench.optimizers.inner import parameter_kinds
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused, show
from accordion_bench.options.component import Idle, RunContext, idle_options
from accordion_bench.options.instantiate import build, target
from accordion_bench.options.option import options_of
from accordion_bench.options.units import counted
from accordion_bench.plan import WHOLE_MODEL, TensorSpec
from accordion_bench.processes import environment
from accordion_bench.processes.placement import Placement, processes_here, with_placement
from accordion_bench.run_config import RunConfig
from accordion_bench.tensors import keyed_rng


def options_without_effect(config: RunConfig, typed: set[str], parts: Components) -> list[str]:
    """Return warnings about typed options that have no effect, and about slow or unsafe combinations.

    `config` has the number of workers and the backend decided; `typed` are keys on the command line.
    """
    idle = [*_of_components(config, parts), *_of_the_run(config, parts)]
    told = dict.fromkeys(f"{key} has no effect here: {why}" for key, why in idle if key in typed)
    by_names = (*_twice(config, typed, parts), *_seldom(config, typed, parts), *_cut(config, typed, parts))
    others = (*_growing(config), *_uncounted(config), *_slower(config, parts), *engine_rules.warnings(config))
    return [*told, *by_names, *others]


def _of_components(config: RunConfig, parts: Components) -> Idle:
    """Yield the options that components declare idle in this run, under their full keys."""
    context = RunContext(
        epochs=config.epochs,
        workers=parts.run.workers,
        gradients=parts.sync.gradient_exchange,
        knob=parts.wrapped.compressor.traits.knob or "",
        steered_by=tuple(name for name in config.adaptive if parts.policies[name].drives == "level"),
        weight_decay=config.optimizer.get("weight_decay", 0),
    )
    groups = {group: getattr(config, group) for group in ("compressor", "sync", "dataset", "schedule")}
    groups |= {f"adaptive.{name}": node for name, node in config.adaptive.items()}
    for group, node in groups.items():
        here = replace(context, group=group, choice=config.choices.get(group, ""))
        found = assemble.idle(node, here) if group == "compressor" else idle_options(target(node, group), node, here)
        for key, why in found:
            yield key if "." in key else f"{group}.{key}", why


def _of_the_run(config: RunConfig, parts: Components) -> Idle:
    """Yield run-level options without effect, and those of torch's optimizers, which declare nothing."""
    batch, micro_batch = config.largest_batch, config.micro_batch_size or 0
    grows = any(policy.drives == "batch" for policy in parts.policies.values())
    if config.clip_norm is None:
        yield "clip_at", "clip_norm is null"
    if config.target is None:
        yield "target_every", "target is null"
    if not parts.buffers:
        yield "bn", "the model has no buffers"
    if config.optimizer.get("momentum") == 0:
        yield "optimizer.nesterov", "optimizer.momentum is 0"
    if config.resume is not None:
        yield "paths.runs", "a resumed run stays in its folder"
    if micro_batch >= batch and not grows:
        yield "micro_batch_size", f"a batch has {counted(batch, 'sample')}"
    if config.checkpoint.every == 0:
        for key in ("minutes", "keep", "background"):
            yield f"checkpoint.{key}", "checkpoint.every is 0"
    for key in ("overlap", "bucket_cap_mb"):
        if getattr(config.comm, key) and (why := _unheard(parts, key)):
            yield f"comm.{key}", why
    if config.comm.backend == "simulated":
        yield "comm.timeout", "workers in one process do not wait"


def _twice(config: RunConfig, typed: set[str], parts: Components) -> Iterator[str]:
    """Warn if one scheme was typed under both of its names."""
    named = [name for name, policy in parts.policies.items() if not policy.drives]
    if named and {"sync", "adaptive"} <= typed:
        scheme = config.chosen("sync")
        yield f"adaptive={named[0]} is another name of sync={scheme}, which is typed too; it is applied once"


def _unheard(parts: Components, key: str) -> str:
    """Return why an option of overlap has no effect in this run; "" if it has one."""
    wrapped = parts.wrapped
    if key == "overlap":
        return parts.exchange.after_backward(wrapped, 2)
    whole = wrapped.scope == WHOLE_MODEL or wrapped.compressor.traits.grouping == "all"
    return "all tensors are sent as one" if whole else ""


def _seldom(config: RunConfig, typed: set[str], parts: Components) -> list[str]:
    """Warn if the run ends before its first averaging, and thus before any outer step."""
    period, sync, run = parts.plan_for([]).period, parts.sync, parts.run
    steps = sync.local_steps(run)
    if not sync.local or period <= steps:
        return []
    if sync.outer_optimizer != "none":
        name, round_ = config.choices["sync"], counted(period, "step")
        return [f"sync={name} takes no outer step here: a round has {round_}, but workers take only {steps}"]
    if "sync.period" in typed and config.sync["period"] == period:
        only = counted(steps, "step")
        return [f"sync.period has no effect here: workers take only {only}, and average only at the end"]
    return []


def _uncounted(config: RunConfig) -> Iterator[str]:
    """Warn if communication bypasses the counted interface."""
    if config.comm.interface is not None and config.comm.backend == "nccl":
        yield (
            f"comm.interface={config.comm.interface} does not count all that NCCL sends: traffic over NVLink, PCIe, "
            "shared memory, InfiniBand or RoCE is in no counter of an interface, and so not in link_sent_bytes"
        )


def _slower(config: RunConfig, parts: Components) -> list[str]:
    """Warn if 16 bits are slower than float32."""
    found, named = parts.slowdown, f"precision={config.precision}"
    if found is not None and not found.times:
        why = f"a trial step of two samples takes more than {PATIENCE:g} s even in float32"
        return [f"{named} may be slower here than float32: {why}, so that they are not compared"]
    if found is None or found.times <= 1.1:
        return []
    how = f"has taken {found.times:.2g} times as long as one in float32"
    if not found.whole:
        how = f"was stopped after {found.seconds:.2g} s, {found.times:.2g} times as long as one in float32 takes"
    return [f"{named} is slower here: a trial step of two samples {how}"]


def _cut(config: RunConfig, typed: set[str], parts: Components) -> Iterator[str]:
    """Warn if a step cannot have as many samples as requested."""
    run, asked = parts.run, {"batch_size", "workers", "comm.processes", "comm.workers_per_process", "dataset.subset"}
    if config.largest_batch > run.per_worker and parts.dataset.sharding != "consecutive" and asked & typed:
        had = counted(run.per_worker, "sample")
        yield f"batch_size={show(config.batch_size)} is more than the {had} that each worker has"


def _growing(config: RunConfig) -> list[str]:
    compressor = wrapped_compressor(config.compressor).compressor
    return growing(config.compressor, compressor, "compressor.error_feedback=true")


def refuse_out_of_range(
    config: RunConfig, parts: Components, specs: Sequence[TensorSpec], typed: Collection[str] = ()
) -> None:
    """Refuse numbers that exceed the size of the data, the run or the tensors (`specs`).

    Only typed values are refused for schedules and levels; defaults adapt to a short run or a small model.
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
    """Refuse every wrong value before data or devices are used, and return the components of the run.

    Args:
        where: placement of the run.
        typed: keys on the command line.

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
    engine_rules.refuse_graphs(config, parts, where)
    if config.channels_last and parts.dataset.task != "images":
        raise ValueRefused("channels_last", "null for a language model, which has no images", True, None)
    if config.precision == "float16" and parts.sync.local:
        rule = "float32 or bfloat16 where workers take local steps, because workers skip a step together"
        raise ValueRefused("precision", rule, "float16", "bfloat16")
    if config.clip_at == "after":
        refuse_clipping_after(parts.sync, parts.wrapped.compressor)
    engine_rules.refuse_elsewhere(config)
    if config.comm.engine == "ddp":
        engine_rules.refuse(config, where, parts)
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

    trial.refuse_single_sample(model, parts.dataset, config, where.workers, later)
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

    return environment.choose_threads(config.threads, here, work)
