"""Checks of the values of options, without importing torch, so that a typo is reported at once."""

import functools
import importlib.util
import shlex
from pathlib import Path
from typing import Any

from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused, show
from accordion_bench.options.conf_dir import options_of, yaml_file
from accordion_bench.options.instantiate import Config, check_value_kinds
from accordion_bench.run_config import GROUPS, LONGEST_LABEL, LONGEST_NOTE, SCALES, PathsConfig, RunConfig, is_label


def check_kinds(config: RunConfig) -> None:
    """Refuse values in config groups of another kind than the default; `refuse_wrong` checks the other options."""
    check_value_kinds(_groups(config), config.to_dict(), "")
    for name, node in config.adaptive.items():
        if not isinstance(node, dict):
            rule = "a policy's options"
            raise ConfigError(f"adaptive.{name} must be {rule}, got {checks.show(node)}; type adaptive={name}")


def _groups(config: RunConfig) -> Config:
    """Return the defaults of the chosen names. Classes outside the YAML files check their options themselves."""
    declared: Config = {}
    for group in GROUPS:
        names = config.choices.get(group, "").split(",")
        nodes = {name: _yaml(file) for name in names if (file := yaml_file(group, name))}
        nodes = {name: node for name, node in nodes.items() if "_target_" in node}
        one = next(iter(nodes.values())) if len(nodes) == 1 else {}  # several trackers check their options themselves
        declared[group] = nodes if group == "adaptive" else one
    return declared


@functools.cache
def _yaml(file: Path) -> Config:
    from omegaconf import OmegaConf

    return options_of(OmegaConf.to_container(OmegaConf.load(file), resolve=False))  # type: ignore


def refuse_wrong(config: RunConfig) -> None:
    """Refuse run-level values that break their declaration or are wrong regardless of other options."""
    config.check_options()
    if config.scale != "full" and "experiment" not in config.choices:
        raise ValueRefused("scale", "full without +experiment=NAME, which says what to shorten", config.scale, "full")
    checks.choice("scale", config.scale, SCALES)
    for key, longest in (("label", LONGEST_LABEL), ("note", LONGEST_NOTE)):
        if (given := getattr(config, key)) is not None and not is_label(given, longest):
            rule = f"text of 1 to {longest} printable characters in one line"
            raise ValueRefused(key, rule, *_line_of_text(key, given, longest))
    tags: Any = config.tags
    if tags is not None and not (isinstance(tags, list) and tags and all(map(is_label, tags))):
        fitting = [tag for tag in (tags if isinstance(tags, list) else [tags]) if is_label(tag)]
        rule = f"a list of words of 1 to {LONGEST_LABEL} printable characters, or {{null}}"
        raise ValueRefused("tags", rule, tags, fitting or None)
    for key, usual in vars(PathsConfig()).items():
        folder = getattr(config.paths, key)
        if not isinstance(folder, str) or not folder:
            raise ValueRefused(f"paths.{key}", "a folder", "''" if folder == "" else folder, usual)
    if config.checkpoint.safetensors and importlib.util.find_spec("safetensors") is None:
        raise ConfigError(
            "checkpoint.safetensors=true must find the package safetensors, got none; type pip install "
            "'accordion-bench[safetensors]', or checkpoint.safetensors=false"
        )
    _refuse_batches(config)
    names = config.choices.get("adaptive", "").split(",")
    if twice := next((name for name in names if names.count(name) > 1), None):
        once = list(dict.fromkeys(names))
        raise ConfigError(
            f"adaptive must name each policy once, got {twice} twice; type "
            f"adaptive={once[0] if len(once) == 1 else show(once)}"
        )


def _line_of_text(key: str, value: Any, longest: int) -> tuple[str, str]:
    """Return a wrong label or note as it is shown in the message, and the nearest valid one."""
    text = value if isinstance(value, str) else f"{'arm' if key == 'label' else key} {show(value)}"
    given = " ".join(text.split())
    printable = "".join(letter for letter in given if letter.isprintable())[:longest].strip()
    return repr(value), shlex.quote(printable or ("NAME" if key == "label" else "TEXT"))


def _refuse_batches(config: RunConfig) -> None:
    """Refuse a batch size that is neither a number nor a list of one number per worker."""
    given: Any = config.batch_size
    if not isinstance(given, list):
        checks.integer("batch_size", given, at_least=1, instead=32)
    elif not given:
        raise ValueRefused("batch_size", "a number, or a list of one for each worker", given, 32)
    elif not all(type(size) is int and size > 0 for size in given):
        fitting = [size if type(size) is int and size > 0 else 32 for size in given]
        rule = "a list of numbers of samples, at least 1"
        raise ValueRefused("batch_size", rule, given, fitting if fitting[1:] else fitting[0])
