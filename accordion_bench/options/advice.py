"""One sentence for errors that the user can fix, with suggestions for unknown names and keys from the YAML files."""

import functools
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accordion_bench.options.checks import ALIKE, ConfigError, ValueRefused, closest, kind_of, nearest, show
from accordion_bench.options.conf_dir import (
    NO_OPTIONS,
    conf_dir,
    conf_dirs,
    package_dir,
    plain,
    read_yaml,
    yaml_file,
    yaml_files,
)
from accordion_bench.options.override import parts
from accordion_bench.options.units import with_unit

OF_ADVICE = ("gpu", "compute_ms")  # keys of --dry-run and of accordion_bench.advise, not of a run
SEVERAL = ("tracker",)  # groups with several choices at once, which share the typed options
PRESETS = ("experiment", "arm", "search")  # groups that need a plus

ALIKE_NAMES = 0.5  # minimum similarity of two names of choices, which are short
FEW = 5  # maximum number of names that are all listed

# names of options in papers and other programs
_WORDS = {
    "period": "h tau local_steps inner_steps",
    "lr": "learning_rate",
    "weight_decay": "wd",
    "batch_size": "bs batch batchsize",
    "epochs": "epoch num_epochs max_epochs",
    "seed": "random_seed",
    "workers": "world_size num_workers",
    "processes": "gpus nproc_per_node",
    "data": "data_dir root",
    "runs": "output_dir save_dir",
    "warmup_epochs": "warmup",
    "clip_norm": "grad_clip",
    "density": "ratio sparsity",
    "bits": "num_bits",
    "error_feedback": "ef",
    "precision": "dtype amp",
    "model": "arch net",
    "dataset": "data_set",
    "compressor": "compression",
    "adaptive": "policy",
    "schedule": "scheduler lr_scheduler",
    "optimizer": "optim",
    "comm": "backend",
}
ALSO_CALLED = {word: option for option, words in _WORDS.items() for word in words.split()}


def unknown_choice(group: str, name: str) -> str | None:
    """Explain an unknown name such as `compressor=powersdg`, with similar names; None if the group has no choices."""
    group, name = group.strip("/"), name.strip("/")
    folder, _, inner = group.partition("/")
    if folder == "experiment":
        return _unknown_experiment(f"{inner}/{name}".lstrip("/"))
    known = choices(group)
    if not known:
        return None
    shown = name or "nothing"
    if found := _elsewhere(group, name):
        return f"{group} must be one of its own names, got {shown}, which is another group's; type {found}"
    plus = "+" if group in PRESETS else ""
    if near := _of_class(group, name) or closest(name, known, cutoff=ALIKE_NAMES):
        return f"{group} must be a known name, got {shown}; type {plus}{group}={near} ({_listed(name, known)})"
    if len(known) <= FEW:
        return f"{group} must be one of {', '.join(known)}, got {shown}; type {plus}{group}={known[0]}"
    return f"{group} must be a known name, got {shown}; type --help {group} for all {len(known)}"


def _unknown_experiment(name: str) -> str:
    whole = experiments()
    said = f"experiment must be a known name, got {name or 'nothing'}"
    if near := closest(name, whole, cutoff=ALIKE_NAMES):
        return f"{said}; type +experiment={near} ({_listed(name, whole)}; docs/experiments.md describes them)"
    return f"{said}; type --help experiment for all {len(whole)}"


def several_in_one(key: str, value: str) -> str | None:
    """Explain a word with several overrides, `compressor=powersgd, adaptive=accordion`; None for other words."""
    rest = re.split(r",\s*(?=[+~]*[\w./]+=)", value)
    others = [re.match(r"[+~]*([\w./]+)=", part) for part in rest[1:]]
    if not others or not all(other and other[1] in known_keys() for other in others):
        return None
    return f"{key} must be a separate word, got {key}={value}; type {key}={' '.join(rest)}"


def choice_inside(key: str, value: str) -> str | None:
    """Explain `compressor.powersgd.rank=4` and the Python form `compressor={powersgd:{rank:4}}`; None for others."""
    group, _, inside = key.lstrip("+").partition(".")
    if group not in groups() or group in PRESETS or takes_list(group):
        return None
    name, _, option = inside.partition(".")
    typed = {option: value} if option else {}
    if not inside and (found := re.fullmatch(r"\{\s*(\w+)\s*:\s*\{(.*)\}\s*\}", value)):
        name = found[1]
        pairs = (one.partition(":") for one in parts(found[2]) if one)
        typed = {option.strip(): value.strip() for option, _, value in pairs}
    if name not in choices(group) or f"{group}.{name}" in known_keys():
        return None
    words = [f"{group}={name}", *(f"{group}.{option}={value}" for option, value in typed.items())]
    return f"{group}={name} and its options must be typed separately, got {key}={value}; type {' '.join(words)}"


def option_of_chosen(key: str, value: str, chosen: Sequence[str]) -> str | None:
    """Explain `adaptive.interval=1` or `interval=1` if a chosen policy has this option; None for other keys.

    Args:
        chosen: typed choices, as GROUP.NAME.
    """
    if key in known_keys():
        return None
    option = key.rpartition(".")[2]
    owned = [name for name in (f"{choice}.{option}" for choice in chosen) if name in known_keys()]
    if not owned:
        return None
    return f"{key} is called {' and '.join(owned)} here; type {' '.join(f'{name}={value}' for name in owned)}"


def unknown_key(key: str, value: str = "...") -> str:
    """Explain an unknown key: `epocs=3`, `rank=4`, `sync.h=4`, or an option of a choice that is not selected."""
    value = value or "..."
    if key.startswith("hydra."):
        return f"{key} is no option of Hydra; type --hydra-help for all of them"
    if key in PRESETS:
        return without_plus(key, value)
    if key in OF_ADVICE:
        return (
            f"{key} must stand beside --dry-run, or behind python -m accordion_bench.advise, got a run, which computes "
            f"on what is here; type --dry-run {key}={value}"
        )
    known, group = known_keys(), key.partition(".")[0]
    if holders := choices_with_option(key):
        chosen = f"type {group}={holders[-1]} {key}={value} (an option of {_choices_shown(group, holders)})"
        return f"{key} is no option of what is chosen here; {chosen}"
    if meant := _meant(key, known):
        group, holders = meant.partition(".")[0], choices_with_option(meant)
        own = f" (an option of {_choices_shown(group, holders)})" if holders not in ([], choices(group)) else ""
        return f"{key} is called {meant} here; type {meant}={value}{own}"
    near = closest(key, list(known), cutoff=ALIKE)
    return f"{key} is no option here; type {f'{near}={value}, or ' if near else ''}--help all for every option"


def without_plus(group: str, name: str) -> str:
    """Explain a group that is not in the defaults list and lacks its plus: `experiment=smoke`."""
    known = experiments() if group == "experiment" else choices(group)
    near = name if name in known or name.startswith("[") or "," in name else closest(name, known)
    return f"{group} must be added with a plus, got {group}={name}; type +{group}={near}"


def loose_word(word: str) -> str:
    """Explain a word without `=`, with the key or choice that it may stand for."""
    if word in ("help", "version"):
        return f"{word} must be typed with dashes, got {word}; type --{word}"
    if (package_dir() / word / "__main__.py").is_file():
        return f"{word} is a program of its own; type python -m accordion_bench.{word} --help"
    if "=" in word.replace(":", "=") and (key := word.replace(":", "=", 1).partition("=")[0]) in known_keys():
        return f"{word} must be typed with =; type {word.replace(':', '=', 1)}"
    if found := _elsewhere("", word):
        return f"{word} must be typed as GROUP=NAME; type {found}"
    key = word if word in known_keys() else _meant(word, known_keys())
    return f"{word} must be typed as KEY=VALUE; type {f'{key}=VALUE' if key else '--help all for every option'}"


def choices(group: str) -> list[str]:
    """Return the names of a config group."""
    return list(yaml_files(group))


def groups() -> list[str]:
    """Return the config groups, in the order of the defaults list, then the others."""
    listed = [next(iter(item)) for item in read_yaml(conf_dir() / "config.yaml")["defaults"] if isinstance(item, dict)]
    found = {path.name for folder in conf_dirs() for path in folder.iterdir() if path.is_dir()}
    return [name for name in listed if name in found] + sorted(found - set(listed))


@functools.cache
def experiments() -> list[str]:
    """Return the names of complete experiments, without files that are only parts of others."""
    found = [
        (folder / "experiment", file) for folder in conf_dirs() for file in (folder / "experiment").rglob("*.yaml")
    ]
    whole = [pair for pair in found if re.search(r"^  experiment: ", pair[1].read_text(encoding="utf-8"), re.M)]
    return sorted(str(file.relative_to(folder).with_suffix("")) for folder, file in whole)


@functools.cache
def known_keys() -> dict[str, Any]:
    """Return all groups, run-level keys and options of choices (`group.option`), with their value in some YAML file."""
    known: dict[str, Any] = dict(keys_of(conf_dir() / "config.yaml"))
    for group in groups():
        known.setdefault(group, None)
        if group not in PRESETS:
            for file in yaml_files(group).values():
                known |= {key: value for key, value in keys_of(file).items() if key not in known}
    return known


def default_of(key: str, chosen: Mapping[str, str]) -> Any:
    """Return the default of an option in the selected choice (`chosen`, by group), else in another one, or None."""
    group = key.partition(".")[0]
    file = yaml_file(group, str(chosen[group])) if group in chosen else None
    own = keys_of(file) if file else {}
    return own[key] if key in own else known_keys().get(key)


@functools.cache
def keys_of(file: Path) -> dict[str, Any]:
    """Return the keys of a YAML file as they are typed, with their values."""
    keys: dict[str, Any] = {}

    def collect(node: object, prefix: str) -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                if name not in ("_target_", "hydra", *NO_OPTIONS):
                    keys[f"{prefix}{name}"] = plain(value)
                    collect(value, f"{prefix}{name}.")

    content = read_yaml(file)
    package = re.match(r"# @package (\S+)", file.read_text(encoding="utf-8"))
    inside = next(file.relative_to(folder) for folder in conf_dirs() if file.is_relative_to(folder))
    prefix = package[1] if package else ".".join(inside.parts[:-1])
    collect(content, "" if prefix in ("", "_global_") else f"{prefix}.")
    return keys


def takes_list(key: str) -> bool:
    """Whether a list may be typed: for a list option, or a group that accepts several choices."""
    if key not in groups():
        return isinstance(known_keys().get(key), list)
    own = any(re.match(rf"# @package {key}\.", file.read_text(encoding="utf-8")) for file in yaml_files(key).values())
    return own or key in (*PRESETS, *SEVERAL)


def choices_with_option(key: str) -> list[str]:
    """Return the choices of a group that have this option."""
    group, _, option = key.partition(".")
    files = yaml_files(group).values() if option and group not in PRESETS else []
    return [file.stem for file in files if key in keys_of(file)]


def _meant(key: str, known: dict[str, Any]) -> str:
    """Return the option whose last part, or a synonym of it, was typed; "" = none."""
    group, _, _ = key.rpartition(".")
    last = key.rpartition(".")[2].lower().replace("-", "_")
    for word in (last, ALSO_CALLED.get(last)):
        fitting = [name for name in known if name.rpartition(".")[2] == word]
        here = [name for name in fitting if name.startswith(f"{group}.")] if group in groups() else fitting
        if here or fitting:
            return (here or fitting)[0]
    return ""


def _elsewhere(group: str, name: str) -> str:
    """Return `adaptive=accordion` for the name `accordion` in another group; "" if no group has it."""
    for other in groups():
        if other != group and other not in PRESETS and name in choices(other):
            return f"{other}={name}"
    return ""


def _of_class(group: str, name: str) -> str:
    """Return the choice whose class has this name, such as `none` for Dense; "" if there is not exactly one."""
    targets = {choice: str(read_yaml(file).get("_target_")) for choice, file in yaml_files(group).items()}
    named = [choice for choice, path in targets.items() if path.rpartition(".")[2].lower() == name.lower()]
    return named[0] if len(named) == 1 else ""


def _choices_shown(group: str, names: Sequence[str]) -> str:
    """Format as `compressor=atomo, powersgd`."""
    near = nearest(names[-1], names)
    return f"{group}={', '.join(near)}{', ...' if len(near) < len(names) else ''}"


def _listed(name: str, known: Sequence[str]) -> str:
    """List all names, or the five most similar ones."""
    near = nearest(name, known)
    if len(near) == len(known):
        return f"there are {', '.join(known)}"
    return f"nearest of {len(known)}: {', '.join(near)}"


# messages of Python, C++, torch and CUDA when a resource is exhausted; lower case
OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "out of memory", "unable to allocate")
OF_THREADS = ("can't start new thread", "thread creation failed", "resource temporarily unavailable")


def explain(error: BaseException) -> str | None:
    """Return the sentence for an error that the user can fix, otherwise None."""
    kind = type(error).__name__
    if isinstance(error, ConfigError) or kind in ("NonFinite", "ChildRefused"):
        return str(error)
    if kind == "InterpolationKeyError" and (found := re.search(r"'setup\.(\S+)'", str(error))):
        return (
            f"arm must be typed with an experiment that defines its {found[1]}, got an arm alone; type "
            "+experiment=accordion/table1_resnet18 +arm=NAME, or another of docs/experiments.md"
        )
    if (sentence := _exhausted(error)) is not None:
        return sentence
    if found := re.search(r"(\S+) does not have a deterministic implementation", str(error)):
        rule = f"false where torch has no other kernel for {found[1]}, which this model or method needs here"
        return str(ValueRefused("deterministic", rule, True, False))
    if "interpolation" in f"{kind} {error}".lower() and (found := re.search(r"full_key: (\S+)", str(error))):
        return _no_interpolation(str(error), found[1], getattr(error, "choices", {}))
    if kind == "MissingConfigException":
        return _unknown_choice(error)
    if any(re.search(r"[/\\](hydra|omegaconf)[/\\]", file) for file in _files(error)[-1:]):
        return _bad_override(error)
    return None


def _no_interpolation(text: str, key: str, choices: Mapping[str, str]) -> str:
    """Explain an invalid interpolation such as `seed=${nope}`."""
    value = default_of(key, choices)
    default = with_unit(key, value) or show(value)
    instead = f"{key}={default}" if "$" not in default else f"{key}=VALUE"
    why = " ".join(text.partition("full_key:")[0].split()).rstrip(":")
    if found := re.search(r"Interpolation key '([^']+)' not found", text):
        why = f"there is no option {found[1]}"
    elif found := re.search(r"Environment variable '([^']+)' not found", text):
        why = f"no environment variable {found[1]} is set"
    elif "Recursive interpolation" in text:
        why = "the options refer to each other in a circle"
    elif found := re.search(r"Unsupported interpolation type (\S+)", text):
        why = f"there is no function {found[1]}"
    rule = "a value, or ${OPTION} for that of another option"
    return f"{key} must be {rule}, got an invalid one: {why}; type {instead}"


def _exhausted(error: BaseException) -> str | None:
    """Explain an error caused by a lack of memory, threads or processes; None for other errors."""
    said = re.sub(r"^\[enforce fail at \S+\] err == 0\. ", "", " ".join(str(error).split()))
    first = (said if len(said) <= 160 else f"{said[:157]}...") or type(error).__name__

    def says(phrases: tuple[str, ...]) -> bool:
        return any(words in said.lower() for words in phrases)

    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError | OSError) and says(OF_MEMORY)):
        return (
            f"memory must hold the model, and a batch of every worker of a process, which ran out ({first}); type "
            "micro_batch_size=N for the same batch in parts, a smaller batch_size, or fewer workers in a process "
            "(comm.workers_per_process)"
        )
    starting = any(re.search(r"[/\\](multiprocessing|subprocess|threading)", file) for file in _files(error))
    if says(OF_THREADS) and (isinstance(error, RuntimeError) or (isinstance(error, OSError) and starting)):
        return (
            f"the machine must let a process start another thread or process, got no more of them ({first}); type "
            "threads=1, fewer comm.processes, or ulimit -u NUMBER for a higher limit"
        )
    return None


def _files(error: BaseException) -> list[str]:
    """Return the files in an error's traceback; the last one raised it."""
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def _unknown_choice(error: BaseException) -> str:
    missing = str(getattr(error, "missing_cfg_file", None) or "")
    group, _, name = missing.lstrip("/").rpartition("/")
    return (group and unknown_choice(group, name)) or _one_line(str(error))


def _bad_override(error: BaseException) -> str:
    """Explain an unknown key, or an override that cannot be parsed."""
    cause = str(error.__cause__ or "")
    text = str(error)
    if override := getattr(error, "override", None):
        key, equals, value = override.partition("=")
        if key and equals and value and value[0] not in "[{\"'":
            return (
                f"{override} cannot be read, because its value contains a special character; type '{key}=\"{value}\"'"
            )
        return f"{override} cannot be read: {text.splitlines()[0]}; type KEY=VALUE, and quote odd values: 'KEY=\"a,b\"'"
    if found := re.search(r"Config group override must be .* Got (\w+)", text):
        names = ", ".join(groups())
        return f"a config group must be given by name, got {found[1]}; type GROUP=NAME, with GROUP one of {names}"
    if found := re.search(r"Ambiguous value for argument '([^'=]+)=(.*?)'", text):
        key, values = found.groups()
        as_one = f", or {key}=[{values}]" if takes_list(key) else ""
        if isinstance(known_keys().get(key), str):
            as_one = f", or '{key}=\"{values}\"' for one"
        return f"{key} must be one value, got {values}; type -m {key}={values} to run each{as_one}"
    if found := re.search(r"Multiple values for (\S+?)\.|(\S+) appears more than once", text):
        group = found[1] or found[2]
        return f"{group} is chosen already, got +{group} too; type {group}=NAME without the plus"
    known = known_keys()
    if found := re.search(r"Error merging override ([^=]+)=(.*)", text):
        key, value = found[1].lstrip("+~"), found[2]
        return f"{key} must be {kind_of(known.get(key))}, got {value}; type {key}={show(known.get(key))}"
    if found := re.search(r"Could not override '([^']+)'", text):
        full = re.search(r"full_key: (\S+)", cause)
        value = re.search(r"use \+[^\s=]+=(.*)", text)
        # if the choice of a known option is missing, Hydra names only the first part of the option
        missing = found[1] if full is None or found[1] in known else full[1]
        return unknown_key(missing, value[1] if value else "...")
    if found := re.search(r"Could not delete from config. (.*)", text):
        return f"~ must be followed by an existing option: {found[1].rstrip('.')}; type KEY=VALUE to change one"
    return _one_line(f"{text} {cause}") + "; type --help all for every option"


def _one_line(text: str) -> str:
    return " ".join(re.sub(r"(object_type|reference_type)=\S+|See https?:\S+.*", "", text).split())
