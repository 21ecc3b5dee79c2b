"""A command line before Hydra reads it: what Hydra would misread, pass over, or answer with its usage text."""

import dataclasses
import itertools
import re
from collections.abc import Sequence

from accordion_bench.cli import letters
from accordion_bench.options import advice
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import add_conf_dir, yaml_file
from accordion_bench.options.override import parts, refuse_twice

NAME = re.compile(r"[\w./-]+")  # of a choice; anything else is Hydra's to read
DRY_RUN = "--dry-run"  # ours
NOT_DRY = ("hydra/launcher=", "hydra.launcher.", "hydra.sweep.dir=")  # a dry run submits nothing and leaves nothing

# Hydra's own, in one spelling each, and whether a value follows
FLAGS = {
    "--help": False,
    "--hydra-help": False,
    "--version": False,
    "--cfg": True,
    "--resolve": False,
    "--package": True,
    "--run": False,
    "--multirun": False,
    "--shell-completion": False,
    "--config-path": True,
    "--config-name": True,
    "--config-dir": True,
    "--experimental-rerun": True,
    "--info": False,
}
SHORT = ("-h", "-c", "-p", "-r", "-m", "-sc", "-cp", "-cn", "-cd", "-i")
OF_SHORT = {"-c": "--cfg", "-p": "--package", "-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir"}


def refuse_unreadable(arguments: Sequence[str]) -> None:
    """Refuse what Hydra would misread, pass over, or answer with its usage text.

    Raises:
        ConfigError: for the first such word.
    """
    refuse_bytes(arguments)
    for word in arguments:
        letters.refuse_strange(word)
    for folder in config_dirs(arguments):
        add_conf_dir(folder)
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word.startswith("-") and word != "--":
            _flag(word, rest)
        elif word != "--":
            overrides.append(_override(word, overrides, rest))
    refuse_twice(overrides)
    for override in overrides:
        key, _, value = override.partition("=")
        if key in advice.PRESETS:
            raise ConfigError(advice.without_plus(key, value))
        if said := advice.several_in_one(key, value) or advice.choice_inside(key, value):
            raise ConfigError(said)
        _list(key.lstrip("+"), value)
        if not any(other.startswith("hydra.searchpath=") for other in overrides):
            _known(key.lstrip("+"), value)
        if key.lstrip("+~").startswith("hydra."):
            _of_hydra(key.lstrip("+~"))


def for_dry_run(arguments: Sequence[str], folder: str) -> list[str]:
    """The arguments of a dry run as Hydra is to read them: each cell in this process, its own notes in a folder."""
    kept = [word for word in arguments if word != DRY_RUN and not word.lstrip("+").startswith(NOT_DRY)]
    return [*kept, f"hydra.sweep.dir='{folder}'"]


def config_dirs(arguments: Sequence[str]) -> list[str]:
    """The folders of --config-dir, in any of its spellings; where its value is missing, none."""
    found = []
    for word, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        own = [flag for flag in FLAGS if flag.startswith(name)] if name.startswith("--") else []
        if (OF_SHORT.get(name) == "--config-dir" or own == ["--config-dir"]) and (equals or following):
            found.append(value if equals else following)
    return found


def refuse_bytes(arguments: Sequence[str]) -> None:
    """Refuse words that are no UTF-8, which no YAML file could hold."""
    for word in arguments:
        if any("\udc80" <= letter <= "\udcff" for letter in word):
            shown = word.encode("utf-8", "backslashreplace").decode().replace("\\udc", "\\x")
            raise ConfigError(f"names must be text in UTF-8, got {shown}; type another folder, or rename this one")


def _flag(word: str, rest: list[str]) -> None:
    """One of Hydra's flags, with its value; anything else with dashes is refused."""
    name, equals, value = word.partition("=")
    key = name.lstrip("-")
    known = {*advice.known_keys(), *advice.PRESETS, *advice.OF_ADVICE}
    keys = [typed for typed in (key, key.replace("-", "_")) if typed in known]
    own = [flag for flag in FLAGS if flag.startswith(name)] if name.startswith("--") and not keys else []
    if name in SHORT or name in FLAGS or len(own) == 1:
        flag = OF_SHORT.get(name, (own or [name])[0])
        if FLAGS.get(flag) and not equals:
            if not rest:
                raise ConfigError(f"{flag} must be followed by its value, got nothing; type {flag}=VALUE")
            rest.pop(0)
        return
    if not equals and rest and not re.match("-|.*=", rest[0]):
        value = rest[0]
    if keys:
        plus = "+" if keys[0] in advice.PRESETS else ""
        instead = f"{plus}{keys[0]}={value or 'VALUE'}"
        raise ConfigError(f"{keys[0]} must be typed without dashes, got {word}; type {instead}")
    plain = key.replace("-", "_")
    raise ConfigError(advice.unknown_key(plain, value).replace(plain, name, 1))


def _override(word: str, before: Sequence[str], rest: list[str]) -> str:
    """`KEY=VALUE` or `~KEY`; a word without `=` is refused."""
    split = word[-1] == "=" and rest and "=" not in rest[0] and not rest[0].startswith("-")
    if word.startswith("~") or ("=" in word[1:] and not split):
        return word
    key = word.rstrip("=")
    if rest[:1] and (key in advice.known_keys() or word[-1] == "="):  # epochs 3, epochs = 3, epochs= 3
        value = next((other.lstrip("=") for other in rest if other.strip("=")), "")
        if value and "=" not in value:
            raise ConfigError(f"{key} must be typed in one word with its value; type {key}={value}")
    if before and "/" in before[-1].partition("=")[2] and key not in advice.known_keys():
        whole = f"{before[-1]} {word}"
        raise ConfigError(f"{word} must be KEY=VALUE, or stand in quotes with the word before; type '{whole}'")
    raise ConfigError(advice.loose_word(word))


def _of_hydra(key: str) -> None:
    """Refuse an option that Hydra does not have; with a plus it would take it, and do nothing with it."""
    from hydra.conf import HydraConf

    if key.split(".")[1].partition("@")[0] not in {own.name for own in dataclasses.fields(HydraConf)}:
        raise ConfigError(advice.unknown_key(key))


def _list(key: str, value: str) -> None:
    """Refuse a sweep over equal values, and a list where one name is needed."""
    if value.startswith("["):
        names = parts(value[1:].removesuffix("]"))
        if key in advice.groups() and names == [""]:
            instead = f"{key}=none" if "none" in advice.choices(key) else f"--help {key}"
            raise ConfigError(f"{key} must name what is chosen, got {value}; type {instead}")
        if key in advice.groups() and not advice.takes_list(key):
            joined = f"-m {key}={','.join(names)} to run each" if len(names) > 1 else f"{key}={names[0]}"
            raise ConfigError(f"{key} must be one name, got {value}; type {joined}")
        twice = key in advice.groups()
    else:
        names = parts(value)
        twice = len(names) > 1
    if twice and (double := next((name for name in names if names.count(name) > 1), None)):
        once = list(dict.fromkeys(names))
        instead = f"[{','.join(once)}]" if value.startswith("[") and len(once) > 1 else ",".join(once)
        sweep = "-m " if len(once) > 1 and not value.startswith("[") else ""
        raise ConfigError(f"{key} must have each value once, got {double} twice; type {sweep}{key}={instead}")


def _known(group: str, value: str) -> None:
    """Refuse a name that a group does not have, of a sweep's cells each, before anything is imported or run."""
    for name in parts(value.removeprefix("[").removesuffix("]")) if group in advice.groups() else ():
        if NAME.fullmatch(name) and name != "null" and yaml_file(group, name) is None:
            raise ConfigError(advice.unknown_choice(group, name) or f"{group}={name} is no choice here; type --help")
