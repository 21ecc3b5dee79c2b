"""Warnings for settings that were typed and change nothing."""

from dataclasses import replace

from accordion_bench.compressors import assemble
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.compressors.error_feedback import GROWS
from accordion_bench.config import ddp_rules
from accordion_bench.config.components import build_components
from accordion_bench.exchange.overlap_rules import after_backward
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config, build, target
from accordion_bench.plan import WHOLE_MODEL


def without_effect(cfg: Config, typed: set[str]) -> list[str]:
    """Warnings for settings that were typed but change nothing.

    Args:
        cfg: the configuration.
        typed: the keys on the command line.
    """
    idle = [*_of_components(cfg), *_of_the_run(cfg)]
    told = [f"{key} has no effect here: {why}" for key, why in idle if key in typed]
    return list(dict.fromkeys(told)) + _seldom(cfg, typed) + _growing(cfg) + ddp_rules.warnings(cfg)


def _of_components(cfg: Config) -> Idle:
    """What the components of a run declare idle in it, under full keys."""
    policies = {name: target(node, f"adaptive.{name}") for name, node in (cfg.get("adaptive") or {}).items()}
    around = Surroundings(
        epochs=cfg["epochs"],
        workers=cfg["workers"],
        gradients=build(cfg["sync"], "sync").gradient_exchange,
        knob=wrapped_compressor(cfg["compressor"]).compressor.traits.knob or "",
        steered_by=tuple(name for name, policy in policies.items() if policy.drives == "level"),
        weight_decay=cfg["optimizer"].get("weight_decay", 0),
    )
    groups = {group: cfg[group] for group in ("compressor", "sync", "dataset", "schedule")}
    groups |= {f"adaptive.{name}": cfg["adaptive"][name] for name in policies}
    for group, node in groups.items():
        here = replace(around, group=group, choice=cfg.get("choices", {}).get(group, ""))
        idle = assemble.idle if group == "compressor" else target(node, group).idle
        for key, why in idle(node, here):
            yield key if "." in key else f"{group}.{key}", why


def _of_the_run(cfg: Config) -> Idle:
    """Keys of the run itself that change nothing in it, and those of torch's optimizers, which declare nothing."""
    batch, micro_batch = cfg["batch_size"], cfg["micro_batch_size"] or 0
    grows = any(target(node, "adaptive").drives == "batch" for node in (cfg.get("adaptive") or {}).values())
    if cfg["clip_norm"] is None:
        yield "clip_at", "clip_norm is null"
    if cfg["optimizer"].get("momentum") == 0:
        yield "optimizer.nesterov", "optimizer.momentum is 0"
    if cfg["resume"] is not None:
        yield "paths.runs", "a resumed run stays in its folder"
    if micro_batch >= batch and not grows:
        yield "micro_batch_size", f"a batch has {batch} samples"
    for key in ("overlap", "bucket_cap_mb"):
        if cfg["comm"].get(key) and (why := _unheard(cfg, key)):
            yield f"comm.{key}", why
    if cfg["comm"]["backend"] == "simulated":
        yield "comm.timeout", "workers in one process wait for nobody"


def _unheard(cfg: Config, key: str) -> str:
    """Why a key of overlap changes nothing in this run; "" = it does."""
    wrapped = build_components(cfg, cfg["workers"]).wrapped
    if key == "overlap":
        return after_backward(cfg, wrapped, 2)
    return "all tensors travel as one" if wrapped.scope == WHOLE_MODEL or wrapped.compressor.traits.needs_all else ""


def _seldom(cfg: Config, typed: set[str]) -> list[str]:
    """A warning where the run ends before its first averaging, and with it the only outer step that may be."""
    parts = build_components(cfg, cfg["workers"])
    period, sync, run = parts.plan_for([]).period, parts.sync, parts.run
    steps = sync.local_steps(run)
    if not sync.local or period <= steps:
        return []
    if sync.outer_optimizer != "none":
        name = cfg["choices"]["sync"]
        return [f"sync={name} takes no outer step here: a round has {period} steps, and the workers only {steps}"]
    if "sync.period" in typed and cfg["sync"]["period"] == period:
        return [f"sync.period has no effect here: workers take only {steps} steps, and meet at the end alone"]
    return []


def _growing(cfg: Config) -> list[str]:
    """A warning where error feedback wraps what is no contraction."""
    compressor = wrapped_compressor(cfg["compressor"]).compressor
    feeds_back = cfg["compressor"].get("error_feedback") and "error_feedback" not in compressor.traits.takes
    loses = cfg["choices"]["compressor"] != "none"
    return [GROWS] if feeds_back and compressor.traits.unbiased and loses else []
