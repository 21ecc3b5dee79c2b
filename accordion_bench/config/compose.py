"""Compose a resolved configuration from a list of overrides with Hydra.

A choice may bring defaults for other groups, as its paper has them. Typed options take precedence over them. The
choice's YAML file lists what it brings; the other group's file marks which defaults may be replaced:

    conf/sync/slowmo.yaml     brings: {optimizer: {nesterov: true}}
    conf/optimizer/sgd.yaml   nesterov: ${brought:false}

Typed options, and those of an experiment or arm, have replaced `${brought:...}` before it is evaluated. A group without
the option (AdamW has no `nesterov`) is not changed.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accordion_bench.options.advice import SEVERAL
from accordion_bench.options.checks import ConfigError, as_typed, show
from accordion_bench.options.conf_dir import (
    conf_dir,
    conf_dirs,
    options_of,
    plain,
    read_options,
    read_yaml,
    yaml_file,
)
from accordion_bench.options.instantiate import Config
from accordion_bench.options.override import key_of, parts
from accordion_bench.options.units import without_units
from accordion_bench.run_config import SCALES, RunConfig


def register_resolvers() -> None:
    """Register the resolvers that YAML files use.

    `${by_scale:FULL,SMALL,TINY}` selects a value by the run's `scale`: one experiment as a full reproduction on GPUs,
    an hour on a CPU, or a minute in a test. `${brought:DEFAULT}` is a default that another choice may replace.
    """
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("by_scale", _by_scale, replace=True)
    OmegaConf.register_new_resolver("brought", lambda default: default, replace=True)


def _by_scale(full: Any, small: Any, tiny: Any, *, _root_: Any) -> Any:
    values = dict(zip(SCALES, (full, small, tiny), strict=True))
    return values.get(_root_.scale, full)  # another scale is refused later, with the other wrong values


def refuse_unwritable(key: str, folder: str) -> None:
    """Refuse a folder, the value of option `key`, that cannot be written; it need not exist yet."""
    if why := _why_not(Path(folder)):
        here = "" if os.path.isabs(folder) else f" in {Path.cwd()}"
        own = "null" if key == "resume" else _elsewhere(folder)
        raise ConfigError(
            f"{key} must be a folder that can be written, got {folder}{here}: {why}; type {as_typed(key, own)}"
        )


def _why_not(folder: Path) -> str:
    """Return why the folder, or its nearest existing parent, cannot be written; "" if it can."""
    try:
        nearest = next(path for path in [folder, *folder.absolute().parents] if path.exists())
        if not nearest.is_dir():
            return f"{nearest} is a file"
        with tempfile.TemporaryFile(dir=nearest):
            return ""
    except FileNotFoundError:  # raised by file systems without new files, such as /proc
        return f"{nearest} takes no files"
    except OSError as error:  # for example, the name is too long
        return error.strerror or type(error).__name__


def _elsewhere(folder: str) -> str:
    """Return a folder of that name where the user may write."""
    name = Path(folder).name if os.path.isabs(folder) else folder
    places = [place / name for place in (Path.home(), Path(tempfile.gettempdir()))]
    return str(next((place for place in places if not _why_not(place)), places[0]))


@dataclass(frozen=True)
class Brought:
    """Default that a choice brings: `sync=slowmo` brings optimizer.nesterov=true."""

    choice: str
    group: str
    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.choice} brings {self.group}.{self.key}={show(self.value)}"


def apply_brought(raw: Config, names: Config) -> list[Brought]:
    """Replace defaults by those that choices bring, remove `brings`, and return the replaced defaults.

    Args:
        raw: composed configuration with unresolved interpolations; changed in place.
        names: chosen name of each group.
    """
    taken = []
    for choice, node in _choices(raw, names):
        for group, options in (node.pop("brings", None) or {}).items():
            for key, value in options.items():
                there = (raw.get(group) or {}).get(key)
                if plain(there) != there:
                    raw[group][key] = value
                    taken.append(Brought(choice, group, key, value))
    return taken


def reapply_brought(cfg: Config) -> None:
    """Replace defaults again, in place, in a resolved configuration with other choices, whose nodes contain `brings`.

    Values equal to their default give way.
    """
    names = cfg["choices"]
    names.pop("brought", None)
    for group in cfg.keys() & names.keys() - {"adaptive"}:
        file = yaml_file(group, names[group])
        for key, value in read_yaml(file).items() if file else ():
            if plain(value) != value and cfg[group].get(key) == plain(value):
                cfg[group][key] = value
    taken = apply_brought(cfg, names)
    for group in cfg.keys() & names.keys() - {"adaptive"}:
        cfg[group] = options_of(cfg[group])
    if taken := settle_brought(cfg, taken):
        names["brought"] = "; ".join(map(str, taken))


def settle_brought(cfg: Config, taken: list[Brought]) -> list[Brought]:
    """Drop a brought Nesterov step if the momentum is 0, because only a typed one is an error."""
    optimizer = cfg.get("optimizer") or {}
    if optimizer.get("momentum") == 0:
        idle = [own for own in taken if (own.group, own.key) == ("optimizer", "nesterov")]
        optimizer |= {own.key: False for own in idle}
        taken = [own for own in taken if own not in idle]
    return taken


def _choices(raw: Config, names: Config) -> Iterator[tuple[str, Config]]:
    """Yield the chosen components in order of precedence for brought defaults."""
    for name, node in (raw.get("adaptive") or {}).items():
        if isinstance(node, dict):
            yield f"adaptive={name}", node
    for group in ("compressor", "sync", "optimizer"):
        if isinstance(raw.get(group), dict):
            yield f"{group}={names.get(group)}", raw[group]


def compose(overrides: Sequence[str] = ()) -> Config:
    """Return the resolved configuration for a list of overrides, as the command line composes it (imports Hydra)."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register_resolvers()
    own = ",".join(f"'file://{folder}'" for folder in conf_dirs()[1:])
    beside = [f"hydra.searchpath=[{own}]"] if own else []
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        full = hydra_compose("config", [*overrides, *beside], return_hydra_config=True)
    return resolve(full, full.hydra.runtime.choices, overrides)


def resolve(composed: Any, choices: Any, typed: Sequence[str] = ()) -> Config:
    """Convert Hydra's composed configuration to a plain dict, with the chosen name of each group under `choices`.

    Defaults that choices bring are included; `choices.brought` lists them and their origin.

    Args:
        choices: choices recorded by Hydra.
        typed: overrides of the command line.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    own = OmegaConf.create({key: value for key, value in composed.items_ex(resolve=False) if key != "hydra"})
    names = {key: value for key, value in dict(choices).items() if "/" not in key and "@" not in key}
    raw: Config = OmegaConf.to_container(own, resolve=False)  # type: ignore[assignment]
    taken = apply_brought(raw, names)
    try:
        cfg: Config = OmegaConf.to_container(OmegaConf.create(raw), resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        error.choices = names  # type: ignore[attr-defined]  # the error message suggests the choice's default
        raise
    _set_apart(cfg, names, typed)
    if taken := settle_brought(cfg, taken):
        names["brought"] = "; ".join(map(str, taken))
    if setup := cfg.pop("setup", None):  # values of a preset for its arms; Hydra records no choice of several presets
        if "experiment" not in setup:
            name = names.get("experiment")
            chosen = f"{_listed(name)}, a part of others" if name else "none beside setup"
            raise ConfigError(
                f"experiment must be a whole one, got {chosen}; type +experiment=accordion/table1_resnet18, or another "
                "of docs/experiments.md"
            )
        names["experiment"] = f"{setup['experiment']}, faithful" if setup.get("faithful") else setup["experiment"]
    return {**without_units(cfg), "choices": {key: _listed(value) for key, value in names.items()}}


def as_written(cfg: Config) -> str:
    """Return a new run's configuration as config.yaml contains it.

    Values that are determined at the start of the run are null: the number of workers, values counted in files.
    """
    import yaml

    if cfg["resume"] is not None:
        raise ConfigError(
            f"--print shows a new run, got resume={cfg['resume']}; type cat {Path(cfg['resume']) / 'config.yaml'}"
        )
    return yaml.safe_dump(RunConfig.from_dict(cfg).to_dict(), sort_keys=False, allow_unicode=True)


def _set_apart(cfg: Config, names: Config, typed: Sequence[str]) -> None:
    """Give each of several choices of a group its own options; Hydra merges them, and records no choice."""
    for group in [group for group in SEVERAL if group in cfg and group not in names]:
        value = next((word.partition("=")[2] for word in reversed(typed) if key_of(word) == group), "")
        names[group] = parts(value.strip("[]"))
        files = {name: yaml_file(group, name) for name in names[group]}
        nodes = {name: read_options(file) for name, file in files.items() if file}
        if not nodes:
            raise ConfigError(f"{group} must be typed where it is a list, got none; type {group}=[csv,wandb]")
        given, known = cfg[group], {key for node in nodes.values() for key in node}
        given = {key: value for key, value in given.items() if key != "_target_"}
        further = {key: value for key, value in given.items() if key not in known}  # passed on so that they are refused
        apart = {
            name: {key: given.get(key, value) for key, value in node.items()} | further for name, node in nodes.items()
        }
        cfg[group] = apart if len(apart) > 1 else next(iter(apart.values()))


def _listed(choice: Any) -> Any:
    return choice if isinstance(choice, str) else ",".join(map(str, choice))
