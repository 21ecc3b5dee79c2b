"""Methods that the advice compares: all those with a YAML file, at the levels that their class recommends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accordion_bench.advising.predict import BF16, FP32
from accordion_bench.advising.rehearsal import NOTHING, Beside
from accordion_bench.attaching.chosen_options import choose
from accordion_bench.compressors.traits import declared_by
from accordion_bench.methods.compatibility import MethodOptions
from accordion_bench.methods.labels import label
from accordion_bench.options import checks
from accordion_bench.options.checks import show
from accordion_bench.options.conf_dir import read_options, read_yaml, yaml_file, yaml_files
from accordion_bench.options.instantiate import Config, target

FIRST: dict[tuple[str, ...], int] = {FP32: 0, BF16: 1}  # baselines
SYNCHRONOUS = "every_step"


@dataclass(frozen=True)
class AdvisedArm:
    """One method at one setting.

    Args:
        name: label, as in reports.
        overrides: command-line overrides that select it.
        chosen: options of compressor, scheme and optimizer.
        beside: clipping and norms of the step.
    """

    name: str
    overrides: tuple[str, ...]
    chosen: MethodOptions
    beside: Beside = NOTHING


def considered(optimizer: Config | None = None) -> list[AdvisedArm]:
    """Return every compressor at its default and advised levels, then every local scheme without compression.

    Args:
        optimizer: configuration node of the optimizer; None = SGD with momentum, as `optimizer=sgd`.
    """
    arms = [arm for name in yaml_files("compressor") for arm in at_levels(name, optimizer)]
    arms += [arm_of(sync=name, optimizer=optimizer) for name in yaml_files("sync") if _is_local(name)]
    return sorted(arms, key=lambda arm: FIRST.get(arm.overrides, len(FIRST)))


def _is_local(sync: str) -> bool:
    """Whether a scheme takes local or asynchronous steps. Schemes of synchronous steps save no communication."""
    cls = target(_options("sync", sync), "sync")
    return bool(cls.local or not cls.waits)


def at_levels(name: str, optimizer: Config | None = None) -> list[AdvisedArm]:
    """Return one compressor at its configured level and at its advised levels."""
    node = _options("compressor", name)
    cls = target(node, "compressor")
    traits = declared_by(cls)
    knob = traits.knob if traits else None
    advised = cls.description.advised_levels if traits else ()
    levels = [{knob: value} for value in advised if knob and value != node.get(knob)]
    return [arm_of(name, options=options, optimizer=optimizer) for options in ({}, *levels)]


def arm_of(
    compressor: str = "none",
    sync: str = SYNCHRONOUS,
    options: Mapping[str, Any] | None = None,
    optimizer: Config | None = None,
) -> AdvisedArm:
    """Return one method by name.

    Args:
        compressor, sync: names of YAML files.
        options: options of the compressor that differ from the defaults.
        optimizer: as for `considered`.

    Raises:
        ConfigError: a name or an option is unknown.
    """
    given = dict(options or {})
    once = {"period": 1} if _options("sync", sync).get("period") is not None else {}
    beside = _optimizer_beside(compressor, sync)
    base = _brought(_options("optimizer", "sgd") if optimizer is None else optimizer, compressor, sync)
    other = _options("optimizer", beside) if beside else base
    chooses = _class_name(other) != _class_name(base)
    base = other if chooses else base
    chosen = choose({compressor: given}, None, {sync: once}, base, {}, ())
    needed = _needed(chosen)
    typed = [f"sync={sync}"] if sync != SYNCHRONOUS else []
    typed += [f"compressor={compressor}"] if compressor != "none" or not typed else []
    typed += [f"compressor.{key}={show(value)}" for key, value in given.items()]
    typed += [f"optimizer={beside}"] if chooses else []
    typed += [f"optimizer.{key}={show(value)}" for key, value in needed.items()]
    scheme = {key: value for key, value in chosen.sync.items() if key not in ("period", "groups")}  # periods are swept
    spelled = {"compressor": chosen.compressor, "sync": scheme, "choices": {"compressor": compressor, "sync": sync}}
    return AdvisedArm(label(spelled), tuple(typed), replace(chosen, optimizer={**base, **needed}))


def _options(group: str, name: str) -> Config:
    """Return all options of a choice with their defaults; empty for an unknown name, which `choose` refuses."""
    file = yaml_file(group, name)
    return read_options(file) if file else {}


def _needed(chosen: MethodOptions) -> Config:
    """Return the options of the optimizer that the chosen methods require to change."""
    wanted: Config = {}
    for group, node in (("sync", chosen.sync), ("compressor", chosen.compressor)):
        own = target(node, group).description.requires.get("optimizer", {})
        wanted |= {} if isinstance(own, str) else own
    return {key: value for key, value in wanted.items() if chosen.optimizer.get(key, value) != value}


def _class_name(node: Config) -> str:
    return str(node.get("_target_")).rpartition(".")[2]


def _optimizer_beside(compressor: str, sync: str) -> str:
    """Return the name of the optimizer that one of the choices requires; "" = none."""
    nodes = {group: _options(group, name) for group, name in (("sync", sync), ("compressor", compressor))}
    wanted = [target(node, group).description.requires.get("optimizer") for group, node in nodes.items() if node]
    return next((name for name in wanted if isinstance(name, str)), "")


def _brought(optimizer: Config, compressor: str, sync: str) -> Config:
    """Return the optimizer's options with those that the YAML files of the choices set (`brings`)."""
    found = dict(optimizer)
    for group, name in (("sync", sync), ("compressor", compressor)):
        file = yaml_file(group, name)
        own = (read_yaml(file).get("brings") or {}).get("optimizer", {}) if file else {}
        found |= {key: value for key, value in own.items() if key in found}
    if found.get("momentum") == 0 and "nesterov" in found:
        found["nesterov"] = False
    return found


def chosen_arms(
    names: Sequence[str], optimizer: Config | None = None, key: str = "--methods", beside: Beside = NOTHING
) -> list[AdvisedArm]:
    """Return the baselines and every setting of the methods with these names; no names = all methods.

    Args:
        names: names in conf/compressor and conf/sync, or comma-separated lists of them.
        optimizer: configuration node of the optimizer; None = SGD with momentum.
        key: name of the option or argument, for messages.
        beside: clipping and norms of the step.

    Raises:
        ValueRefused: a name is unknown.
    """
    arms = considered(optimizer)
    known = list(dict.fromkeys(name_of(arm) for arm in arms))
    wanted = [word for name in names for word in name.split(",") if word]
    for name in wanted:
        checks.choice(key, name, known)
    return [
        replace(arm, beside=beside) for arm in arms if not wanted or arm.overrides in FIRST or name_of(arm) in wanted
    ]


def name_of(arm: AdvisedArm) -> str:
    """Return the name of the method's scheme, or of its compressor if the steps are synchronous."""
    return arm.overrides[0].partition("=")[2]
