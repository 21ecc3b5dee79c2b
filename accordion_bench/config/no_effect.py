"""Warnings for settings that were typed and change nothing."""

from accordion_bench.compressors.assemble import FEEDBACK, SERVER, wrapped_compressor
from accordion_bench.config import ddp_rules
from accordion_bench.config.components import build_components
from accordion_bench.exchange.overlap_rules import after_backward
from accordion_bench.options.instantiate import Config, build, target
from accordion_bench.plan import WHOLE_MODEL

EMBEDDED = ("digits", "synthetic", "pydocs", "synthetic_text")  # data sets that need no files


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
    return list(dict.fromkeys(idle)) + _seldom(cfg, typed) + _growing(cfg) + ddp_rules.warnings(cfg)


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
    feeds_back = cfg["compressor"].get("error_feedback") and "error_feedback" not in compressor.traits.takes
    if not (feeds_back and compressor.traits.unbiased and cfg["choices"]["compressor"] != "none"):
        return []
    return [
        "compressor.error_feedback=true keeps what an unbiased compressor has lost, maybe more than there was: the"
        " residual can grow without end (qsgd at its defaults: to 3,000 gradients in 100 steps)"
    ]
