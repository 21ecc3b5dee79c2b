"""Rules of CUDA graphs and of `comm.engine=ddp`: work that is captured, and options that are not supported."""

import inspect
from collections.abc import Mapping
from typing import Any

from accordion_bench.comm.graphs import EVALUATION, EXCHANGE, UPDATE, WORKERS
from accordion_bench.compressors.assemble import optimizer_node
from accordion_bench.compressors.compressor import Compressor
from accordion_bench.compressors.error_feedback import ErrorFeedback
from accordion_bench.compressors.powersgd import PowerSGD
from accordion_bench.compressors.uncoded import Cast, Dense
from accordion_bench.config.components import Components
from accordion_bench.exchange.ddp import DDPExchange, ForeignHook, bare, can_be_saved, wants_one_bucket
from accordion_bench.forward.task import task_of
from accordion_bench.methods.labels import FORMS
from accordion_bench.options.checks import ConfigError, ValueRefused, show
from accordion_bench.options.instantiate import target
from accordion_bench.processes.placement import Placement
from accordion_bench.run_config import RunConfig
from accordion_bench.sync.every_step import EveryStep

ALL = {WORKERS, EXCHANGE, UPDATE, EVALUATION}
INSTEAD = "comm.engine=exchange"


def stays_eager(config: RunConfig, parts: Components, processes: int) -> dict[str, str]:
    """Return the reasons why work of a step is not captured on a GPU, by kind of work; other kinds may be captured."""
    if whole := _nothing(config, processes):
        return dict.fromkeys(sorted(ALL), whole)
    reasons: dict[str, str] = dict(task_of(parts.dataset).not_captured)
    compressors = [parts.wrapped.compressor, *([parts.differences().compressor] if parts.sync.local else [])]
    if not all(compressor.traits.replays for compressor in compressors):
        reasons[EXCHANGE] = "what the compressor sends depends on the data"
    left = optimizer_node(config.optimizer, parts.wrapped.compressor)
    if "fused" not in inspect.signature(target(left, "optimizer")).parameters:
        reasons[UPDATE] = "torch has no fused kernel for this optimizer"
    return reasons


def _nothing(config: RunConfig, processes: int) -> str:
    if config.graphs is False:
        return "graphs is false"
    if processes > 1:
        return "several processes exchange buckets during the backward pass"
    return "profile records operations one by one" if config.profile else ""


def refuse_graphs(config: RunConfig, parts: Components, where: Placement) -> None:
    """Refuse `graphs=true` if part of a step stays eager, and `workers_at_once` if the workers' passes stay eager."""
    _refuse_at_once(config, parts, where)
    if config.graphs is not True:
        return
    if where.device != "cuda":
        raise ValueRefused("graphs", "null or false on a CPU, where nothing is captured", True, None)
    for name, why in stays_eager(config, parts, where.processes).items():
        raise ValueRefused("graphs", f"null, because the {name} would stay eager: {why}", True, None)


def _refuse_at_once(config: RunConfig, parts: Components, where: Placement) -> None:
    asked = config.workers_at_once
    if asked == 1:
        return
    if where.device != "cuda":
        raise ValueRefused("workers_at_once", "1 on a CPU, where nothing is replayed", asked, 1)
    if why := stays_eager(config, parts, where.processes).get(WORKERS, ""):
        raise ValueRefused("workers_at_once", f"1, because the workers' passes are not replayed: {why}", asked, 1)
    if asked > where.workers_per_process:
        limit = f"at most {where.workers_per_process}, the workers of the process"
        raise ValueRefused("workers_at_once", limit, asked, where.workers_per_process)


def capture_told(eager: Mapping[str, str], at_once: int = 1) -> str:
    """Return the header's sentence about capture: what is replayed, workers at once, why the rest is eager."""
    if set(eager) == ALL and len(set(eager.values())) == 1:
        return f"steps are eager: {next(iter(eager.values()))}"
    rest = "; ".join(f"{name} eager: {why}" for name, why in eager.items())
    several = f", {at_once} workers at once; times of a worker are sampled one by one" if at_once > 1 else ""
    return f"steps are captured and replayed{f' ({rest})' if rest else ''}{several}"


def foreign_hook(config: RunConfig) -> ForeignHook | None:
    """Return the hook configured by `comm.hook`; None = the compressor's hook."""
    comm = config.comm
    if comm.hook is None:
        return None
    return ForeignHook(comm.hook, comm.hook_state, comm.hook_options or {})


def warnings(config: RunConfig) -> list[str]:
    """Return warnings about consequences of DistributedDataParallel that the user did not ask for."""
    if config.comm.engine != "ddp":
        return []
    hook, compressor = foreign_hook(config), bare(config.compressor)
    what = "compressor=powersgd with comm.engine=ddp" if hook is None else f"comm.hook={hook.path}"
    told = []
    if config.comm.backend == "gloo" and wants_one_bucket(compressor, hook):
        told.append(
            f"{what} uses one bucket for the whole model on gloo, because torch's hook aborts the process with "
            "more: nothing overlaps with the backward pass"
        )
    if config.checkpoint.every != 0 and _lost(compressor, hook):
        whose = "torch's hook" if hook is None else "the hook"
        told.append(
            f"{what} saves no checkpoint, because the state of {whose} cannot be saved: a stopped run starts again"
        )
    return told


def _lost(compressor: Compressor, hook: ForeignHook | None) -> bool:
    """Whether it is known before the hook's state is created that it cannot be saved."""
    if hook is None:
        return isinstance(compressor, PowerSGD)
    made_by = hook.factory()
    return isinstance(made_by, type) and not can_be_saved(made_by)


def refuse_elsewhere(config: RunConfig) -> None:
    """Refuse `comm.hook` without DistributedDataParallel."""
    comm = config.comm
    if comm.hook is not None and comm.engine != "ddp":
        raise ConfigError(
            f"comm.hook needs comm.engine=ddp, got comm.engine={comm.engine}; type comm.engine=ddp comm.hook="
            f"{show(comm.hook)}"
        )


def unsaved(config: RunConfig, ddp: DDPExchange) -> str:
    """Return a warning if the hook's state, once created, has no `state_dict`; "" if this was known before.

    Raises:
        ConfigError: `checkpoint.every` or `resume` was typed.
    """
    hook = foreign_hook(config)
    if hook is None or ddp.resumable or isinstance(hook.factory(), type):
        return ""
    made = f"comm.hook_state={hook.state_path} has made a {type(ddp.hook_state).__name__} without state_dict"
    _refuse_saving(config, f"what cannot be saved: {made}")
    return f"{made}: the run saves no checkpoint, and starts again if it is stopped"


def refuse(config: RunConfig, where: Placement, parts: Components) -> None:
    """Refuse options that DistributedDataParallel and its hooks do not support."""
    if where.processes == 1:
        rule = "at least 2 with comm.engine=ddp, which puts one worker into each process"
        raise ConfigError(
            f"comm.processes must be {rule}, got 1; type comm=gloo comm.processes={max(where.workers, 2)}"
        )
    if where.workers_per_process > 1:
        rule = "1 with comm.engine=ddp, which has one worker in each process"
        raise ValueRefused("comm.workers_per_process", rule, where.workers_per_process, 1)
    if config.comm.overlap is False:
        raise ValueRefused("comm.overlap", "null with comm.engine=ddp, which always overlaps", False, None)
    if type(parts.sync) is not EveryStep:
        raise ConfigError(
            f"sync must be every_step with comm.engine=ddp, which exchanges gradients, got {config.chosen('sync')}; "
            f"type sync=every_step, or {INSTEAD}"
        )
    for name, policy in parts.policies.items():
        if policy.drives != "batch" or policy.needs_gradients or any(map(policy.needs, range(config.epochs))):
            raise ConfigError(
                f"adaptive must be none with comm.engine=ddp, whose hooks neither change their levels nor show the "
                f"workers' own gradients, got {name}; type adaptive=none, or {INSTEAD}"
            )
    for key in ("norms", "error"):
        if getattr(config.measure, key):
            rule = "false with comm.engine=ddp, which does not show the workers' own gradients"
            raise ValueRefused(f"measure.{key}", rule, True, False)
    if config.clip_norm is not None and config.clip_at != "after":
        rule = "after with comm.engine=ddp, whose gradients have been exchanged when the backward pass ends"
        raise ValueRefused("clip_at", rule, config.clip_at, "after")
    hook = foreign_hook(config)
    if hook is not None:
        _refuse_beside(config, hook)
    _refuse_options(config, where, parts.wrapped.compressor)


def _refuse_beside(config: RunConfig, hook: ForeignHook) -> None:
    """Refuse a foreign hook that cannot be imported, and options that it does not support."""
    compressor = bare(config.compressor)
    if not isinstance(compressor, Dense):
        raise ConfigError(
            f"compressor must be none with comm.hook, which decides what is sent, got {config.chosen('compressor')}; "
            "type compressor=none, or comm.hook=null"
        )
    hook.function()
    if hook.factory() is not None and config.precision == "float16":
        rule = "float32 or bfloat16 with comm.hook_state: the hook's state would keep an overflow"
        raise ValueRefused("precision", rule, "float16", "bfloat16")
    if _lost(compressor, hook):
        _refuse_saving(config, f"comm.hook_state={hook.state_path}, which has no state_dict: its state cannot be saved")


def _refuse_saving(config: RunConfig, what: str) -> None:
    for key, value in (("checkpoint.every", config.checkpoint.every or None), ("resume", config.resume)):
        if value is not None:
            raise ValueRefused(key, f"null with {what}", value, None)


def _refuse_options(config: RunConfig, where: Placement, wrapped: Compressor) -> None:
    """Refuse compressors without a hook, and options that their hooks do not have."""
    node, compressor = config.compressor, bare(config.compressor)
    feeds_back, start_step = node.get("error_feedback", False), node.get("start_step", 0)
    form = FORMS.get(str(feeds_back), "")
    must: list[tuple[str, bool, str, Any]] = [  # option, whether it fits, rule, what to type instead
        ("worker_momentum", not node.get("worker_momentum"), "false", False),
        ("error_feedback", isinstance(feeds_back, bool), f"true or false: torch's hooks have no {form}", True),
        ("residual_bits", node.get("residual_bits") != 8, "32: torch's hooks keep floats", 32),
        ("residual_units", "lr" not in wrapped.traits.optimizer.owns, "gradient", "gradient"),
        ("residual_decay", not isinstance(wrapped, ErrorFeedback) or wrapped.residual_decay == 1, "1", 1),
        ("scope", node.get("scope", "tensor") == "tensor", "tensor", "tensor"),
    ]
    if isinstance(compressor, Cast):
        must += [
            ("error_feedback", not feeds_back, "false: torch's hook has none", False),
            ("start_step", start_step == 0, "0: torch's hook casts from the first step on", 0),
        ]
    elif isinstance(compressor, PowerSGD):
        aggregate = node.get("residual") == "aggregate" or not feeds_back
        late = start_step >= 2 or not (feeds_back or compressor.warm_start)
        buckets = "at least 2, because torch rebuilds the buckets after the first step, and loses its residuals"
        fixed = "qr: torch's hook takes gramschmidt up to rank 2 and qr above"
        must += [
            ("residual", aggregate, "aggregate: torch's hook keeps the error of the mean", "aggregate"),
            ("start_step", late, buckets, 2),
            ("orthonormalisation", compressor.orthonormalisation == "qr", fixed, "qr"),
        ]
    elif not isinstance(compressor, Dense):
        raise ConfigError(
            "compressor must be none, fp16, bf16 or powersgd with comm.engine=ddp, which has hooks for these, got "
            f"{config.chosen('compressor')}; type compressor=bf16, or {INSTEAD}"
        )
    if wrong := [(key, rule, instead) for key, fits, rule, instead in must if not fits]:
        key, rule, _ = wrong[0]
        typed = " ".join(f"compressor.{key}={show(instead)}" for key, _, instead in wrong)
        raise ConfigError(f"compressor.{key} with comm.engine=ddp must be {rule}, got {show(node[key])}; type {typed}")
    one_bucket = wants_one_bucket(compressor, foreign_hook(config))
    if one_bucket and where.backend == "gloo" and config.comm.bucket_cap_mb is not None:
        rule = "null: torch's PowerSGD hook aborts the process on gloo with more than one bucket"
        raise ValueRefused("comm.bucket_cap_mb", rule, config.comm.bucket_cap_mb, None)
    if not isinstance(compressor, PowerSGD):
        return
    if config.precision == "float16":
        rule = "float32 or bfloat16 with comm.engine=ddp and compressor=powersgd: torch's hook would keep an overflow"
        raise ValueRefused("precision", rule, "float16", "bfloat16")
    _refuse_saving(config, "comm.engine=ddp and compressor=powersgd: the state of torch's hook cannot be saved")
