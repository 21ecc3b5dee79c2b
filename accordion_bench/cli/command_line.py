"""Checks of the command line: words that Hydra would misread or ignore, before it parses them, and unclear presets."""

import dataclasses
import itertools
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from accordion_bench.options import advice
from accordion_bench.options.checks import ConfigError, closest, for_hydra
from accordion_bench.options.conf_dir import add_conf_dir, yaml_file
from accordion_bench.options.override import key_of, parts, refuse_twice

# keys whose values are arbitrary names, or have units such as µs
FREE = re.compile(
    r"paths\.(data|runs)|label|note|resume|dataset\.(folder|file)|tracker\.(project|uri|experiment)|network\.\w*(latency|jitter|bandwidth)|comm\.interface"
)
TEXTS = ("label", "note")
PLAIN = re.compile(r"[A-Za-z0-9_./:@%+\\ -]*")
DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"))


def quoted(arguments: Sequence[str]) -> list[str]:
    """Quote free text for Hydra where necessary, such as folders with brackets or in any language.

    Values with commas are sweeps, except labels and notes. Quoted values do not change.
    """
    return [_quoted(word) for word in arguments]


def _quoted(word: str) -> str:
    key, equals, value = word.partition("=")
    if not equals or not value or not FREE.fullmatch(key_of(key)) or value[0] in "'\"":
        return word
    if key_of(key) in TEXTS:  # also 4 and true
        return word if value == "null" else f"{key}={for_hydra(value)}"
    if value[0] == "~" or "${" in value or "," in value or re.match(r"[a-z]+\(", value) or PLAIN.fullmatch(value):
        return word
    return f"{key}={for_hydra(value)}"


def refuse_strange(word: str) -> None:
    """Refuse a word with a non-ASCII character, which may be invisible or resemble another one."""
    key, _, value = word.partition("=")
    if FREE.fullmatch(key_of(key)):
        if value == "~" or value.startswith("~/"):
            raise ConfigError(f"{key} must be a folder written out, got {value}; type {key}=$HOME{value[1:]}")
        return
    strange = [letter for letter in word if ord(letter) > 126 and not "\udc80" <= letter <= "\udcff"]
    plain = _plain(word)
    of_a_flag = word.startswith("-") or not ("=" in plain or plain.startswith("-"))  # such as a folder
    if not strange or of_a_flag or "'" in value or '"' in value:
        return
    letter = strange[0]
    called = f"U+{ord(letter):04X}, {unicodedata.name(letter, 'without a name').lower()}"
    raise ConfigError(f"{_shown(word)} must be typed in ASCII, got {called}; type {_meant(plain)}")


def _plain(word: str) -> str:
    return unicodedata.normalize("NFKD", word.translate(DASHES)).encode("ascii", "ignore").decode()


def _shown(word: str) -> str:
    """Return the word with non-printable characters as escapes."""
    return "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in word)


def _meant(plain: str) -> str:
    """Return the ASCII word with the closest known key and choice."""
    if plain.startswith("-"):
        return f"--{plain.lstrip('-')}"
    key, equals, value = plain.partition("=")
    plus, name = key[: len(key) - len(key.lstrip("+~"))], key_of(key)
    name = closest(name, list(advice.known_keys()) if "." in name else advice.groups(), cutoff=0.8) or name
    if name in advice.groups():
        known = advice.experiments() if name == "experiment" else advice.choices(name)
        value = closest(value, known, cutoff=0.6) or value
    return f"{plus}{name}{equals}{value.strip()}"


NAME = re.compile(r"[\w./-]+")  # name of a choice; Hydra parses anything else
DRY_RUN, PRINT, SHOW = "--dry-run", "--print", "show"
OURS = (PRINT, DRY_RUN)
NOT_DRY = ("hydra/launcher=", "hydra.launcher.", "hydra.sweep.dir=")  # a dry run submits no jobs and writes no files

# Hydra's flags, in one spelling each, and whether a value follows
_ALONE = "--help --hydra-help --version --resolve --run --multirun --shell-completion --info"
_WITH_VALUE = "--cfg --package --config-path --config-name --config-dir --experimental-rerun"
FLAGS = {**dict.fromkeys(_ALONE.split(), False), **dict.fromkeys(_WITH_VALUE.split(), True)}
SHORT = ("-h", "-c", "-p", "-r", "-m", "-sc", "-cp", "-cn", "-cd", "-i")
OF_SHORT = {"-c": "--cfg", "-p": "--package", "-cp": "--config-path", "-cn": "--config-name", "-cd": "--config-dir"}


def refuse_unreadable(arguments: Sequence[str]) -> None:
    """Refuse the first word that Hydra would misread, ignore, or answer with its usage text."""
    refuse_bytes(arguments)
    for word in arguments:
        refuse_strange(word)
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
        if said := advice.option_of_chosen(key.lstrip("+"), value, _chosen(overrides, key.lstrip("+"))):
            raise ConfigError(said)
        _list(key.lstrip("+"), value)
        if not any(other.startswith("hydra.searchpath=") for other in overrides):
            _known(key.lstrip("+"), value)
        if key.lstrip("+~").startswith("hydra."):
            _of_hydra(key.lstrip("+~"), value, overrides)


def _chosen(overrides: Sequence[str], key: str) -> list[str]:
    """Return GROUP.NAME for each typed choice of the key's group, of all groups for a key without a dot.

    A choice that only some cells of a sweep have is left out.
    """
    group, dot, _ = key.partition(".")
    found = []
    for other, _, value in (word.lstrip("+").partition("=") for word in overrides):
        names = parts(value.removeprefix("[").removesuffix("]"))
        if other == group or not dot:
            found += [f"{other}.{name}" for name in names if value.startswith("[") or len(names) == 1]
    return found


def without_ours(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without this program's own flags."""
    return [word for word in arguments if word not in OURS]


def for_dry_run(arguments: Sequence[str], folder: str) -> list[str]:
    """Return Hydra's arguments for --dry-run and --print: cells run in this process, Hydra writes to `folder`."""
    kept = [word for word in without_ours(arguments) if not word.lstrip("+").startswith(NOT_DRY)]
    return [*kept, f"hydra.sweep.dir='{folder}'"]


def config_dirs(arguments: Sequence[str]) -> list[str]:
    """Return the folders of --config-dir in any of its spellings; a flag without a value is ignored."""
    found = []
    for word, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        own = [flag for flag in FLAGS if flag.startswith(name)] if name.startswith("--") else []
        if (OF_SHORT.get(name) == "--config-dir" or own == ["--config-dir"]) and (equals or following):
            found.append(value if equals else following)
    return found


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Hydra's flags with their values, and the other words; --info and its optional value are among these."""
    flags, words, rest = list[str](), list[str](), list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return flags, [*words, word, *rest]
        flag = _hydra_flag(word.partition("=")[0])
        if flag in (None, "--info", "-i"):
            words.append(word)
        else:
            flags.append(word)
            if FLAGS.get(OF_SHORT.get(flag, flag)) and "=" not in word and rest:
                flags.append(rest.pop(0))
    return flags, words


def _hydra_flag(name: str) -> str | None:
    """Return the flag that a word, or the beginning of a word, names; None if it is none or several."""
    own = [flag for flag in FLAGS if flag.startswith(name)] if name.startswith("--") else []
    return name if name in SHORT or name in FLAGS else own[0] if len(own) == 1 else None


def refuse_bytes(arguments: Sequence[str]) -> None:
    """Refuse words that are not valid UTF-8, which no YAML file can contain."""
    for word in arguments:
        if any("\udc80" <= letter <= "\udcff" for letter in word):
            shown = word.encode("utf-8", "backslashreplace").decode().replace("\\udc", "\\x")
            raise ConfigError(f"names must be text in UTF-8, got {shown}; type another folder, or rename this one")


def _flag(word: str, rest: list[str]) -> None:
    """Consume one of Hydra's flags with its value, and refuse any other flag."""
    name, equals, value = word.partition("=")
    key = name.lstrip("-")
    known = {*advice.known_keys(), *advice.PRESETS, *advice.OF_ADVICE}
    keys = [typed for typed in (key, key.replace("-", "_")) if typed in known]
    own = None if keys else _hydra_flag(name)
    if name in SHORT or name in FLAGS or own:
        flag = OF_SHORT.get(name, own or name)
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
    """Return an override `KEY=VALUE` or `~KEY`, and refuse a word without `=`."""
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


def _of_hydra(key: str, value: str, overrides: Sequence[str]) -> None:
    """Refuse an option of Hydra that does not exist, which Hydra would accept with a plus, or that has no effect."""
    from hydra.conf import HydraConf

    if key.split(".")[1].partition("@")[0] not in {own.name for own in dataclasses.fields(HydraConf)}:
        raise ConfigError(advice.unknown_key(key))
    used = ("hydra.output_subdir=", "hydra.job.chdir=")
    if key == "hydra.run.dir" and not any(word.startswith(used) for word in overrides):
        raise ConfigError(
            f"{key} has no effect, since a run writes into paths.runs, got {value}; type paths.runs={value}"
        )


def _list(key: str, value: str) -> None:
    """Refuse a sweep with equal values, and a list where a single name is required."""
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
    """Refuse an unknown choice of a group, also within a sweep, before anything is imported or run."""
    for name in parts(value.removeprefix("[").removesuffix("]")) if group in advice.groups() else ():
        if NAME.fullmatch(name) and name != "null" and yaml_file(group, name) is None:
            raise ConfigError(advice.unknown_choice(group, name) or f"{group}={name} is no choice here; type --help")


PARTS = ("faithful", "official")  # experiments that only change others
ARM = "+arm"


def refuse_unclear(overrides: Sequence[str], sweeper: Any, choices: Any) -> None:
    """Refuse two experiments at a time, and a single run of an experiment without an arm.

    Args:
        sweeper: Hydra's configuration of the sweep, including the experiment's.
        choices: chosen names by group.
    """
    typed = next((word.partition("=")[2] for word in overrides if word.lstrip("+").startswith("experiment=")), "")
    names = [name for name in typed.strip("[]'\"").split(",") if name]
    whole = [name for name in names if name.rpartition("/")[2] not in PARTS]
    if len(whole) > 1:
        raise ConfigError(
            f"experiment must be one, which {' or '.join(PARTS)} may change, got {' and '.join(whole)}; "
            f"type +experiment={whole[0]}"
        )
    arms = (sweeper.get("params") or {}).get(ARM)
    if typed and arms and "arm" not in choices:
        raise ConfigError(f"arm must be one of {arms} in a single run of {typed}, got none; type {ARM}=dense")
