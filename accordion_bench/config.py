"""From a resolved configuration to components: the single place that instantiates them, and all checks before a run."""

import functools
import importlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from accordion_bench import check, rng
from accordion_bench.adaptive.base import Policy
from accordion_bench.axis import BN_POLICIES
from accordion_bench.check import ConfigError, ValueRefused
from accordion_bench.compressors.base import Compressor
from accordion_bench.compressors.error_feedback import ErrorFeedback
from accordion_bench.config_dir import conf_dir
from accordion_bench.datasets.images import ImageDataset
from accordion_bench.optimizers import without_dynamo
from accordion_bench.plan import Ladder
from accordion_bench.schedules.base import Schedule
from accordion_bench.sync.base import Sync

Config = dict[str, Any]


def build(
    node: Config,
    group: str,
    *,
    positional: Sequence[Any] = (),
    adapt: Callable[[Any], Any] = lambda cls: cls,
    **extra: Any,
) -> Any:
    """Call the class that `_target_` names with the node's other keys.

    Args:
        node: one config group.
        group: its name, for messages.
        positional: arguments that are no options.
        adapt: changes the class before it is called.
        extra: keyword arguments that are no options.

    Raises:
        ConfigError: the class refuses a value.
    """
    module, _, name = str(node.get("_target_")).rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        rule, value = "the path of a class that can be imported", node.get("_target_")
        raise ConfigError(f"{group}._target_ must be {rule}, got {value}; type {group}=NAME instead") from None
    options = {key: value for key, value in node.items() if key != "_target_"}
    try:
        return adapt(cls)(*positional, **options, **extra)
    except ValueRefused as refused:
        raise refused.under(group) from None
    except ConfigError:
        raise
    except Exception as error:
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            raise ConfigError(f"{group}.{unknown[1]} is no option of {name}; type --help for all options") from error
        shown = ", ".join(f"{group}.{key}={check.show(value)}" for key, value in options.items())
        raise ConfigError(f"{group} must fit together, got {shown}: {error}; type other values") from error


@dataclass(frozen=True)
class Components:
    """Everything that needs neither data nor devices."""

    compressor: Compressor
    scope: str
    start_step: int
    policies: dict[str, Policy]
    ladder: Ladder
    schedule: Schedule
    sync: Sync
    dataset: ImageDataset


def components(cfg: Config, workers: int) -> Components:
    """Build and check every component of a run.

    Raises:
        ConfigError: a value breaks a rule, or two choices do not go together.
    """
    compressor, scope, start_step = _compressor(dict(cfg["compressor"]))
    policies = {name: build(node, f"adaptive.{name}") for name, node in (cfg.get("adaptive") or {}).items()}
    return Components(
        compressor=compressor,
        scope=scope,
        start_step=start_step,
        policies=policies,
        ladder=_ladder(compressor, policies, cfg),
        schedule=build(cfg["schedule"], "schedule", epochs=cfg["epochs"], workers=workers),
        sync=build(cfg["sync"], "sync"),
        dataset=build(cfg["dataset"], "dataset"),
    )


def _compressor(node: Config) -> tuple[Compressor, str, int]:
    """The compressor in its wrappers; its wrappers' options stand beside its own in the YAML."""
    error_feedback = check.boolean("compressor.error_feedback", node.pop("error_feedback", False))
    residual = check.choice("compressor.residual", node.pop("residual", "local"), ["local", "aggregate"])
    scope = check.choice("compressor.scope", node.pop("scope", "tensor"), ["tensor", "model"])
    start_step = check.integer("compressor.start_step", node.pop("start_step", 0), at_least=0)
    compressor = build(node, "compressor")
    if scope == "model":
        if not compressor.whole_model:
            rule = "tensor: this compressor works on matrices, and a whole model is none"
            raise ValueRefused("compressor.scope", rule, scope, "tensor")
        compressor.min_ndim = 1
    try:
        return (ErrorFeedback(compressor, residual) if error_feedback else compressor), scope, start_step
    except ValueRefused as refused:
        raise refused.under("compressor") from None


def _ladder(compressor: Compressor, policies: dict[str, Policy], cfg: Config) -> Ladder:
    """The levels that plans may hold: the policy's, or the configured one."""
    by_knob: dict[str, str] = {}
    for name, policy in policies.items():
        if policy.drives in by_knob:
            raise ConfigError(
                f"adaptive must not drive the same thing twice, got {by_knob[policy.drives]} and {name}, which both "
                f"drive the {policy.drives}; type adaptive={name}"
            )
        by_knob[policy.drives] = name
    driver = by_knob.get("level")
    if driver is None:
        return Ladder(compressor.knob or "", () if compressor.level is None else (compressor.level,))
    if compressor.knob is None:
        name = cfg.get("choices", {}).get("compressor", "this one")
        raise ConfigError(
            f"adaptive={driver} needs a compressor with levels to choose from, got compressor={name}; "
            f"type one of {', '.join('compressor=' + c for c in compressors_with_levels())}"
        )
    try:
        values = policies[driver].ladder(compressor.knob, compressor.pair)
        names = ("strong", "weak")
        checked = tuple(compressor.check_level(name, value) for name, value in zip(names, values, strict=True))
    except ValueRefused as refused:
        raise refused.under(f"adaptive.{driver}") from None
    return Ladder(compressor.knob, checked)


def compressors_with_levels() -> list[str]:
    """Names of the compressors that have a knob, found in the YAML files."""
    import yaml

    names = []
    for file in sorted((conf_dir() / "compressor").glob("*.yaml")):
        module, _, name = yaml.safe_load(file.read_text())["_target_"].rpartition(".")
        if getattr(importlib.import_module(module), name).knob:
            names.append(file.stem)
    return names


def build_model(cfg: Config, dataset: ImageDataset) -> nn.Module:
    """The model for a data set, with random weights."""
    return build(cfg["model"], "model", in_channels=dataset.in_channels, num_classes=dataset.num_classes)


def validate(cfg: Config) -> None:
    """Refuse every wrong value before data or devices are touched.

    Raises:
        ConfigError: one sentence: key, rule, value, what to type instead.
    """
    _check_kinds(cfg)
    check.integer("seed", cfg["seed"], at_least=0)
    check.integer("epochs", cfg["epochs"], at_least=1, instead=60)
    check.integer("batch_size", cfg["batch_size"], at_least=1, instead=32)
    if cfg["micro_batch_size"] is not None:
        check.integer("micro_batch_size", cfg["micro_batch_size"], at_least=1, instead=cfg["batch_size"])
    check.choice("bn", cfg["bn"], BN_POLICIES)
    if cfg["target"] is not None:
        check.number("target", cfg["target"], above=0, at_most=1, instead=0.9)
    check.integer("checkpoint.every", cfg["checkpoint"]["every"], at_least=0)
    for key, folder in (("data", "data"), ("runs", "results/runs")):
        if not cfg["paths"][key]:
            raise ValueRefused(f"paths.{key}", "a folder", "''", folder)
    optimizer = cfg["optimizer"]
    check.number("optimizer.lr", optimizer.get("lr"), above=0, instead=0.1)
    check.number("optimizer.weight_decay", optimizer.get("weight_decay", 0), at_least=0, instead=1e-4)
    check.number("optimizer.momentum", optimizer.get("momentum", 0), at_least=0, below=1, instead=0.9)
    if optimizer.get("nesterov") and not optimizer.get("momentum"):
        raise ValueRefused("optimizer.nesterov", "false where optimizer.momentum is 0", True, False)
    parts = components(cfg, workers=1)
    # really built, and thrown away: a model on the meta device costs seconds of imports, this one a tenth of a second
    with rng.kept_rng():
        model = build_model(cfg, parts.dataset)
    build(optimizer, "optimizer", positional=[list(model.parameters())], adapt=without_dynamo)
    build(cfg["tracker"], "tracker")
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
    for prefix in ("", "checkpoint.", "paths.", "comm."):  # options of other groups are their constructors' to refuse
        here, there = (cfg.get(prefix[:-1]), declared.get(prefix[:-1])) if prefix else (cfg, declared)
        if not isinstance(here, dict) or not there:
            continue
        for key in [key for key in there if key not in here]:
            value = "NAME" if isinstance(there[key], dict) else check.show(there[key])
            raise ConfigError(f"{prefix}{key} must be there, got ~{prefix}{key}; type {prefix}{key}={value}")
        for key in [key for key in here if key not in there and key != "choices"]:
            near = check.closest(key, list(there))
            raise ConfigError(f"{prefix}{key} is no option here; type {prefix}{near}, or --help for all options")
    _same_kinds(declared, cfg, "")
    for name, node in (cfg["adaptive"] or {}).items():
        if not isinstance(node, dict):
            rule = "a policy's options"
            raise ConfigError(f"adaptive.{name} must be {rule}, got {check.show(node)}; type adaptive={name}")


def _same_kinds(declared: Config, given: Config, prefix: str) -> None:
    """Refuse text for a number, a number for a list, null where a value is needed, and so on."""
    for name, default in declared.items():
        if name not in given or default is None or (isinstance(default, str) and "${" in default):
            continue
        key, value = f"{prefix}{name}", given[name]
        kinds: Any = next(kind for kind in (bool, (int, float), str, list, dict) if isinstance(default, kind))
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            rule = check.kind_of(default)
            if isinstance(default, dict):
                option = f"{key}.{next(iter(default), 'OPTION')}=VALUE"
                raise ConfigError(f"{key} must be {rule}, got {check.show(value)}; type {option}")
            raise ValueRefused(key, rule, value, default)
        if isinstance(value, dict):
            _same_kinds(default, value, f"{key}.")


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
    compressor, adaptive = cfg["compressor"], cfg.get("adaptive") or {}
    knob = next((k for k in ("rank", "density", "bits") if k in compressor), "")
    dataset, schedule, epochs = cfg.get("choices", {}).get("dataset"), cfg["schedule"], cfg["epochs"]
    accordion = adaptive.get("accordion", {})
    rules = [
        (f"compressor.{knob}", bool(adaptive), f"adaptive={','.join(adaptive)} sets the {knob} (weak and strong)"),
        ("compressor.residual", not compressor.get("error_feedback"), "compressor.error_feedback is false"),
        ("compressor.on_switch", not adaptive, "adaptive=none never switches"),
        ("compressor.on_switch", not compressor.get("warm_start", True), "compressor.warm_start is false"),
        ("compressor.eps", compressor.get("orthonormalisation") == "qr", "compressor.orthonormalisation=qr needs none"),
        ("adaptive.accordion.interval", accordion.get("interval", 0) >= epochs, f"the run has {epochs} epochs"),
        ("schedule.warmup_epochs", schedule.get("lr_scaling") == "none", "schedule.lr_scaling=none warms up to 1"),
        ("schedule.warmup_epochs", cfg["workers"] == 1, "one worker has nothing to warm up to"),
        ("schedule.lr_scaling", cfg["workers"] == 1, "one worker's learning rate is not scaled"),
        ("schedule.gamma", schedule.get("milestones") == [], "schedule.milestones is empty"),
        ("schedule.milestones", schedule.get("gamma") == 1, "schedule.gamma is 1"),
        ("optimizer.nesterov", cfg["optimizer"].get("momentum") == 0, "optimizer.momentum is 0"),
        ("paths.data", dataset in ("digits", "synthetic"), f"dataset={dataset} reads nothing from there"),
        ("paths.runs", cfg["resume"] is not None, "a resumed run stays in its folder"),
        (
            "micro_batch_size",
            (cfg["micro_batch_size"] or 0) >= cfg["batch_size"],
            f"a batch has {cfg['batch_size']} samples",
        ),
        ("comm.timeout", cfg["comm"]["backend"] == "simulated", "workers in one process wait for nobody"),
    ]
    return [f"{key} has no effect here: {why}" for key, idle, why in rules if key in typed and idle]


def compose(overrides: Sequence[str] = ()) -> Config:
    """The resolved configuration for a list of overrides, as the command line would compose it (imports Hydra)."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        full = hydra_compose("config", list(overrides), return_hydra_config=True)
    return resolve(full, full.hydra.runtime.choices)


def resolve(composed: Any, choices: Any) -> Config:
    """A plain dict from what Hydra composed, with the chosen name of each group under `choices`."""
    from omegaconf import OmegaConf

    own = OmegaConf.create({key: value for key, value in composed.items_ex(resolve=False) if key != "hydra"})
    cfg = OmegaConf.to_container(own, resolve=True)
    assert isinstance(cfg, dict)
    names = {key: value for key, value in dict(choices).items() if "/" not in key and "@" not in key}
    return {**cfg, "choices": {key: _listed(value) for key, value in names.items()}}


def _listed(choice: Any) -> Any:
    return choice if isinstance(choice, str) else ",".join(map(str, choice))
