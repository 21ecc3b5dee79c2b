"""Checks of a whole configuration before data or devices are touched, and warnings for settings without effect."""

import functools
import os
import typing
from pathlib import Path
from typing import Any

from accordion_bench.comm.worker_axis import BN_POLICIES
from accordion_bench.compressors.assemble import FEEDBACK, SERVER, wrapped_compressor
from accordion_bench.config.by_scale import SCALES
from accordion_bench.config.components import build_components, build_model, build_optimizer
from accordion_bench.exchange import ddp
from accordion_bench.exchange.overlap_rules import after_backward
from accordion_bench.forward import compile
from accordion_bench.forward.precision import PRECISIONS
from accordion_bench.forward.task import task_of
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.options.instantiate import Config, build, target
from accordion_bench.plan import WHOLE_MODEL
from accordion_bench.processes.placement import layout, placed
from accordion_bench.tensors import keyed_rng

EMBEDDED = ("digits", "synthetic", "pydocs", "synthetic_text")  # data sets that need no files


def validate(cfg: Config) -> None:
    """Refuse every wrong value before data or devices are touched.

    Raises:
        ConfigError: one sentence: key, rule, value, what to type instead.
    """
    _check_kinds(cfg)
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
    parts = build_components(placed(cfg, where := layout(cfg)), where.workers)
    if cfg["compile"] is not None:
        compile.refuse(cfg["compile"], parts.dataset.task, where.device)
    if cfg["channels_last"] is not None:
        checks.boolean("channels_last", cfg["channels_last"])
    if cfg["channels_last"] and parts.dataset.task != "images":
        raise ValueRefused("channels_last", "null for a language model, which has no images", True, None)
    if cfg["precision"] == "float16" and parts.sync.local:
        rule = "float32 or bfloat16 where workers take local steps, because workers skip a step together"
        raise ValueRefused("precision", rule, "float16", "bfloat16")
    if cfg["clip_at"] == "after" and (parts.sync.local or parts.wrapped.compressor.owns):
        what = "workers take local steps" if parts.sync.local else "the compressor takes the step itself"
        raise ValueRefused("clip_at", f"before where {what}, because the update is no gradient", "after", "before")
    if cfg["comm"].get("engine") == "ddp":
        ddp.refuse(cfg, where, parts)
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


def _check_kinds(cfg: Config) -> None:
    """Compare with the YAML files: every run-level option is there, no unknown one is, and kinds of values agree.

    Raises:
        ConfigError: for the first option that differs.
    """
    declared = _declared(cfg)
    # options of other groups are their constructors' to refuse
    for prefix in ("", "checkpoint.", "measure.", "paths.", "comm."):
        here, there = (cfg.get(prefix[:-1]), declared.get(prefix[:-1])) if prefix else (cfg, declared)
        if not isinstance(here, dict) or not there:
            continue
        for key in [key for key in there if key not in here]:
            value = "NAME" if isinstance(there[key], dict) else checks.show(there[key])
            raise ConfigError(f"{prefix}{key} must be there, got ~{prefix}{key}; type {prefix}{key}={value}")
        for key in [key for key in here if key not in there and key != "choices"]:
            near = checks.closest(key, list(there))
            raise ConfigError(f"{prefix}{key} is no option here; type {prefix}{near}, or --help for all options")
    _same_kinds(declared, cfg, "")
    for name, node in (cfg["adaptive"] or {}).items():
        if not isinstance(node, dict):
            rule = "a policy's options"
            raise ConfigError(f"adaptive.{name} must be {rule}, got {checks.show(node)}; type adaptive={name}")


def _same_kinds(declared: Config, given: Config, prefix: str) -> None:
    """Refuse text for a number, a number for a list, null where a value is needed, and so on."""
    several = _of_several_kinds(declared.get("_target_"))
    for name, default in declared.items():
        if name not in given or default is None or (isinstance(default, str) and "${" in default):
            continue
        if name in several and (several[name] is Any or given[name] is None):
            continue  # the constructor checks it
        key, value = f"{prefix}{name}", given[name]
        kinds: Any = next(kind for kind in (bool, (int, float), str, list, dict) if isinstance(default, kind))
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            rule = checks.kind_of(default)
            if isinstance(default, dict):
                option = f"{key}.{next(iter(default), 'OPTION')}=VALUE"
                raise ConfigError(f"{key} must be {rule}, got {checks.show(value)}; type {option}")
            raise ValueRefused(key, rule, value, default)
        if isinstance(value, dict):
            _same_kinds(default, value, f"{key}.")


@functools.cache
def _of_several_kinds(path: str | None) -> dict[str, Any]:
    """The options of one of our classes that may be null or anything, by their annotations."""
    if not str(path).startswith("accordion_bench."):
        return {}
    hints = typing.get_type_hints(target({"_target_": path}, "").__init__)
    return {name: hint for name, hint in hints.items() if hint is Any or type(None) in typing.get_args(hint)}


def _declared(cfg: Config) -> Config:
    """What the YAML files say for the names that are chosen."""
    declared = dict(_yaml(conf_dir() / "config.yaml"))
    declared.pop("hydra")
    entries = [entry for entry in declared.pop("defaults") if isinstance(entry, dict)]
    for group in [group for entry in entries for group in entry if not group.startswith("override ")]:
        names = cfg.get("choices", {}).get(group, "").split(",")
        nodes = {name: _yaml(conf_dir() / group / f"{name}.yaml") for name in names}
        nodes = {name: node for name, node in nodes.items() if "_target_" in node or group == "comm"}
        declared[group] = nodes if group == "adaptive" else next(iter(nodes.values()), {})
    return declared


@functools.cache
def _yaml(file: Path) -> Config:
    """A YAML file as Hydra reads it; empty where there is none."""
    from omegaconf import OmegaConf

    return dict(OmegaConf.to_container(OmegaConf.load(file), resolve=False)) if file.is_file() else {}  # type: ignore


def without_effect(cfg: Config, typed: set[str]) -> list[str]:
    """Warnings for settings that were typed but change nothing.

    Args:
        cfg: the configuration.
        typed: the keys on the command line.
    """
    compressor, sync, adaptive = cfg["compressor"], cfg["sync"], cfg.get("adaptive") or {}
    knob = next((k for k in ("rank", "density", "bits", "k") if k in compressor), "")
    steering = [name for name, node in adaptive.items() if target(node, f"adaptive.{name}").drives == "level"]
    grows = any(target(node, f"adaptive.{name}").drives == "batch" for name, node in adaptive.items())
    switch, detects = adaptive.get("accordion_batch", {}), ("statistic", "eta", "interval", "lr_drop_ratio", "min_hold")
    residual = [*FEEDBACK, "residual_decay"]
    feedback, two_way = compressor.get("error_feedback"), compressor.get("collective") == "two_way"
    fits = [(f"adaptive.{name}", node["fit"]) for name, node in adaptive.items() if "fit" in node]
    custom = compressor.get("levels", "uniform") not in ("uniform", "exponential")
    dataset, schedule, epochs = cfg.get("choices", {}).get("dataset"), cfg["schedule"], cfg["epochs"]
    looks = [(name, target(n, "").intervals * n.get("interval", 0)) for name, n in adaptive.items()]
    adaqs, late = adaptive.get("adaqs", {}), schedule.get("milestones") or []
    no_room, adaqs_options = bool(adaqs) and adaqs["initial"] == adaqs["cap"], ("initial", "cap", "factor", "interval")
    local = not build(sync, "sync").gradient_exchange
    of_gradients = ("worker_momentum", "weight_decay_mode", "residual_units", "zero_lr")
    set_first = [
        f"adaptive.{name}{f'.{key}' if key else ''} sets the first one"
        for name, key in (("accordion_sync", ""), ("adacomm", "initial"), ("qsr", "base_period"))
        if name in adaptive and (not key or adaptive[name].get(key) is not None)
    ]
    rules = [
        (f"compressor.{knob}", bool(steering), f"adaptive={','.join(steering)} sets the {knob}"),
        *((f"compressor.{key}", not feedback, "compressor.error_feedback is false") for key in residual),
        *((f"compressor.{key}", local, "no gradients are exchanged") for key in of_gradients),
        *(("sync.period", True, why) for why in set_first),
        ("dataset.rotation", cfg["dataset"].get("augment") is False, "dataset.augment is false"),
        ("sync.phase1", sync.get("switch_step") == 0, "sync.switch_step is 0"),
        ("sync.merge_alpha", sync.get("merge") == "cocod", "sync.merge is cocod"),
        ("compressor.zero_lr", compressor.get("residual_units") == "gradient", "compressor.residual_units is gradient"),
        *((f"compressor.{key}", not two_way, "compressor.collective is not two_way") for key in SERVER),
        ("compressor.weight_decay_mode", not compressor.get("worker_momentum"), "compressor.worker_momentum is false"),
        ("compressor.weight_decay_mode", not cfg["optimizer"].get("weight_decay"), "optimizer.weight_decay is 0"),
        ("compressor.ties", compressor.get("scale") != "none", "there is no vote"),
        ("compressor.error_feedback", cfg.get("choices", {}).get("compressor") == "none", "nothing is lost"),
        ("compressor.align", compressor.get("server") == "literal", "compressor.server=literal has one shard"),
        *((f"compressor.{key}", custom, "compressor.levels is a list") for key in ("zero_level", "p")),
        ("compressor.p", compressor.get("levels") == "uniform", "compressor.levels is uniform"),
        ("compressor.balanced", compressor.get("bucket_size", 1) is None, "compressor.bucket_size is null"),
        ("compressor.sample_share", compressor.get("threshold") is not None, "compressor.threshold is set"),
        *((f"{name}.num_components", fit != "mixture", f"{name}.fit is {fit}") for name, fit in fits),
        *((f"{name}.norm_weight", fit == "single", f"{name}.fit is single") for name, fit in fits),
        ("compressor.on_switch", not steering, "no policy changes the rank"),
        ("compressor.on_switch", not compressor.get("warm_start", True), "compressor.warm_start is false"),
        ("compressor.eps", compressor.get("orthonormalisation") == "qr", "compressor.orthonormalisation=qr needs none"),
        *((f"adaptive.{name}.interval", seldom >= epochs, f"the run has {epochs} epochs") for name, seldom in looks),
        *((f"adaptive.adaqs.{key}", no_room, "initial = cap leaves no bit to add") for key in adaqs_options),
        ("adaptive.accordion_batch.factor", switch.get("large_batch") is not None, "large_batch is set"),
        *(
            (f"adaptive.accordion_batch.{key}", switch.get("fixed_switch") is not None, "fixed_switch is set")
            for key in detects
        ),
        (
            "adaptive.adabatch.freq",
            adaptive.get("adabatch", {}).get("freq", 0) >= epochs,
            f"the run has {epochs} epochs",
        ),
        ("clip_at", cfg["clip_norm"] is None, "clip_norm is null"),
        ("schedule.warmup_epochs", schedule.get("lr_scaling") == "none", "schedule.lr_scaling=none warms up to 1"),
        ("schedule.warmup_epochs", cfg["workers"] == 1, "one worker has nothing to warm up to"),
        ("schedule.lr_scaling", cfg["workers"] == 1, "one worker's learning rate is not scaled"),
        ("schedule.gamma", schedule.get("milestones") == [], "schedule.milestones is empty"),
        ("schedule.milestones", schedule.get("gamma") == 1, "schedule.gamma is 1"),
        ("schedule.milestones", bool(late) and min(late) >= epochs, f"the run has {epochs} epochs"),
        ("compressor.reduce", cfg["workers"] == 1, "one worker's mean is its sum"),
        ("optimizer.nesterov", cfg["optimizer"].get("momentum") == 0, "optimizer.momentum is 0"),
        ("paths.data", dataset in EMBEDDED, f"dataset={dataset} reads nothing from there"),
        ("paths.runs", cfg["resume"] is not None, "a resumed run stays in its folder"),
        (
            "micro_batch_size",
            not grows and (cfg["micro_batch_size"] or 0) >= cfg["batch_size"],
            f"a batch has {cfg['batch_size']} samples",
        ),
        *[
            (f"comm.{key}", True, why)
            for key in ("overlap", "bucket_cap_mb")
            if cfg["comm"].get(key) and (why := _unheard(cfg, key))
        ],
        ("comm.timeout", cfg["comm"]["backend"] == "simulated", "workers in one process wait for nobody"),
    ]
    idle = [f"{key} has no effect here: {why}" for key, idle, why in rules if key in typed and idle]
    return list(dict.fromkeys(idle)) + _seldom(cfg, typed) + _growing(cfg) + ddp.warnings(cfg)


def _unheard(cfg: Config, key: str) -> str:
    """Why a key of overlap changes nothing in this run; "" = it does."""
    wrapped = build_components(cfg, cfg["workers"]).wrapped
    if key == "overlap":
        return after_backward(cfg, wrapped, 2)
    return "all tensors travel as one" if wrapped.scope == WHOLE_MODEL or wrapped.compressor.needs_all else ""


def _seldom(cfg: Config, typed: set[str]) -> list[str]:
    """A warning where the run ends before its first averaging, and with it the only outer step that may be."""
    parts = build_components(cfg, cfg["workers"])
    period, sync, run = parts.plan_for([]).period, parts.sync, parts.run
    switch = getattr(sync, "switch_step", 0)
    steps = run.steps - ((run.first_drop() or 0) * run.steps_per_epoch() if switch is None else switch)
    if not sync.local or period <= steps:
        return []
    name, outer = cfg["choices"]["sync"], cfg["sync"].get("outer_optimizer", "none")
    if outer != "none":
        return [f"sync={name} takes no outer step here: a round has {period} steps, and the workers only {steps}"]
    if "sync.period" in typed and cfg["sync"]["period"] == period:
        return [f"sync.period has no effect here: workers take only {steps} steps, and meet at the end alone"]
    return []


def _growing(cfg: Config) -> list[str]:
    """A warning where error feedback wraps what is no contraction."""
    compressor = wrapped_compressor(cfg["compressor"]).compressor
    feeds_back = cfg["compressor"].get("error_feedback") and not getattr(compressor, "takes_error_feedback", False)
    if not (feeds_back and compressor.unbiased and cfg["choices"]["compressor"] != "none"):
        return []
    return [
        "compressor.error_feedback=true keeps what an unbiased compressor has lost, maybe more than there was: the"
        " residual can grow without end (qsgd at its defaults: to 3,000 gradients in 100 steps)"
    ]
