"""Write the YAML files of config groups, and docs/options.md, from the options that classes declare.

    python -m scripts.options

A file is written for each name in a class's `chosen_as`. Files of classes without declarations are not changed. In
conf/config.yaml the options of every run are written; the parts before and after them, which Hydra reads, are not
changed.
"""

import dataclasses
import importlib
import json
import pkgutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import yaml

from accordion_bench.compressors.assemble import options_beside
from accordion_bench.options.checks import show
from accordion_bench.options.conf_dir import conf_dir, package_dir
from accordion_bench.options.option import Choice, Option, options_of
from accordion_bench.run_config import PARTS, RunConfig
from accordion_bench.sync.outer import OuterSGD, SlowMo

PACKAGES = {
    "compressor": "compressors",
    "dataset": "datasets",
    "adaptive": "adaptive",
    "network": "network",
    "schedule": "schedules",
    "sync": "sync",
    "model": "models",
    "optimizer": "optimizers",
    "tracker": "trackers",
    "comm": "run_config",
}
EVERY_RUN = {"": RunConfig, **{name: part for name, part in PARTS.items() if name not in PACKAGES}}
INSIDE = ("adaptive",)  # groups of which several may be chosen, each in a place of its own
BESIDE: dict[str, Callable[[Any], Mapping[str, Option]]] = {
    "compressor": options_beside,
    "sync": lambda cls: {**options_of(SlowMo), **options_of(OuterSGD)},
}
CONFIG = conf_dir() / "config.yaml"
DOCS = package_dir().parent / "docs" / "options.md"
COLUMN = 27  # of comments
WIDTH = 119


def declared(group: str) -> Iterator[tuple[str, Any, Choice]]:
    """Yield (name, class, content of its file) of each choice of a config group that a class declares."""
    package = importlib.import_module(f"accordion_bench.{PACKAGES[group]}")
    inside = (found.name for found in pkgutil.iter_modules(getattr(package, "__path__", []), f"{package.__name__}."))
    for module in (package.__name__, *inside):
        for cls in vars(importlib.import_module(module)).values():
            if isinstance(cls, type) and cls.__module__ == module and "chosen_as" in vars(cls):
                yield from ((name, cls, choice) for name, choice in vars(cls)["chosen_as"].items())


def lines_of(group: str, cls: Any, choice: Choice) -> Iterator[tuple[str, Any, str]]:
    """Return (option, default, comment) of each option that the file of a choice has."""
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
    """Return the YAML file of a choice."""
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
    path = choice.target or f"{cls.__module__}.{cls.__qualname__}"
    target = [] if cls in PARTS.values() else [f"_target_: {path}"]  # a part of the run is no object of its own
    return "\n".join([*head, *target, *options, *brought]) + "\n"


def config_text() -> str:
    """Return conf/config.yaml, with the options of every run."""
    text, lines = CONFIG.read_text(encoding="utf-8"), []
    for field in dataclasses.fields(RunConfig):
        if one := options_of(RunConfig).get(field.name):
            lines.append(_line(f"{field.name}: {as_yaml(one.default)}", one.comment))
        elif part := EVERY_RUN.get(field.name):
            inside = (_line(f"  {key}: {as_yaml(own.default)}", own.comment) for key, own in options_of(part).items())
            lines += ["", _line(f"{field.name}:", _told(part)), *inside, ""]
    own = "\n".join(lines).strip().replace("\n\n\n", "\n\n")
    return "".join([text.partition("\n\n")[0], "\n\n", own, "\n", *text.partition("\nhydra:\n")[1:]])


def _told(part: Any) -> str:
    return f"{part.__doc__[0].lower()}{part.__doc__[1:].removesuffix('.')}"


def tables() -> str:
    """Return docs/options.md: the options of each choice in a table."""
    parts = [
        "# Options",
        "Written by `python -m scripts.options` from what the classes declare. `--help all` has the other groups, too.",
        "## Every run",
        _table(
            (f"{prefix}.{key}".lstrip("."), one.default, one.comment)
            for prefix, cls in EVERY_RUN.items()
            for key, one in options_of(cls).items()
        ),
    ]
    for group in PACKAGES:
        parts.append(f"## {group}")
        for name, cls, choice in sorted(declared(group), key=lambda case: case[0]):
            parts += [f"### {group}={name}", textwrap.fill(f"{choice.told[0].upper()}{choice.told[1:]}.", WIDTH)]
            parts.append(_table(lines_of(group, cls, choice)))
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(lines: Iterable[tuple[str, Any, str]]) -> str:
    """Return a table of option, default, comment; "" if there are no options."""
    rows = [f"| `{key}` | `{as_yaml(value)}` | {comment} |" for key, value, comment in lines]
    return "\n".join(["| option | default | |", "|---|---|---|", *rows]) if rows else ""


def as_yaml(value: Any) -> str:
    """Return a value in the form that YAML 1.1 reads back, which treats 1e-08 and 1e9 as text."""
    if isinstance(value, float) and value and not 1e-4 <= abs(value) < 1e6:
        mantissa, _, exponent = np.format_float_scientific(value, trim="0").partition("e")
        return f"{mantissa}e{int(exponent):+}"
    if isinstance(value, str) and not _read_back(value):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    return show(value).replace(",", ", ")


def _read_back(word: str) -> bool:
    """Whether a word needs no quotes; for example, a leading `*` has another meaning."""
    try:
        return yaml.safe_load(word) == word
    except yaml.YAMLError:
        return False


def _line(text: str, comment: str) -> str:
    return f"{text:<{COLUMN - 2}}  # {comment}" if comment else text


def main() -> None:
    """Write every file."""
    for group in PACKAGES:
        for name, cls, choice in declared(group):
            (conf_dir() / group / f"{name}.yaml").write_text(yaml_text(group, name, cls, choice), encoding="utf-8")
    CONFIG.write_text(config_text(), encoding="utf-8")
    DOCS.write_text(tables(), encoding="utf-8")


if __name__ == "__main__":
    main()
