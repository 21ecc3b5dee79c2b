"""What a user reads when something is wrong: one sentence for what they can mend, a traceback for what they cannot."""

import functools
import re
import traceback
from pathlib import Path
from typing import Any

from accordion_bench.options.checks import ConfigError, closest, kind_of, show
from accordion_bench.options.conf_dir import conf_dir


def explain(error: BaseException) -> str | None:
    """The sentence for an error that the user can act on, or None."""
    kind = type(error).__name__
    if isinstance(error, ConfigError) or kind in ("NonFinite", "ChildRefused"):
        return str(error)
    if kind == "InterpolationKeyError" and (found := re.search(r"'setup\.(\S+)'", str(error))):
        return (
            f"arm must stand beside an experiment that says its {found[1]}, got an arm alone; type "
            "+experiment=accordion/table1_resnet18 +arm=NAME, or another of docs/experiments.md"
        )
    if kind == "MissingConfigException":
        return _unknown_choice(error)
    frames = traceback.extract_tb(error.__traceback__)
    if frames and re.search(r"[/\\](hydra|omegaconf)[/\\]", frames[-1].filename):
        return _bad_override(error)
    return None


def _unknown_choice(error: BaseException) -> str:
    """`compressor=powersdg`: the name is unknown; list the choices."""
    missing = str(getattr(error, "missing_cfg_file", None) or "")
    group, _, name = missing.lstrip("/").rpartition("/")
    folder, _, inner = group.partition("/")
    if folder == "experiment":  # a part of others is no experiment
        files = sorted((conf_dir() / folder).rglob("*.yaml"))
        files = [file for file in files if re.search(r"^  experiment: ", file.read_text(), re.MULTILINE)]
        choices = [str(file.relative_to(conf_dir() / folder).with_suffix("")) for file in files]
        group, name = f"+{folder}", f"{inner}/{name}".lstrip("/")
    else:
        choices = sorted(file.stem for file in (conf_dir() / group).glob("*.yaml"))
    if not group or not choices:
        return _one_line(str(error))
    near = closest(name, choices)
    plain, group = group.lstrip("+"), "+arm" if group == "arm" else group
    return f"{plain} must be one of {', '.join(choices)}, got {name or 'nothing'}; type {group}={near}"


def _bad_override(error: BaseException) -> str:
    """An unknown key, or a line that does not parse."""
    cause = str(error.__cause__ or "")
    text = str(error)
    if override := getattr(error, "override", None):
        return f"{override} cannot be read: {text.splitlines()[0]}; type KEY=VALUE, and quote odd values: 'KEY=\"a,b\"'"
    if found := re.search(r"Config group override must be .* Got (\w+)", text):
        return f"a config group must be given by name, got {found[1]}; type GROUP=NAME, with GROUP one of {_groups()}"
    if found := re.search(r"Ambiguous value for argument '([^'=]+)=(.*?)'", text):
        key, values = found.groups()
        return f"{key} must be one value, got {values}; type -m {key}={values} to run each, or {key}=[{values}]"
    if found := re.search(r"Multiple values for (\S+?)\.|(\S+) appears more than once", text):
        group = found[1] or found[2]
        return f"{group} is chosen already, got +{group} too; type {group}=NAME without the plus"
    known = _known_keys()
    if found := re.search(r"Error merging override ([^=]+)=(.*)", text):
        key, value = found[1].lstrip("+~"), found[2]
        return f"{key} must be {kind_of(known.get(key))}, got {value}; type {key}={show(known.get(key))}"
    if found := re.search(r"Could not override '([^']+)'", text):
        full = re.search(r"full_key: (\S+)", cause)
        return _unknown_key(full[1] if full else found[1], known)
    if found := re.search(r"Could not delete from config. (.*)", text):
        return f"~ must be followed by an option that is there: {found[1].rstrip('.')}; type KEY=VALUE to change one"
    return _one_line(f"{text} {cause}") + "; type --help for all options"


def _unknown_key(key: str, known: dict[str, Any]) -> str:
    """`epocs=3`, or an option of a choice that is not made."""
    group, _, option = key.partition(".")
    holders = []
    for file in sorted((conf_dir() / group).glob("*.yaml")):
        if key in _keys_of(file):
            holders.append(file.stem)
    if holders and option:
        named = f"{group}={', '.join(holders)}"
        return f"{key} is an option of {named}, not of what is chosen here; type {group}={holders[-1]} {key}=..."
    return f"{key} is no option here; type {closest(key, list(known))}, or --help for all options"


def _one_line(text: str) -> str:
    return " ".join(re.sub(r"(object_type|reference_type)=\S+|See https?:\S+.*", "", text).split())


def _groups() -> str:
    return ", ".join(sorted(path.name for path in conf_dir().iterdir() if path.is_dir()))


def _known_keys() -> dict[str, Any]:
    """Every key of every YAML file, with its group in front, and its value."""
    known: dict[str, Any] = {path.name: None for path in conf_dir().iterdir() if path.is_dir()}
    for file in sorted(conf_dir().rglob("*.yaml")):
        known |= _keys_of(file)
    return known


@functools.cache
def _keys_of(file: Path) -> dict[str, Any]:
    import yaml

    keys: dict[str, Any] = {}

    def collect(node: object, prefix: str) -> None:
        if isinstance(node, dict):
            for name, value in node.items():
                if name not in ("_target_", "defaults", "hydra"):
                    keys[f"{prefix}{name}"] = value
                    collect(value, f"{prefix}{name}.")

    text = file.read_text()
    package = re.match(r"# @package (\S+)", text)
    prefix = package[1] if package else ".".join(file.relative_to(conf_dir()).parts[:-1])
    collect(yaml.safe_load(text), "" if prefix in ("", "_global_") else f"{prefix}.")
    return keys
