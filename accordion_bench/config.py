"""From a resolved configuration to components: the single place that instantiates them, and all checks before a run."""

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accordion_bench import check
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
    module, _, name = node["_target_"].rpartition(".")
    options = {key: value for key, value in node.items() if key != "_target_"}
    try:
        return adapt(getattr(importlib.import_module(module), name))(*positional, **options, **extra)
    except ValueRefused as refused:
        raise refused.under(group) from None
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{group} cannot be built from {options}: {error}") from error


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
    residual = node.pop("residual", "local")
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
    check.integer("seed", cfg["seed"], at_least=0)
    check.integer("epochs", cfg["epochs"], at_least=1, instead=60)
    check.integer("batch_size", cfg["batch_size"], at_least=1, instead=32)
    if cfg["micro_batch_size"] is not None:
        check.integer("micro_batch_size", cfg["micro_batch_size"], at_least=1, instead=cfg["batch_size"])
    check.choice("bn", cfg["bn"], BN_POLICIES)
    if cfg["target"] is not None:
        check.number("target", cfg["target"], above=0, at_most=1, instead=0.9)
    check.integer("checkpoint.every", cfg["checkpoint"]["every"], at_least=0)
    for key in ("data", "runs"):
        if not isinstance(cfg["paths"][key], str) or not cfg["paths"][key]:
            raise ValueRefused(f"paths.{key}", "a folder", cfg["paths"][key], {"data": "data"}.get(key, "results/runs"))
    optimizer = cfg["optimizer"]
    check.number("optimizer.lr", optimizer.get("lr"), above=0, instead=0.1)
    check.number("optimizer.weight_decay", optimizer.get("weight_decay", 0), at_least=0, instead=1e-4)
    if "momentum" in optimizer:
        check.number("optimizer.momentum", optimizer["momentum"], at_least=0, below=1, instead=0.9)
    parts = components(cfg, workers=1)
    with torch.device("meta"):
        model = build_model(cfg, parts.dataset)
    build(optimizer, "optimizer", positional=[list(model.parameters())], adapt=without_dynamo)
    build(cfg["tracker"], "tracker")
    runs = Path(cfg["paths"]["runs"])
    nearest = next(path for path in [runs, *runs.absolute().parents] if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueRefused("paths.runs", "a folder that can be written", str(runs), "results/runs")


def without_effect(cfg: Config, typed: set[str]) -> list[str]:
    """Warnings for settings that were typed but change nothing.

    Args:
        cfg: the configuration.
        typed: the keys on the command line.
    """
    compressor, adaptive = cfg["compressor"], cfg.get("adaptive") or {}
    knob = next((k for k in ("rank", "density", "bits") if k in compressor), "")
    rules = [
        (f"compressor.{knob}", bool(adaptive), f"adaptive={','.join(adaptive)} sets the {knob} (weak and strong)"),
        ("compressor.residual", not compressor.get("error_feedback"), "compressor.error_feedback is false"),
        ("compressor.on_switch", not adaptive, "adaptive=none never switches"),
        ("compressor.on_switch", not compressor.get("warm_start", True), "compressor.warm_start is false"),
        ("compressor.eps", compressor.get("orthonormalisation") == "qr", "compressor.orthonormalisation=qr needs none"),
        ("schedule.warmup_epochs", cfg["schedule"].get("lr_scaling") == "none", "schedule.lr_scaling=none warms up to 1"),
        (
            "micro_batch_size",
            (cfg["micro_batch_size"] or 0) >= cfg["batch_size"],
            f"a batch has {cfg['batch_size']} samples",
        ),
        ("comm.timeout", cfg["comm"]["backend"] == "simulated", "comm=simulated waits for nobody"),
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

    cfg = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(cfg, dict)
    cfg.pop("hydra", None)
    names = {key: value for key, value in dict(choices).items() if "/" not in key and "@" not in key}
    return {**cfg, "choices": {key: _listed(value) for key, value in names.items()}}


def _listed(choice: Any) -> Any:
    return choice if isinstance(choice, str) else ",".join(map(str, choice))
