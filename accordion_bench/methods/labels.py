"""Names of arms as tables and figures show them, from their options and what the classes that these name declare.

A class that is not trusted (`options.instantiate`) is a name and nothing more: its import would run a stranger's code.
Classes compute with torch, so that to import one takes half a gigabyte of memory: what they declare is plain data.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from accordion_bench.compressors.traits import Traits, declared_by
from accordion_bench.options.checks import show
from accordion_bench.options.component import Description
from accordion_bench.options.instantiate import Config, is_trusted, target
from accordion_bench.options.presets import preset_of


class Declared(NamedTuple):
    """What a class declares.

    display_names: how reports write its choices.
    shares: how they write options of a scheme that are shares.
    drives: what a policy steers.
    detects: whether a policy tells critical epochs from others.
    traits: of a compressor; None of others.
    label_suffix: what reports say of its options behind name and level; None where these are too strange.
    """

    display_names: Mapping[str, str]
    shares: Mapping[str, str]
    drives: str
    detects: bool
    traits: Traits | None
    label_suffix: str | None


def declared_of_class(node: Config) -> Declared | None:
    """What the class of a config node declares; None where this version no longer has it."""
    try:
        cls = target(node, "")
    except ValueError:  # its sentence says why
        return None
    own: Description = getattr(cls, "description", Description())
    try:
        suffix: str | None = own.label_suffix(node)
    except Exception:  # options of whatever kind, of a user's run
        suffix = None
    drives, detects = getattr(cls, "drives", "level"), getattr(cls, "detects", False)
    return Declared(own.display_names, own.shares, drives, detects, declared_by(cls), suffix)


# reports that are served have another process look at classes
look: Callable[[Config], Declared | None] = declared_of_class


def declared(node: Config) -> Declared | None:
    """What the class declares that `_target_` names; None where it is not trusted, or this version no longer has it."""
    return look(node) if is_trusted(node.get("_target_")) else None


FORMS = {"ef21": "EF21", "loco": "LoCo"}  # of error feedback
KNOBS = ("rank", "density", "bits")


def label(config: Config) -> str:
    """`dense`, `PowerSGD rank 2`, `TopK 10 %`, `fp16`, `Accordion (PowerSGD rank 2/1)`; others by name and knob.

    Third-party hooks by the function's name: `DDP, bf16_compress_hook`.
    Another form of error feedback: `TopK 10 %, EF21`, `TopK 10 %, 8-bit residual`.

    Local methods by name and period: `local SGD, H 8`, `DiLoCo, H 30, TopK 10 %`, `AccordionSync (local SGD, H 2/16)`.
    """
    node, choices = config.get("compressor") or {}, config.get("choices") or {}
    choice, beside = preset_of("compressor", choices.get("compressor", "?"), node)
    knob, name = knob_of(node), _name(node, choice)
    levels = levels_of(config, knob) if knob else []
    text = f"{name} {show_level(knob, *levels)}" if levels else name
    text += _suffix(name, declared(node))
    feedback = node.get("error_feedback")
    named = isinstance(feedback, str) and feedback in FORMS
    text += f", {FORMS[str(feedback)]}" if named else ""
    text += ", 8-bit residual" if node.get("residual_bits") == 8 and feedback is True else ""
    text += _in_brackets(beside, (*KNOBS, *(["error_feedback"] if named else [])))
    if hook := hook_of(config):
        text = f"DDP, {hook}"
    if scheme := scheme_of(config):
        text = scheme if text == "dense" else f"{scheme}, {text}"
        text += ", 1 worker" if config.get("workers") == 1 else ""  # the control of an outer optimizer
    if policies := policies_of(config):
        text = f"{' + '.join(_policy(key, policy) for key, policy in policies.items())} ({text})"
    return text


def _policy(key: str, node: Config) -> str:
    """`Accordion`, `ALQ`."""
    choice, beside = preset_of("adaptive", key, node)
    return _name(node, choice) + _in_brackets(beside)


def hook_of(config: Config) -> str:
    """The name of the third-party hook that has exchanged the gradients, never imported; "" = ours counted."""
    hook = (config.get("comm") or {}).get("hook")
    return str(hook).rpartition(":")[2] if hook is not None else ""


def policies_of(config: Config) -> dict[str, Config]:
    """The policies that decide something: a preset is another word for its scheme."""
    policies = config.get("adaptive") or {}
    return {key: node for key, node in policies.items() if drives(node)}


def scheme_of(config: Config) -> str:
    """`local SGD, H 8`, `DiLoCo, H 30, SPARTA 0.5 %`; "" where every step exchanges.

    A policy's two periods as H 2/16; other policies' have none.
    """
    choice, node = (config.get("choices") or {}).get("sync", "every_step"), config.get("sync") or {}
    if choice == "every_step":
        return ""
    driven = any(drives(policy) == "period" for policy in policies_of(config).values())
    own = [period for period, _ in node["groups"]] if node.get("groups") else [node.get("period")]
    periods = pair_of(config, "period") or ([] if driven or own == [None] else own)
    choice, beside = preset_of("sync", choice, node)
    scheme = declared(node)
    shares = scheme.shares if scheme else {}
    name = _name(node, choice)
    name += _suffix(name, scheme) + _in_brackets(beside, ("period", "groups", *shares))
    said = [name, *([f"H {'/'.join(f'{period:g}' for period in periods)}"] if periods else [])]
    for key in [key for key in shares if node.get(key) is not None]:
        share = f"{shares[key]} {show_level('density', node[key])}"
        said = [share] if name == shares[key] else [*said, share]
    return ", ".join(said)


def _suffix(name: str, own: Declared | None) -> str:
    """What a class says of its options behind its name.

    Raises:
        ValueError: they are too strange.
    """
    if own is None:
        return ""
    if own.label_suffix is None:
        raise ValueError(f"options of {name} cannot be understood")
    return own.label_suffix


def _in_brackets(options: Config, elsewhere: Collection[str] = ()) -> str:
    """` (dtype=float16)`: what no name tells, and nothing told elsewhere; "" of nothing."""
    told = ", ".join(f"{key}={show(value)}" for key, value in options.items() if key not in elsewhere)
    return f" ({told})" if told else ""


def drives(policy: Config) -> str:
    """What a policy steers; levels, where this version no longer has it."""
    own = declared(policy)
    return own.drives if own else "level"


def detects(policy: Config) -> bool:
    """Whether a policy tells critical epochs from others."""
    own = declared(policy)
    return own.detects if own else False


def is_dense(config: Config) -> bool:
    """Whether this is the baseline: an fp32 all-reduce in every step, nothing adaptive."""
    return label(config) == "dense"


def knob_of(node: Config) -> str:
    """The option that policies may steer; "" where there is none."""
    traits = _traits(node)
    knob = (traits.knob if traits else None) or next((knob for knob in KNOBS if knob in node), "")
    return knob if node.get(knob) is not None else ""


def show_level(knob: str, *values: float) -> str:
    """`rank 2`, `10 %`, `4 bits`; several values weak to strong: `rank 2/1`."""
    if knob == "density":
        return "/".join(f"{100 * value:g}" for value in values) + " %"
    text = "/".join(f"{value:g}" if isinstance(value, int | float) else str(value) for value in values)
    return f"{text} bits" if knob == "bits" else f"{knob} {text}"


def pair_of(config: Config, driven: str = "level") -> list[float] | None:
    """[weak, strong] of the first policy that moves between two levels (or periods).

    A null level means the compressor's own pair.
    """
    traits = _traits(config.get("compressor") or {})
    own_strong, own_weak = traits.pair if traits and driven == "level" else (None, None)
    for policy in (config.get("adaptive") or {}).values():
        if {"weak", "strong"} <= policy.keys() and drives(policy) == driven:
            weak, strong = policy["weak"], policy["strong"]
            weak, strong = own_weak if weak is None else weak, own_strong if strong is None else strong
            return None if weak is None or strong is None else [weak, strong]
    return None


def levels_of(config: Config, knob: str) -> list[Any]:
    """The levels of the run: a policy's two or more, or the configured one; none where a policy searches for them."""
    if pair := pair_of(config):
        return pair
    traits = _traits(config["compressor"])
    strong, weak = traits.pair if traits else ("strong", "weak")
    numbers = {"strong": strong, "weak": weak, "dense": 1.0 if knob == "density" else "dense"}
    drivers = [policy for policy in policies_of(config).values() if drives(policy) == "level"]
    for policy in drivers:
        if {"inside", "outside", "ranges"} <= policy.keys():
            named = [entry[2] for entry in policy["ranges"] or []] or [
                policy["inside"] or "weak",
                policy["outside"] or "strong",
            ]
            return list(dict.fromkeys(numbers.get(level, level) for level in named))
    searching = [policy for policy in drivers if declared(policy) and "weak" not in policy]
    return [] if searching else [config["compressor"][knob]]


def _name(node: Config, choice: str) -> str:
    """As the class spells it (`EF-signSGD`), else its name where that is the choice (`TopK`), else the choice."""
    if choice == "none":
        return "dense"
    own = declared(node)
    if own and (name := own.display_names.get(choice)) is not None:
        return str(name)
    class_name = str(node.get("_target_", "")).rpartition(".")[2]
    return class_name if class_name.lower() == choice.replace("_", "") else choice.replace("_", " ")


def _traits(node: Config) -> Traits | None:
    """What a compressor is; None where that is not known."""
    own = declared(node)
    return own.traits if own else None
