"""Defaults that a choice brings for other groups, as its paper has them: they give way to all that is typed.

A choice's YAML file says what it brings, and the other group's which defaults may give way:

    conf/sync/slowmo.yaml     brings: {optimizer: {nesterov: true}}
    conf/optimizer/sgd.yaml   nesterov: ${brought:false}

What is typed, and what an experiment or an arm says, has taken the place of `${brought:...}` before we look. A group
that lacks the option (AdamW has no `nesterov`) is left alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accordion_bench.options.checks import show
from accordion_bench.options.choice_file import options_of, plain, read_yaml
from accordion_bench.options.conf_dir import yaml_file
from accordion_bench.options.instantiate import Config


@dataclass(frozen=True)
class Brought:
    """One default: `sync=slowmo` brings optimizer.nesterov=true."""

    choice: str
    group: str
    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.choice} brings {self.group}.{self.key}={show(self.value)}"


def take(raw: Config, names: Config) -> list[Brought]:
    """Put what choices bring in the place of defaults, and `brings` out of the way.

    Args:
        raw: what was composed, interpolations as they stand in the YAML files; changed in place.
        names: the chosen name of each group.

    Returns:
        what has taken a default's place.
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


def bring_again(cfg: Config) -> None:
    """The same in a resolved configuration whose choices have been exchanged: values that are their defaults give way.

    Args:
        cfg: resolved; `brings` stands in the choices' nodes again. Changed in place.
    """
    names = cfg["choices"]
    names.pop("brought", None)
    for group in cfg.keys() & names.keys() - {"adaptive"}:
        file = yaml_file(group, names[group])
        for key, value in read_yaml(file).items() if file else ():
            if plain(value) != value and cfg[group].get(key) == plain(value):
                cfg[group][key] = value
    taken = take(cfg, names)
    for group in cfg.keys() & names.keys() - {"adaptive"}:
        cfg[group] = options_of(cfg[group])
    if taken := settle(cfg, taken):
        names["brought"] = "; ".join(map(str, taken))


def settle(cfg: Config, taken: list[Brought]) -> list[Brought]:
    """What remains: SGD has no Nesterov step without a momentum, and only the one that is typed is refused."""
    optimizer = cfg.get("optimizer") or {}
    if optimizer.get("momentum") == 0:
        idle = [own for own in taken if (own.group, own.key) == ("optimizer", "nesterov")]
        optimizer |= {own.key: False for own in idle}
        taken = [own for own in taken if own not in idle]
    return taken


def _choices(raw: Config, names: Config) -> Iterator[tuple[str, Config]]:
    """The chosen components, those first whose word counts where several bring the same."""
    for name, node in (raw.get("adaptive") or {}).items():
        if isinstance(node, dict):
            yield f"adaptive={name}", node
    for group in ("compressor", "sync", "optimizer"):
        if isinstance(raw.get(group), dict):
            yield f"{group}={names.get(group)}", raw[group]
