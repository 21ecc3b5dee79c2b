"""Help (`--help`): an overview page, and every option with its comment, read from the YAML files."""

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

An option is KEY=VALUE: GROUP=NAME chooses a part, GROUP.OPTION=VALUE sets one of its options.

{groups}
  every run      {run}
  and            +experiment=NAME, a paper's table: --help experiment

  --help compressor           the choices of a group, and their options
  --help compressor=powersgd  the options of one
  --help rank                 every option of that name, and where it applies
  --help all                  everything
  --dry-run                   plan, bytes, memory and time, without training or writing files
{dry_run}
  --print                     print the configuration as stored in the run folder, and exit
  show results/runs/RUN       print a run's settings, end, result, costs and files
  --version, --hydra-help     sweeps, launchers, --cfg job, shell completion
"""
WIDTH = 100  # characters per line
ASKED = ("--help", "-h")
EVERYTHING = "all"
KEY = re.compile(r"( *)([\w./]+):(?: +|$)(.*)")


@dataclass
class ChoiceHelp:
    """Help text of one YAML file: the override that selects it, its first comment, and its options.

    Args:
        options: (`compressor.rank=2`, comment) in the order of the file.
    """

    name: str
    told: str = ""
    options: list[tuple[str, str]] = field(default_factory=list)


def asked(arguments: Sequence[str]) -> bool:
    """Whether the command line contains a help flag."""
    return any(word in ASKED for word in arguments)


def text(arguments: Sequence[str]) -> str:
    """Return the help for the words beside --help; ConfigError for a word that is no group, choice or option."""
    own = command_line.config_dirs(arguments)
    for folder in own:
        add_conf_dir(folder)
    words = [word.lstrip("+") for word in arguments if not word.startswith("-") and word not in own]
    if not words:
        return _start()
    if words == [EVERYTHING]:
        run_level = read(conf_dir() / "config.yaml", "", "").options
        return "\n".join([_start(), "Options of every run:", *_lines(run_level), "", *_all_groups()])
    return "\n\n".join("\n".join(_of(word)) for word in words)


def read(file: Path, name: str, prefix: str) -> ChoiceHelp:
    """Read the help of one YAML file; comments at line ends describe the options, whose names start with `prefix`."""
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
    value, _, comment = rest.partition("#") if rest.startswith("#") else rest.partition(" #")
    default = re.fullmatch(r"\$\{brought:(.*)\}", value.strip())  # default that other choices may replace
    return default[1] if default else value.strip(), comment.strip()


def choice(group: str, name: str) -> ChoiceHelp:
    """Read the help of a choice of a config group; ConfigError if it is unknown."""
    if (file := yaml_file(group, name)) is None:
        raise ConfigError(advice.unknown_choice(group, name) or f"{group}={name} is no choice here; type --help")
    return read(file, f"{'+' if group in advice.PRESETS else ''}{group}={name}", f"{group}.")


def _start() -> str:
    names = (f"  {group + '=':<13}  {_some(advice.choices(group))}" for group in _groups())
    run = [option.partition("=")[0] for option, _ in read(conf_dir() / "config.yaml", "", "").options]
    dry_run = (f"    {word:<24}  {told}" for word, told in TOLD.items())
    return START.format(groups="\n".join(names), run=_some(run), dry_run="\n".join(dry_run))


def _some(names: Sequence[str]) -> str:
    """Join as many names as fit into a line, with their total number if some are omitted."""
    shown = list(names)
    while len(text := ", ".join(shown)) > WIDTH - 30:
        shown.pop()
    return text if len(shown) == len(names) else f"{text}, ... ({len(names)})"


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
    """Yield the options of a group or a choice, or all options of one name."""
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
    """Yield every option whose dotted name contains `key` as a part, with the choices that have it."""
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
    """Return the description of an option with the choices that have it: `(compressor=acpsgd, powersgd)`."""
    group = whose[0].partition("=")[0] if whose else ""
    names = ", ".join(each.partition("=")[2] for each in whose)
    return f"{told} ({group}={names})" if whose else f"{told} (every run)"


def _lines(options: Sequence[tuple[str, str]], indent: str = "  ") -> Iterator[str]:
    width = min(46, max((len(option) for option, _ in options), default=0))
    for option, told in options:
        yield f"{indent}{option:<{width}}  {told}".rstrip()
