"""Options declared once, as fields of their class; checks, error messages and YAML files are derived from them."""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused, show

Made = TypeVar("Made")

NEAREST = "the nearest integer"  # value of `instead`: suggest the nearest integer


@dataclass(frozen=True)
class Option:
    """Declaration of an option; see `option` for the other arguments.

    Args:
        name: name of the field.
        kinds: accepted types, (int, NoneType) for `int | None`.
        default: default of the class; a choice may have another one.
    """

    name: str = ""
    kinds: tuple[Any, ...] = ()
    default: Any = None
    help: str = ""
    choices: Sequence[Any] = ()
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    instead: Any = None
    shown: bool = True
    brought: bool = False

    @property
    def comment(self) -> str:
        """Comment in the YAML file: the choices, unless the help names all of them, then the help."""
        words = [choice for choice in self.choices if isinstance(choice, str)]
        listed = len(words) == len(self.choices) and not all(word in self.help for word in words)
        return ": ".join(filter(None, [", ".join(words) if listed else "", self.help]))

    def checked(self, value: Any, key: str = "") -> Any:
        """Return the value; an integer is converted to float if the type is `float` and not `int | float`.

        Args:
            value: the given value.
            key: name used in messages; "" = the option's name.

        Raises:
            ValueRefused: the value has another type, is out of bounds, or is not among the choices.
        """
        key, instead = key or self.name, self.default if self.instead is None else self.instead
        if value is None and (types.NoneType in self.kinds or self.default is None):
            return value
        if len(self.choices) > 1 and all(isinstance(choice, str) for choice in self.choices):
            return checks.choice(key, value, self.choices, self.instead)
        if self.choices:
            return self._chosen(key, value, instead)
        if bool in self.kinds:
            return checks.boolean(key, value, instead)
        if float in self.kinds:
            limits = {name: getattr(self, name) for name in ("above", "at_least", "at_most", "below")}
            number = checks.number(key, value, instead=instead, **limits)
            return value if int in self.kinds else number
        if int in self.kinds and self.at_least is not None:
            most = None if self.at_most is None else int(self.at_most)
            return checks.integer(key, value, int(self.at_least), None if instead == NEAREST else instead, most)
        return value

    def _chosen(self, key: str, value: Any, instead: Any) -> Any:
        """Check a value against choices that are not all strings, or against a single one."""
        if any(type(value) is type(choice) and value == choice for choice in self.choices):
            return value
        names = [None] if types.NoneType in self.kinds else []
        *most, last = (show(one) for one in [*names, *self.choices])
        raise ValueRefused(key, f"{', '.join(most)} or {last}" if most else last, value, instead)


def option(
    help: str = "",
    *,
    default: Any,
    choices: Sequence[Any] = (),
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    instead: Any = None,
    shown: bool = True,
    brought: bool = False,
) -> Any:
    """Declare an option as a field of a `with_options` class: help, default and rules; see the example.

    Strings without `choices`, integers without `at_least`, lists and `Any` are checked by the class itself.

    Args:
        help: one line for --help and the YAML file. String choices are listed before it, unless it names all of them.
        default: default value; if it is None, null is accepted too.
        choices: accepted values.
        at_least, at_most, above, below: bounds of a number.
        instead: value that errors suggest; `NEAREST` = the nearest integer; None = most similar choice, or default.
        shown: whether YAML files contain it. Options that another part of the configuration sets are not shown.
        brought: whether other choices may override its default, see `Choice.brings`.

    Example:
        >>> from accordion_bench.options.component import Component
        >>> @with_options
        ... class Rank(Component):
        ...     rank: int = option("lower rank = more compression", default=2, at_least=1)
        >>> Rank(rank=4).rank
        4
        >>> Rank(rank=0)
        Traceback (most recent call last):
        accordion_bench.options.checks.ValueRefused: rank must be an integer of at least 1, got 0; ...
    """
    bounds: Any = {"at_least": at_least, "at_most": at_most, "above": above, "below": below}
    told: Any = {"help": help, "choices": tuple(choices), "instead": instead, "shown": shown, "brought": brought}
    own = Option(default=default, **told, **bounds)
    return dataclasses.field(default=default, metadata={"option": own})


@dataclass_transform(eq_default=False, field_specifiers=(option, dataclasses.field))
def with_options(cls: type[Made]) -> type[Made]:
    """Class decorator that creates a constructor from the options in order of declaration, those of base classes first.

    The constructor then calls `__post_init__`. A class that overrides it must first call `super().__post_init__()`,
    which checks the options (`options.component.Component` has the first implementation). It then checks rules about
    several options, and derives further attributes.

    A class with its own constructor, as modules and optimizers of torch need, declares options as defaults of the
    arguments: `depth: int = option("of the network", default=20, at_least=8)`. They are checked before the
    constructor's body runs, which receives their values.

    Example:
        >>> from accordion_bench.options.component import Component
        >>> @with_options
        ... class LowRank(Component):
        ...     rank: int = option("lower rank = more compression", default=2, at_least=1)
        >>> LowRank(rank=4).rank
        4
    """
    own = inspect.signature(cls.__init__).parameters if "__init__" in vars(cls) else {}
    options = {
        name: dataclasses.replace(one.default.metadata["option"], name=name, kinds=_kinds(one.annotation))
        for name, one in own.items()
        if isinstance(one.default, dataclasses.Field)
    }
    if not options:
        return dataclass(eq=False, repr=False)(cls)
    setattr(cls, "__init__", _checking(cls.__init__, options))  # noqa: B010
    return cls


def _checking(init: Any, options: Mapping[str, Option]) -> Any:
    """Wrap a constructor whose defaults are options: replace them by their default values and check the arguments."""
    signature = inspect.signature(init)
    arguments = (
        one.replace(default=options[name].default if name in options else one.default)
        for name, one in signature.parameters.items()
    )
    signature = signature.replace(parameters=list(arguments))

    @functools.wraps(init)
    def checking(*positional: Any, **named: Any) -> None:
        given = signature.bind(*positional, **named)
        given.apply_defaults()
        given.arguments |= {name: one.checked(given.arguments[name]) for name, one in options.items()}
        init(*given.args, **given.kwargs)

    vars(checking).update(__signature__=signature, options=options)
    return checking


def check_options(made: Any, prefix: str = "") -> None:
    """Check all options of an object; `prefix` precedes their names in messages, such as `comm.`."""
    for name, own in options_of(type(made)).items():
        given = getattr(made, name)
        if (value := own.checked(given, f"{prefix}{name}")) is not given:
            setattr(made, name, value)


def options_of(cls: Any) -> Mapping[str, Option]:
    """Return the options of a class by name, in order; empty if it declares none."""
    return _declared(cls)


@functools.cache
def _declared(cls: Any) -> Mapping[str, Option]:
    found = dict(getattr(cls.__init__, "options", {}))
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if own := field.metadata.get("option"):
            found[field.name] = dataclasses.replace(own, name=field.name, kinds=_kinds(field.type))
    return found


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """Return (int, NoneType) for `int | None`."""
    return typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


@dataclass(frozen=True)
class Choice:
    """Name under which a class can be chosen, with the content of its YAML file.

    A class lists its choices by name in `chosen_as`.

    Args:
        told: description in --help.
        values: defaults of this choice that differ from those of the class.
        beside: options of wrappers, in order, shown after the class's own.
        leaves_out: options of the class that are not shown.
        comments: comments that replace the help of options.
        selects: choices of other groups that this one selects, unless they are typed.
        brings: defaults of other groups by dotted key, as the method's paper has them, each with a comment.
        target: path of the class that takes these options, if it is not the declaring one.
    """

    told: str
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    beside: Sequence[str] = ()
    leaves_out: Sequence[str] = ()
    comments: Mapping[str, str] = dataclasses.field(default_factory=dict)
    selects: Mapping[str, str] = dataclasses.field(default_factory=dict)
    brings: Mapping[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    target: str = ""
