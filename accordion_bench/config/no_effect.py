"""Warnings about typed options that have no effect, and about slow or unsafe combinations."""

from dataclasses import replace

from accordion_bench.compressors import assemble
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.compressors.error_feedback import GROWS
from accordion_bench.config import ddp_rules
from accordion_bench.config.components import Components
from accordion_bench.forward.trial import PATIENCE
from accordion_bench.options.checks import show
from accordion_bench.options.component import Idle, RunContext, idle_options
from accordion_bench.options.instantiate import target
from accordion_bench.options.units import counted
from accordion_bench.plan import WHOLE_MODEL
from accordion_bench.run_config import RunConfig


def options_without_effect(config: RunConfig, typed: set[str], parts: Components) -> list[str]:
    """Return warnings about typed options that have no effect, and about slow or unsafe combinations.

    Args:
        config: configuration with the number of workers and the backend decided.
        typed: keys on the command line.
        parts: components of the run.
    """
    idle = [*_of_components(config, parts), *_of_the_run(config, parts)]
    told = [f"{key} has no effect here: {why}" for key, why in idle if key in typed]
    told = [
        *dict.fromkeys(told),
        *_twice(config, typed, parts),
        *_seldom(config, typed, parts),
        *_cut(config, typed, parts),
        *_growing(config),
    ]
    return told + _uncounted(config) + _slower(config, parts) + ddp_rules.warnings(config)


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


def _twice(config: RunConfig, typed: set[str], parts: Components) -> list[str]:
    """Warn if one scheme was typed under both of its names."""
    named = [name for name, policy in parts.policies.items() if not policy.drives]
    if not named or not {"sync", "adaptive"} <= typed:
        return []
    scheme = config.chosen("sync")
    return [f"adaptive={named[0]} is another name of sync={scheme}, which is typed too; it is applied once"]


def _unheard(parts: Components, key: str) -> str:
    """Return why an option of overlap has no effect in this run; "" if it has one."""
    wrapped = parts.wrapped
    if key == "overlap":
        return parts.exchange.after_backward(wrapped, 2)
    return (
        "all tensors are sent as one"
        if wrapped.scope == WHOLE_MODEL or wrapped.compressor.traits.grouping == "all"
        else ""
    )


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


def _uncounted(config: RunConfig) -> list[str]:
    """Warn if communication bypasses the counted interface."""
    if config.comm.interface is None or config.comm.backend != "nccl":
        return []
    return [
        f"comm.interface={config.comm.interface} does not count all that NCCL sends: traffic over NVLink, PCIe, "
        "shared memory, InfiniBand or RoCE is in no counter of an interface, and so not in link_sent_bytes"
    ]


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


def _cut(config: RunConfig, typed: set[str], parts: Components) -> list[str]:
    """Warn if a step cannot have as many samples as requested."""
    run, asked = parts.run, {"batch_size", "workers", "comm.processes", "comm.workers_per_process", "dataset.subset"}
    if config.largest_batch <= run.per_worker or parts.dataset.sharding == "consecutive" or not asked & typed:
        return []
    had = counted(run.per_worker, "sample")
    return [f"batch_size={show(config.batch_size)} is more than the {had} that each worker has"]


def _growing(config: RunConfig) -> list[str]:
    """Warn if error feedback wraps a compressor that is not a contraction."""
    compressor = wrapped_compressor(config.compressor).compressor
    feeds_back = config.compressor.get("error_feedback") is True
    return [GROWS] if feeds_back and not compressor.traits.is_contraction else []
