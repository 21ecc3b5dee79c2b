"""What every component says of itself, so that nothing elsewhere needs to know its name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from accordion_bench.options.instantiate import Config

Idle = Iterator[tuple[str, str]]
"""Options that change nothing, each with why; a key with a dot, such as `sync.period`, is another component's."""


@dataclass(frozen=True)
class Surroundings:
    """What a component may know of the run around it, to say which options change nothing there.

    Args:
        group: where its options stand: `compressor`, `adaptive.adaqs`.
        choice: the name under which it was chosen; "" where nobody has given it one.
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


class Component:
    """The base of compressors, policies, synchronisation schemes, schedules and data sets.

    Class attributes:
        beside: what must stand in other groups, or it is refused, for runs that look at every component: by group its
            options, or the name of another choice.
        of_several_kinds: options that take more kinds of values than that of their default; who uses them checks them.
        spelled: how reports write it, as its paper does, by the name of its YAML. Others have the name of the class,
            where the YAML has the same, else that of the YAML without underscores.
    """

    beside: Mapping[str, Mapping[str, Any] | str] = {}
    of_several_kinds: frozenset[str] = frozenset()
    spelled: Mapping[str, str] = {}

    @classmethod
    def idle(cls, options: Config, around: Surroundings) -> Idle:
        """The options that change nothing in this run, each with why; the user who has typed one is warned.

        Args:
            options: as configured; what is not there has the constructor's default.
            around: the run.
        """
        yield from ()

    @classmethod
    def short(cls, options: Config, knob: str) -> Config:
        """Options with which it averages, or decides, within six steps of a run; see +experiment=smoke.

        Args:
            options: as configured.
            knob: the compressor's, "" where it has none.
        """
        return {}
