"""Write the YAML files of config groups, and docs/options.md, from the options that classes declare.

    python -m scripts.options

A file is written for each name in a class's `chosen_as`. Files of classes that declare nothing stay as they are.
"""

import importlib
import pkgutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from accordion_bench.compressors.assemble import options_beside
from accordion_bench.options.checks import show
from accordion_bench.options.conf_dir import conf_dir, package_dir
from accordion_bench.options.option import Choice, Option, options_of
from accordion_bench.sync.outer import OuterSGD, SlowMo

PACKAGES = {
    "compressor": "compressors",
    "adaptive": "adaptive",
    "network": "network",
    "schedule": "schedules",
    "sync": "sync",
}
INSIDE = ("adaptive",)  # groups of which several may be chosen, each in a place of its own
BESIDE: dict[str, Callable[[Any], Mapping[str, Option]]] = {
    "compressor": options_beside,
    "sync": lambda cls: {**options_of(SlowMo), **options_of(OuterSGD)},
}
DOCS = package_dir().parent / "docs" / "options.md"
COLUMN = 27  # of comments
WIDTH = 119


def declared(group: str) -> Iterator[tuple[str, Any, Choice]]:
    """(Name, class, what its file says) of each choice of a config group that a class declares."""
    package = importlib.import_module(f"accordion_bench.{PACKAGES[group]}")
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for cls in vars(importlib.import_module(found.name)).values():
            if isinstance(cls, type) and cls.__module__ == found.name and "chosen_as" in vars(cls):
                yield from ((name, cls, choice) for name, choice in vars(cls)["chosen_as"].items())


def lines_of(group: str, cls: Any, choice: Choice) -> Iterator[tuple[str, Any, str]]:
    """(Option, default, comment) of each option that the file of a choice has."""
    own = {name: one for name, one in options_of(cls).items() if one.shown and name not in choice.leaves_out}
    beside = BESIDE[group](cls) if group in BESIDE else {}
    found = own | {name: beside[name] for name in choice.beside}
    if unknown := (choice.values.keys() | choice.comments.keys()) - found.keys():
        raise ValueError(f"{cls.__name__} has no option {', '.join(sorted(unknown))}")
    for name, one in found.items():
        value = choice.values.get(name, one.default)
        comment = choice.comments.get(name, one.comment)
        yield name, f"${{brought:{as_yaml(value)}}}" if one.brought else value, comment


def yaml_text(group: str, name: str, cls: Any, choice: Choice) -> str:
    """The YAML file of a choice."""
    told = textwrap.wrap(choice.told, WIDTH - 2)
    options = [_line(f"{key}: {as_yaml(value)}", comment) for key, value, comment in lines_of(group, cls, choice)]
    brought: list[str] = (
        ["brings:".ljust(COLUMN) + "# defaults of other groups; what is typed wins"] if choice.brings else []
    )
    above = ""
    for key, (value, comment) in choice.brings.items():
        *path, name = key.split(".")
        if path and path[0] != above:
            above = path[0]
            brought.append(f"  {above}:")
        brought.append(_line(f"{'  ' * (len(path) + 1)}{name}: {as_yaml(value)}", comment))
    package = [f"# @package {group}.{name}"] if group in INSIDE else []
    selected = [f"  - override /{other}@_global_.{other}: {choice}" for other, choice in choice.selects.items()]
    head = [*package, *(f"# {line}" for line in told), *(["defaults:", *selected, "  - _self_"] if selected else [])]
    target = f"_target_: {cls.__module__}.{cls.__qualname__}"
    return "\n".join([*head, target, *options, *brought]) + "\n"


def tables() -> str:
    """docs/options.md: the options of each choice in a table."""
    parts = [
        "# Options",
        "Written by `python -m scripts.options` from what the classes declare. `--help all` has the other groups, and\n"
        "options of every run, too.",
    ]
    for group in PACKAGES:
        parts.append(f"## {group}")
        for name, cls, choice in sorted(declared(group), key=lambda case: case[0]):
            rows = [
                f"| `{key}` | `{as_yaml(value)}` | {comment} |" for key, value, comment in lines_of(group, cls, choice)
            ]
            parts += [f"### {group}={name}", textwrap.fill(f"{choice.told[0].upper()}{choice.told[1:]}.", WIDTH)]
            if rows:
                parts.append("\n".join(["| option | default | |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def as_yaml(value: Any) -> str:
    """As YAML 1.1 reads it back, which takes 1e-08 and 1e9 for text."""
    if isinstance(value, float) and value and not 1e-4 <= abs(value) < 1e6:
        mantissa, _, exponent = np.format_float_scientific(value, trim="0").partition("e")
        return f"{mantissa}e{int(exponent):+}"
    return show(value).replace(",", ", ")


def _line(text: str, comment: str) -> str:
    return f"{text:<{COLUMN - 2}}  # {comment}" if comment else text


def main() -> None:
    """Write every file."""
    for group in PACKAGES:
        for name, cls, choice in declared(group):
            (conf_dir() / group / f"{name}.yaml").write_text(yaml_text(group, name, cls, choice), encoding="utf-8")
    DOCS.write_text(tables(), encoding="utf-8")


if __name__ == "__main__":
    main()
