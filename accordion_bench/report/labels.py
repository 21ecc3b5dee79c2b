"""Names of arms as tables and figures show them, from a run's configuration alone."""

import importlib
from typing import Any

Config = dict[str, Any]

KNOBS = ("rank", "density", "bits")


def label(config: Config) -> str:
    """`dense`, `PowerSGD rank 2`, `TopK 10 %`, `fp16`, `Accordion (PowerSGD rank 2/1)`; others by name and knob."""
    node, choices = config.get("compressor") or {}, config.get("choices") or {}
    policies = config.get("adaptive") or {}
    knob, name = knob_of(node), _name(node, choices.get("compressor", "?"))
    levels = pair_of(config) or ([node[knob]] if knob else None)
    text = f"{name} {show_level(knob, *levels)}" if levels else name
    if policies:
        text = f"{' + '.join(_name(policy, key) for key, policy in policies.items())} ({text})"
    sync = choices.get("sync", "every_step")
    return text if sync == "every_step" else f"{text}, {sync}"


def is_dense(config: Config) -> bool:
    """Whether this is the baseline: an fp32 all-reduce in every step, nothing adaptive."""
    return label(config) == "dense"


def knob_of(node: Config) -> str:
    """The option that policies may steer; "" where there is none."""
    declared = getattr(_class(node), "knob", None)
    knob = declared or next((knob for knob in KNOBS if knob in node), "")
    return knob if node.get(knob) is not None else ""


def show_level(knob: str, *values: float) -> str:
    """`rank 2`, `10 %`, `4 bits`; several values weak to strong: `rank 2/1`."""
    if knob == "density":
        return "/".join(f"{100 * value:g}" for value in values) + " %"
    text = "/".join(f"{value:g}" if isinstance(value, int | float) else str(value) for value in values)
    return f"{text} bits" if knob == "bits" else f"{knob} {text}"


def pair_of(config: Config) -> list[float] | None:
    """[weak, strong] of the first policy that moves between two levels; null means the compressor's own pair."""
    own_strong, own_weak = getattr(_class(config.get("compressor") or {}), "pair", (None, None))
    for policy in (config.get("adaptive") or {}).values():
        if {"weak", "strong"} <= policy.keys():
            weak, strong = policy["weak"], policy["strong"]
            weak, strong = own_weak if weak is None else weak, own_strong if strong is None else strong
            return None if weak is None or strong is None else [weak, strong]
    return None


def _name(node: Config, choice: str) -> str:
    """The class's spelling where the class is the choice (PowerSGD, TopK), else the choice (fp16)."""
    spelled = str(node.get("_target_", "")).rpartition(".")[2]
    if choice == "none":
        return "dense"
    return spelled if spelled.lower() == choice.replace("_", "") else choice


def _class(node: Config) -> Any:
    """The class that `_target_` names, or None where this version no longer has it."""
    module, _, name = str(node.get("_target_", "")).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None
