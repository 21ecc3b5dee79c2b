"""Base class of components, and the `Description` by which checks, help and labels know them without names."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accordion_bench.options.conf_dir import Config
from accordion_bench.options.option import check_options

Idle = Iterator[tuple[str, str]]
"""Pairs (option without effect, reason); a key with a dot, such as `sync.period`, belongs to another component."""


@dataclass(frozen=True)
class RunContext:
    """Facts about a run from which a component derives which of its options have no effect.

    Args:
        group: config group of its options: `compressor`, `adaptive.adaqs`.
        choice: name under which it was chosen; "" if there is none.
        epochs, workers: numbers of epochs and workers of the run.
        gradients: whether gradients are exchanged at any time of the run.
        knob: option of the compressor that policies may change; "" if there is none.
        steered_by: names of the policies that change it.
        weight_decay: weight decay of the optimizer.
    """

    group: str = ""
    choice: str = ""
    epochs: int = 1
    workers: int = 1
    gradients: bool = True
    knob: str = ""
    steered_by: tuple[str, ...] = ()
    weight_decay: float = 0.0


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from ()


def _smoke_options(options: Config, knob: str) -> Config:
    return {}


@dataclass(frozen=True)
class Description:
    """Facts about a component for checks, help, labels and smoke tests: the attribute `description` of its class.

    A subclass writes `description = replace(Base.description, idle=_idle, ...)`, with functions of its module.

    Args:
        display_names: name in reports, as in its paper, by name of the YAML file. The default is the name of the class
            if the YAML file has the same name, otherwise the YAML file's name without underscores.
        requires: choices in other groups without which it is refused, used by runs that test every component: by group
            its options, or the name of a choice.
        of_several_kinds: options that accept other kinds of values than their default; their users check them.
        shares: options that are a fraction of the coordinates, with their suffix in reports.
        label_suffix: function of the options that returns a suffix for reports after name and level; "" = none.
        idle: function of the class, its configured options (a missing one has the constructor's default) and the run;
            yields the options that have no effect. A warning is printed for those that were typed.
        smoke_options: function of the options and the compressor's knob ("" if there is none); returns options with
            which the component averages, or decides, within six steps, see +experiment=smoke.
    """

    display_names: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, Mapping[str, Any] | str] = field(default_factory=dict)
    of_several_kinds: frozenset[str] = frozenset()
    shares: Mapping[str, str] = field(default_factory=dict)
    label_suffix: Callable[[Config], str] = lambda options: ""
    idle: Callable[[Any, Config, RunContext], Idle] = _idle
    smoke_options: Callable[[Config, str], Config] = _smoke_options


class Component:
    """Base class of compressors, policies, synchronisation schemes, schedules and data sets.

    Class attributes:
        description: see `Description`.
    """

    description: Description = Description()

    def __post_init__(self) -> None:
        """Check the options of a `with_options` class."""
        check_options(self)


def idle_options(cls: Any, options: Config, context: RunContext) -> Idle:
    """Yield the options of a component that have no effect in a run, with reasons; see `Description.idle`."""
    description: Description = cls.description
    return description.idle(cls, options, context)
