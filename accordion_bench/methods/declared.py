"""What the class that a configuration names declares of itself, for labels; as plain data, which needs no class.

The classes compute with torch, so that to import one takes half a gigabyte of memory.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from accordion_bench.compressors.traits import Traits, declared_by
from accordion_bench.options.component import Description
from accordion_bench.options.instantiate import Config, target
from accordion_bench.options.trusted import is_trusted


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


def of_class(node: Config) -> Declared | None:
    """What the class of a config node declares; None where this version no longer has it."""
    try:
        cls = target(node, "")
    except ValueError:  # its sentence says why
        return None
    own: Description = getattr(cls, "description", Description())
    try:
        suffix: str | None = own.label_suffix(node)
    except Exception:  # options of whatever kind, of a run of somebody's
        suffix = None
    drives, detects = getattr(cls, "drives", "level"), getattr(cls, "detects", False)
    return Declared(own.display_names, own.shares, drives, detects, declared_by(cls), suffix)


look: Callable[[Config], Declared | None] = of_class  # who looks at classes: reports that are served have another do it


def declared(node: Config) -> Declared | None:
    """What the class declares that `_target_` names; None where it is not trusted, or this version no longer has it."""
    return look(node) if is_trusted(node.get("_target_")) else None
