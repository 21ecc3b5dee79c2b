"""Checks of a whole configuration before data or devices are touched, and warnings for settings without effect."""

import os
from pathlib import Path

from accordion_bench.comm.worker_axis import BN_POLICIES
from accordion_bench.config import ddp_rules
from accordion_bench.config.by_scale import SCALES
from accordion_bench.config.components import build_components, build_model, build_optimizer
from accordion_bench.config.declared import check_kinds
from accordion_bench.forward import compile
from accordion_bench.forward.precision import PRECISIONS
from accordion_bench.forward.task import task_of
from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.instantiate import Config, build
from accordion_bench.processes.placement import place, with_placement
from accordion_bench.tensors import keyed_rng


def validate(cfg: Config) -> None:
    """Refuse every wrong value before data or devices are touched.

    Raises:
        ConfigError: one sentence: key, rule, value, what to type instead.
    """
    check_kinds(cfg)
    checks.integer("seed", cfg["seed"], at_least=0)
    checks.integer("epochs", cfg["epochs"], at_least=1, instead=60)
    checks.integer("batch_size", cfg["batch_size"], at_least=1, instead=32)
    if cfg["micro_batch_size"] is not None:
        checks.integer("micro_batch_size", cfg["micro_batch_size"], at_least=1, instead=cfg["batch_size"])
    checks.choice("bn", cfg["bn"], BN_POLICIES)
    if cfg["precision"] is not None:
        checks.choice("precision", cfg["precision"], list(PRECISIONS))
    if cfg["clip_norm"] is not None:
        checks.number("clip_norm", cfg["clip_norm"], above=0, instead=1.0)
    if cfg["clip_at"] is not None:
        checks.choice("clip_at", cfg["clip_at"], ["before", "after"])
    checks.choice("scale", cfg["scale"], SCALES)
    if cfg["scale"] != "full" and "experiment" not in cfg.get("choices", {}):
        raise ValueRefused("scale", "full without +experiment=NAME, which says what to shorten", cfg["scale"], "full")
    checks.integer("checkpoint.every", cfg["checkpoint"]["every"], at_least=0)
    checks.integer("profile", cfg["profile"], at_least=0)
    for key in ("norms", "error"):
        checks.boolean(f"measure.{key}", cfg["measure"][key], instead=True)
    for key, folder in (("data", "data"), ("runs", "results/runs")):
        if not cfg["paths"][key]:
            raise ValueRefused(f"paths.{key}", "a folder", "''", folder)
    optimizer = cfg["optimizer"]
    checks.number("optimizer.lr", optimizer.get("lr"), above=0, instead=0.1)
    checks.number("optimizer.weight_decay", optimizer.get("weight_decay", 0), at_least=0, instead=1e-4)
    checks.number("optimizer.momentum", optimizer.get("momentum", 0), at_least=0, below=1, instead=0.9)
    if optimizer.get("nesterov") and not optimizer.get("momentum"):
        raise ValueRefused("optimizer.nesterov", "false where optimizer.momentum is 0", True, False)
    parts = build_components(with_placement(cfg, where := place(cfg)), where.workers)
    if cfg["compile"] is not None:
        compile.refuse(cfg["compile"], parts.dataset.task, where.device)
    if cfg["channels_last"] is not None:
        checks.boolean("channels_last", cfg["channels_last"])
    if cfg["channels_last"] and parts.dataset.task != "images":
        raise ValueRefused("channels_last", "null for a language model, which has no images", True, None)
    if cfg["precision"] == "float16" and parts.sync.local:
        rule = "float32 or bfloat16 where workers take local steps, because workers skip a step together"
        raise ValueRefused("precision", rule, "float16", "bfloat16")
    if cfg["clip_at"] == "after" and (parts.sync.local or parts.wrapped.compressor.traits.owns):
        what = "workers take local steps" if parts.sync.local else "the compressor takes the step itself"
        raise ValueRefused("clip_at", f"before where {what}, because the update is no gradient", "after", "before")
    if cfg["comm"].get("engine") == "ddp":
        ddp_rules.refuse(cfg, where, parts)
    if cfg["target"] is not None:
        if task_of(parts.dataset).metric.percent:
            checks.number("target", cfg["target"], above=0, at_most=1, instead=0.9)
        else:
            checks.number("target", cfg["target"], at_least=1, instead=100)
    # really built, and thrown away: a model on the meta device costs seconds of imports, this one a tenth of a second
    with keyed_rng.kept_rng():
        model = build_model(cfg, parts.dataset)
    build_optimizer(cfg, parts.wrapped.compressor, list(model.parameters()))
    build(cfg["tracker"], "tracker")
    build(cfg["network"], "network")
    runs = Path(cfg["paths"]["runs"])
    nearest = next(path for path in [runs, *runs.absolute().parents] if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueRefused("paths.runs", "a folder that can be written", str(runs), "results/runs")
