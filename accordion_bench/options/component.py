"""What every component says of itself, so that nothing elsewhere needs to know its name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import check_options

Idle = Iterator[tuple[str, str]]
"""Options that change nothing, each with why; a key with a dot, such as `sync.period`, is another component's."""


@dataclass(frozen=True)
class Surroundings:
    """What a component may know of the run around it, to say which options change nothing there.

    Args:
        group: where its options stand: `compressor`, `adaptive.adaqs`.
        choice: the name under which it was chosen; "" where it has none.
        epochs, workers: of the run.
        gradients: whether gradients are exchanged at any time of the run.
        knob: the option of the compressor that policies may steer; "" where it has none.
        steered_by: the policies that steer it.
        weight_decay: of the optimizer.
    """

    group: str = ""
    choice: str = ""
    epochs: int = 1
    workers: int = 1
    gradients: bool = True
    knob: str = ""
    steered_by: tuple[str, ...] = ()
    weight_decay: float = 0.0


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from ()


def _smoke_options(options: Config, knob: str) -> Config:
    return {}


@dataclass(frozen=True)
class Description:
    """What checks, help, labels and small runs know of a component; it stands beside the class, as its `description`.

    A subclass writes `description = replace(Base.description, idle=_idle, ...)`, with functions of its module.

    Args:
        display_names: how reports write it, as its paper does, by the name of its YAML. Others have the name of the
            class, where the YAML has the same, else that of the YAML without underscores.
        requires: what must be chosen in other groups, or it is refused, for runs that look at every component: by
            group its options, or the name of another choice.
        of_several_kinds: options that take more kinds of values than that of their default; who uses them checks them.
        shares: options that are a share of the coordinates, and how reports write them behind the name.
        label_suffix: called with the options; returns what reports say of them behind name and level; "" = nothing.
        idle: called with the class, its options as configured (one that is missing has the constructor's default) and
            the run; yields the options that change nothing there. The user who has typed one is warned.
        smoke_options: called with the options and the compressor's knob ("" where it has none); returns options with
            which it averages, or decides, within six steps of a run, see +experiment=smoke.
    """

    display_names: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, Mapping[str, Any] | str] = field(default_factory=dict)
    of_several_kinds: frozenset[str] = frozenset()
    shares: Mapping[str, str] = field(default_factory=dict)
    label_suffix: Callable[[Config], str] = lambda options: ""
    idle: Callable[[Any, Config, Surroundings], Idle] = _idle
    smoke_options: Callable[[Config, str], Config] = _smoke_options


class Component:
    """The base of compressors, policies, synchronisation schemes, schedules and data sets.

    Class attributes:
        description: see `Description`.
    """

    description: Description = Description()

    def __post_init__(self) -> None:
        """Check the options of a class `with_options`."""
        check_options(self)


def idle_options(cls: Any, options: Config, context: Surroundings) -> Idle:
    """The options of a component's class that change nothing in a run, each with why; see `Description.idle`."""
    description: Description = cls.description
    return description.idle(cls, options, context)
