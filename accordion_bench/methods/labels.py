"""Labels of runs in tables and figures, from their options and the declarations of the classes that these name.

A class that is not trusted (`options.instantiate`) is never imported, because that would run unknown code; only its
name is used. Importing a class with torch takes half a gigabyte of memory, so that declarations are plain data.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from accordion_bench.compressors.description import Traits, declared_by
from accordion_bench.options.checks import show
from accordion_bench.options.component import Description
from accordion_bench.options.instantiate import Config, is_trusted, target
from accordion_bench.options.presets import preset_of


class Declared(NamedTuple):
    """Plain data that a class declares.

    display_names: names of its choices in reports.
    shares: names in reports of a scheme's options that are shares.
    drives: the quantity that a policy steers.
    detects: whether a policy distinguishes critical epochs from others.
    traits: of a compressor; None of other classes.
    label_suffix: description of its options after name and level; None if the options are invalid.
    """

    display_names: Mapping[str, str]
    shares: Mapping[str, str]
    drives: str
    detects: bool
    traits: Traits | None
    label_suffix: str | None


def declared_of_class(node: Config) -> Declared | None:
    """Return the declarations of a config node's class; None if this version does not have the class."""
    try:
        cls = target(node, "")
    except ValueError:
        return None
    own: Description = getattr(cls, "description", Description())
    try:
        suffix: str | None = own.label_suffix(node)
    except Exception:  # a user's run may have options of any kind
        suffix = None
    drives, detects = getattr(cls, "drives", "level"), getattr(cls, "detects", False)
    return Declared(own.display_names, own.shares, drives, detects, declared_by(cls), suffix)


# served reports replace this function by one that imports classes in another process
look: Callable[[Config], Declared | None] = declared_of_class


def declared(node: Config) -> Declared | None:
    """Return the declarations of the class in `_target_`; None if it is not trusted, or not part of this version."""
    return look(node) if is_trusted(node.get("_target_")) else None


FORMS = {"ef21": "EF21", "loco": "LoCo"}  # forms of error feedback
KNOBS = ("rank", "density", "bits")


def label(config: Config) -> str:
    """Return a run's label: `dense`, `PowerSGD rank 2`, `TopK 10 %`, `fp16`, `Accordion (PowerSGD rank 2/1)`.

    Other methods are labelled by name and knob. Third-party hooks by the function's name: `DDP, bf16_compress_hook`.
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
    choice, beside = preset_of("adaptive", key, node)
    return _name(node, choice) + _in_brackets(beside)


def hook_of(config: Config) -> str:
    """Return the name of the third-party hook that exchanges gradients, without importing it; "" = none."""
    hook = (config.get("comm") or {}).get("hook")
    return str(hook).rpartition(":")[2] if hook is not None else ""


def policies_of(config: Config) -> dict[str, Config]:
    """Return the policies that decide something, without presets, which only name a scheme."""
    policies = config.get("adaptive") or {}
    return {key: node for key, node in policies.items() if drives(node)}


def scheme_of(config: Config) -> str:
    """Return the label of the scheme, such as `local SGD, H 8` or `DiLoCo, H 30, SPARTA 0.5 %`; "" for every_step.

    The two periods of a policy are shown as H 2/16; for other policies the period is omitted.
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
    """Return the description of a class's options that follows its name, or raise ValueError if they are invalid."""
    if own is None:
        return ""
    if own.label_suffix is None:
        raise ValueError(f"options of {name} cannot be understood")
    return own.label_suffix


def _in_brackets(options: Config, elsewhere: Collection[str] = ()) -> str:
    """Return ` (dtype=float16)`: options that no name implies and no other part of the label shows; "" if none."""
    told = ", ".join(f"{key}={show(value)}" for key, value in options.items() if key not in elsewhere)
    return f" ({told})" if told else ""


def drives(policy: Config) -> str:
    """Return the quantity that a policy steers; `level` if this version does not have the policy."""
    own = declared(policy)
    return own.drives if own else "level"


def detects(policy: Config) -> bool:
    """Whether a policy distinguishes critical epochs from others."""
    own = declared(policy)
    return own.detects if own else False


def is_dense(config: Config) -> bool:
    """Whether this is the baseline: an fp32 all-reduce in every step, and no policy."""
    return label(config) == "dense"


def knob_of(node: Config) -> str:
    """Return the option that policies may steer; "" if there is none."""
    traits = _traits(node)
    knob = (traits.knob if traits else None) or next((knob for knob in KNOBS if knob in node), "")
    return knob if node.get(knob) is not None else ""


def show_level(knob: str, *values: float) -> str:
    """Return `rank 2`, `10 %`, `4 bits`; several values weak to strong: `rank 2/1`."""
    if knob == "density":
        return "/".join(f"{100 * value:g}" for value in values) + " %"
    text = "/".join(f"{value:g}" if isinstance(value, int | float) else str(value) for value in values)
    return f"{text} bits" if knob == "bits" else f"{knob} {text}"


def pair_of(config: Config, driven: str = "level") -> list[float] | None:
    """Return [weak, strong] of the first policy that moves between two levels (or periods).

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
    """Return the levels of the run: a policy's levels, or the configured one; empty if a policy searches for them."""
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
    """Return the class's display name (`EF-signSGD`), or its name if that equals the choice (`TopK`), or the choice."""
    if choice == "none":
        return "dense"
    own = declared(node)
    if own and (name := own.display_names.get(choice)) is not None:
        return str(name)
    class_name = str(node.get("_target_", "")).rpartition(".")[2]
    return class_name if class_name.lower() == choice.replace("_", "") else choice.replace("_", " ")


def _traits(node: Config) -> Traits | None:
    own = declared(node)
    return own.traits if own else None
