"""From a resolved configuration to components: the single place that instantiates them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accordion_bench.adaptive.base import Policy
from accordion_bench.build import Config, build
from accordion_bench.check import ConfigError, ValueRefused
from accordion_bench.compressors.base import Compressor
from accordion_bench.config_dir import conf_dir
from accordion_bench.datasets.images import ImageDataset
from accordion_bench.optimizers import without_dynamo
from accordion_bench.plan import Ladder, Plan
from accordion_bench.schedules.base import Schedule
from accordion_bench.sync.base import Sync
from accordion_bench.wrapped import Wrapped, optimizer_node, wrapped_compressor


@dataclass(frozen=True)
class Components:
    """Everything that needs neither data nor devices."""

    wrapped: Wrapped
    policies: dict[str, Policy]
    ladder: Ladder
    codebooks: dict[int, tuple[float, ...]]
    schedule: Schedule
    sync: Sync
    dataset: ImageDataset


def components(cfg: Config, workers: int) -> Components:
    """Build and check every component of a run.

    Raises:
        ConfigError: a value breaks a rule, or two choices do not go together.
    """
    wrapped = wrapped_compressor(cfg["compressor"], cfg["optimizer"])
    policies = {name: build(node, f"adaptive.{name}") for name, node in (cfg.get("adaptive") or {}).items()}
    return Components(
        wrapped=wrapped,
        policies=policies,
        ladder=(ladder := _ladder(wrapped.compressor, policies, cfg)),
        codebooks=_codebooks(wrapped.compressor, policies, ladder, cfg),
        schedule=build(cfg["schedule"], "schedule", epochs=cfg["epochs"], workers=workers),
        sync=build(cfg["sync"], "sync"),
        dataset=build(cfg["dataset"], "dataset"),
    )


def build_optimizer(cfg: Config, compressor: Compressor, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer, without what the compressor applies itself."""
    node = optimizer_node(cfg["optimizer"], compressor)
    return build(node, "optimizer", positional=[params], adapt=without_dynamo)


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
        names = ["strong", *[f"level {i}" for i in range(1, len(values) - 1)], "weak"]
        checked = tuple(compressor.check_level(name, value) for name, value in zip(names, values, strict=True))
    except ValueRefused as refused:
        raise refused.under(f"adaptive.{driver}") from None
    return Ladder(compressor.knob, checked)


def _codebooks(
    compressor: Compressor, policies: dict[str, Policy], ladder: Ladder, cfg: Config
) -> dict[int, tuple[float, ...]]:
    """Where a policy drives codebooks: one per number of bits that the plan may choose, the compressor's own."""
    driver = next((name for name, policy in policies.items() if policy.drives == "codebook"), None)
    if driver is None:
        return {}
    bits = [int(value) for value in ladder.values] if compressor.knob == "bits" else []
    own = {b: compressor.codebook(b) for b in bits}
    books = {b: tuple(torch.tensor(levels).tolist()) for b, levels in own.items() if levels is not None}
    if not books:
        name = cfg.get("choices", {}).get("compressor", "this one")
        raise ConfigError(
            f"adaptive={driver} needs a compressor with a codebook of its own, got compressor={name}; "
            "type compressor=qsgd"
        )
    try:  # what the policy cannot do with these is refused here, before the run
        policies[driver].start(Plan(codebooks=books), ladder)
    except ValueRefused as refused:
        raise refused.under(f"adaptive.{driver}") from None
    return books


def compressors_with_levels() -> list[str]:
    """Names of the compressors that have a knob, found in the YAML files."""
    import yaml

    names = []
    for file in sorted((conf_dir() / "compressor").glob("*.yaml")):
        if wrapped_compressor(yaml.safe_load(file.read_text())).compressor.knob:
            names.append(file.stem)
    return names


def build_model(cfg: Config, dataset: ImageDataset) -> nn.Module:
    """The model for a data set, with random weights."""
    return build(cfg["model"], "model", in_channels=dataset.in_channels, num_classes=dataset.num_classes)


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
