"""Composing: from a list of overrides to a resolved configuration, by Hydra."""

from collections.abc import Sequence
from typing import Any

from accordion_bench.config import brought, resolvers
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import conf_dir, conf_dirs
from accordion_bench.options.instantiate import Config
from accordion_bench.options.units import without_units


def compose(overrides: Sequence[str] = ()) -> Config:
    """The resolved configuration for a list of overrides, as the command line would compose it (imports Hydra)."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    resolvers.register()
    own = ",".join(f"'file://{folder}'" for folder in conf_dirs()[1:])
    beside = [f"hydra.searchpath=[{own}]"] if own else []
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        full = hydra_compose("config", [*overrides, *beside], return_hydra_config=True)
    return resolve(full, full.hydra.runtime.choices)


def resolve(composed: Any, choices: Any) -> Config:
    """A plain dict from what Hydra composed, with the chosen name of each group under `choices`.

    Defaults that choices bring stand in it; `choices.brought` says which, and who has brought them.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    own = OmegaConf.create({key: value for key, value in composed.items_ex(resolve=False) if key != "hydra"})
    names = {key: value for key, value in dict(choices).items() if "/" not in key and "@" not in key}
    raw: Config = OmegaConf.to_container(own, resolve=False)  # type: ignore[assignment]
    taken = brought.take(raw, names)
    try:
        cfg: Config = OmegaConf.to_container(OmegaConf.create(raw), resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        error.choices = names  # type: ignore[attr-defined]  # for the sentence: what to type is the choice's own default
        raise
    if taken := brought.settle(cfg, taken):
        names["brought"] = "; ".join(map(str, taken))
    if setup := cfg.pop("setup", None):  # what a preset tells its arms; of several presets Hydra notes no choice
        if "experiment" not in setup:
            name = names.get("experiment")
            chosen = f"{_listed(name)}, a part of others" if name else "none beside setup"
            raise ConfigError(
                f"experiment must be a whole one, got {chosen}; type +experiment=accordion/table1_resnet18, or another "
                "of docs/experiments.md"
            )
        names["experiment"] = f"{setup['experiment']}, faithful" if setup.get("faithful") else setup["experiment"]
    return {**without_units(cfg), "choices": {key: _listed(value) for key, value in names.items()}}


def _listed(choice: Any) -> Any:
    return choice if isinstance(choice, str) else ",".join(map(str, choice))
