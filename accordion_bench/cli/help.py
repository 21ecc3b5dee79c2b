"""--help: on a page what can be asked, and then every option with its comment, read from the YAML files."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accordion_bench.advising.gpus import TOLD
from accordion_bench.cli import command_line
from accordion_bench.options import advice
from accordion_bench.options.checks import ALIKE, ConfigError, closest
from accordion_bench.options.conf_dir import add_conf_dir, conf_dir, yaml_file

START = """\
What communicating less costs in accuracy and saves in bytes and time.

  python -m accordion_bench demo
  python -m accordion_bench compressor=powersgd adaptive=accordion
  python -m accordion_bench -m compressor=none,powersgd,topk seed=0,1,2
  python -m accordion_bench.report results/runs
  python -m accordion_bench.advise model=resnet18 workers=16 network=10gbit

An option is KEY=VALUE: GROUP=NAME chooses a part, GROUP.OPTION=VALUE says how it works.

{groups}
  every run      {run}
  and            +experiment=NAME, a paper's table: --help experiment

  --help compressor           the choices of a group, and their options
  --help compressor=powersgd  the options of one
  --help rank                 every option of that name, and whose it is
  --help all                  everything
  --dry-run                   plan, bytes, memory and time; nothing is trained or written
{dry_run}
  --print                     the configuration as the run folder will hold it; nothing else is done
  show results/runs/RUN       what a run was, how it ended, what it took, and where its files are
  --version, --hydra-help     sweeps, launchers, --cfg job, shell completion
"""
WIDTH = 100  # of a line
ASKED = ("--help", "-h")
EVERYTHING = "all"
KEY = re.compile(r"( *)([\w./]+):(?: +|$)(.*)")


@dataclass
class ChoiceHelp:
    """One YAML file: what it says of itself, and its options as they are typed.

    Args:
        name: `compressor=powersgd`.
        told: its first comment.
        options: (`compressor.rank=2`, comment), in their order.
    """

    name: str
    told: str = ""
    options: list[tuple[str, str]] = field(default_factory=list)


def asked(arguments: Sequence[str]) -> bool:
    """Whether the command line asks for help."""
    return any(word in ASKED for word in arguments)


def text(arguments: Sequence[str]) -> str:
    """The help for what stands on the command line beside --help.

    Raises:
        ConfigError: there is no such group, choice or option.
    """
    own = command_line.config_dirs(arguments)
    for folder in own:
        add_conf_dir(folder)
    words = [word.lstrip("+") for word in arguments if not word.startswith("-") and word not in own]
    if not words:
        return _start()
    if words == [EVERYTHING]:
        return "\n".join([_start(), *_run_level(), "", *_all_groups()])
    return "\n\n".join("\n".join(_of(word)) for word in words)


def read(file: Path, name: str, prefix: str) -> ChoiceHelp:
    """One YAML file, line by line; comments at the ends of lines belong to their options.

    Args:
        file: of a config group.
        name: how it is chosen.
        prefix: of its options, `compressor.`
    """
    found, above, inside = ChoiceHelp(name), [""], [0]
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            package = re.match(r"# @package (\S+)", line)
            if package:
                prefix = "" if package[1] == "_global_" else f"{package[1]}."
            elif not found.options:
                found.told = f"{found.told} {line.lstrip('# ')}".strip()
            continue
        match = KEY.fullmatch(line)
        if not match:
            continue
        depth = len(match[1])
        while depth < inside[-1]:
            inside.pop()
            above.pop()
        value, comment = _split(match[3])
        key = f"{'.'.join([*filter(None, above), match[2]])}"
        if not value:
            above.append(match[2])
            inside.append(depth + 2)
        if key.startswith("brings.") and value:  # defaults of other groups
            found.options.append((f"brings {key.removeprefix('brings.')}={value}", comment))
        elif key.split(".")[0] not in ("_target_", "defaults", "hydra", "brings") and (value or comment):
            found.options.append((f"{prefix}{key}{f'={value}' if value else ''}", comment))
    return found


def _split(rest: str) -> tuple[str, str]:
    """The value of a line, and the comment behind it."""
    value, _, comment = rest.partition("#") if rest.startswith("#") else rest.partition(" #")
    default = re.fullmatch(r"\$\{brought:(.*)\}", value.strip())  # until another choice brings its own
    return default[1] if default else value.strip(), comment.strip()


def choice(group: str, name: str) -> ChoiceHelp:
    """A choice of a config group.

    Raises:
        ConfigError: there is none of that name.
    """
    if (file := yaml_file(group, name)) is None:
        raise ConfigError(advice.unknown_choice(group, name) or f"{group}={name} is no choice here; type --help")
    return read(file, f"{'+' if group in advice.PRESETS else ''}{group}={name}", f"{group}.")


def _start() -> str:
    """What fits on a page."""
    names = (f"  {group + '=':<13}  {_some(advice.choices(group))}" for group in _groups())
    run = [option.partition("=")[0] for option, _ in read(conf_dir() / "config.yaml", "", "").options]
    dry_run = (f"    {word:<24}  {told}" for word, told in TOLD.items())
    return START.format(groups="\n".join(names), run=_some(run), dry_run="\n".join(dry_run))


def _some(names: Sequence[str]) -> str:
    """As many names as fit into a line, and how many there are."""
    shown = list(names)
    while len(text := ", ".join(shown)) > WIDTH - 30:
        shown.pop()
    return text if len(shown) == len(names) else f"{text}, ... ({len(names)})"


def _run_level() -> Iterator[str]:
    yield "Options of every run:"
    yield from _lines(read(conf_dir() / "config.yaml", "", "").options)


def _all_groups() -> Iterator[str]:
    for group in advice.groups():
        if group == "arm":
            continue
        if group == "experiment":
            yield "Experiments: +experiment=NAME, see docs/experiments.md:"
            yield f"  {', '.join(advice.experiments())}"
            continue
        yield from _of_group(group)
        yield ""


def _of_group(group: str) -> Iterator[str]:
    yield f"{group}:"
    for name in advice.choices(group):
        found = choice(group, name)
        yield f"  {found.name}" + (f"   {found.told}" if found.told else "")
        yield from _lines(found.options, "      ")


def _of(word: str) -> Iterator[str]:
    """The options of a group, a choice, or all of one name."""
    group, equals, names = word.partition("=")
    if group in advice.PRESETS and not equals:
        known = advice.experiments() if group == "experiment" else advice.choices(group)
        yield from [f"+{group}=NAME, one of", *(f"  {name}" for name in known)]
    elif group in advice.groups() and not equals:
        yield from _of_group(group)
    elif group in advice.groups():
        for name in names.strip("[]").split(","):
            found = choice(group, name)
            yield f"{found.name}" + (f"   {found.told}" if found.told else "")
            yield from _lines(found.options)
    elif chosen := [other for other in _groups() if group in advice.choices(other)]:
        for other in chosen:
            yield from _of(f"{other}={group}")
    else:
        yield from _named(group)


def _groups() -> list[str]:
    return [group for group in advice.groups() if group not in advice.PRESETS]


def _named(key: str) -> Iterator[str]:
    """Every option whose name, or a part of it, is `key`, and whose it is."""
    owners: dict[tuple[str, str], list[str]] = {
        option: [] for option in read(conf_dir() / "config.yaml", "", "").options
    }
    for group in _groups():
        for name in advice.choices(group):
            for option in choice(group, name).options:
                owners.setdefault(option, []).append(f"{group}={name}")
    found = {option: whose for option, whose in owners.items() if f".{key}." in f".{option[0].partition('=')[0]}."}
    if not found:
        parts = {part for option, _ in owners for part in option.partition("=")[0].split(".")}
        near = closest(key, [*sorted(parts), *advice.groups()], cutoff=ALIKE)
        raise ConfigError(f"{key} is no option here; type --help {near or EVERYTHING}")
    yield from _lines([(option, _told_of(told, whose)) for (option, told), whose in found.items()], "")


def _told_of(told: str, whose: Sequence[str]) -> str:
    """What is said of an option, and the choices that have it: `(compressor=acpsgd, powersgd)`."""
    group = whose[0].partition("=")[0] if whose else ""
    names = ", ".join(each.partition("=")[2] for each in whose)
    return f"{told} ({group}={names})" if whose else f"{told} (every run)"


def _lines(options: Sequence[tuple[str, str]], indent: str = "  ") -> Iterator[str]:
    width = min(46, max((len(option) for option, _ in options), default=0))
    for option, told in options:
        yield f"{indent}{option:<{width}}  {told}".rstrip()
