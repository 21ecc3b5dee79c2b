"""Options, declared once, as fields of the class that has them: check, refusal and YAML file come from here."""

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

NEAREST = "the nearest integer"  # to suggest in the place of a wrong number


@dataclass(frozen=True)
class Option:
    """What is declared of one option; see `option` for the other arguments.

    Args:
        name: of the field.
        kinds: the types that it takes, (int, NoneType) for `int | None`.
        default: of the class; a choice may have its own.
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
        """What stands behind the value in the YAML file: the choices, unless the help says them all, then the help."""
        words = [choice for choice in self.choices if isinstance(choice, str)]
        listed = len(words) == len(self.choices) and not all(word in self.help for word in words)
        return ": ".join(filter(None, [", ".join(words) if listed else "", self.help]))

    def checked(self, value: Any, key: str = "") -> Any:
        """The value, an integer as a float where `float` is declared and not `int | float`.

        Args:
            value: that was given.
            key: what messages call it; "" = its name.

        Raises:
            ValueRefused: it is of another type, out of bounds, or none of the choices.
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
        """One of a few choices, not all of which are words, or the only one beside null."""
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
    """A field of a class `with_options`: `rank: int = option("lower rank = more compression", default=2, at_least=1)`.

    A text without `choices`, an integer without `at_least`, a list and `Any` are checked by the class itself.

    Args:
        help: one line, for --help and the YAML file; choices that are words are listed before it, unless it has all.
        default: where nothing is given; where it is None, null is taken, too.
        choices: the values that it may have.
        at_least, at_most, above, below: bounds of a number.
        instead: the value to suggest; `NEAREST` = the nearest integer; None = the nearest word, or the default.
        shown: whether YAML files have it; those that another part of the configuration gives are not shown.
        brought: whether other choices may bring a default of theirs, see `Choice.brings`.

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
    """Give a class the constructor that its options make, in their order, those of base classes first.

    `__post_init__` is called next. Where the class has one of its own, it begins with `super().__post_init__()`, which
    checks the options (`options.component.Component` has the first), goes on with rules about several options, and
    derives what hangs on them.

    A class that has a constructor in its body, as modules and optimizers of torch need, declares its options there, as
    defaults of the arguments: `depth: int = option("of the network", default=20, at_least=8)`. They are checked before
    the body runs, which gets their values.

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
    """A constructor whose arguments have options as defaults, with their values in that place, and their checks."""
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
    """Check the values of all options of an object.

    Args:
        made: of a class that declares options.
        prefix: of their names in messages, `comm.` say.

    Raises:
        ValueRefused: for the first that breaks its rule.
    """
    for name, own in options_of(type(made)).items():
        given = getattr(made, name)
        if (value := own.checked(given, f"{prefix}{name}")) is not given:
            setattr(made, name, value)


def options_of(cls: Any) -> Mapping[str, Option]:
    """The options of a class by name, in order; none where it declares none."""
    return _declared(cls)


@functools.cache
def _declared(cls: Any) -> Mapping[str, Option]:
    found = dict(getattr(cls.__init__, "options", {}))
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if own := field.metadata.get("option"):
            found[field.name] = dataclasses.replace(own, name=field.name, kinds=_kinds(field.type))
    return found


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """(int, NoneType) for `int | None`."""
    return typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


@dataclass(frozen=True)
class Choice:
    """A name under which a class can be chosen: what is to be said in its YAML file.

    A class has them by name in its `chosen_as`.

    Args:
        told: what --help says of it.
        values: defaults of this choice that are not those of the class.
        beside: options that others around the class have, in order; behind its own.
        leaves_out: options of the class that are not shown.
        comments: of options that say something else here.
        selects: choices of other groups that this one brings, unless they are typed.
        brings: defaults of other groups by dotted key, as the method's paper has them, each with a comment.
        target: path of the class that takes these options, where that is another one than that which declares them.
    """

    told: str
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    beside: Sequence[str] = ()
    leaves_out: Sequence[str] = ()
    comments: Mapping[str, str] = dataclasses.field(default_factory=dict)
    selects: Mapping[str, str] = dataclasses.field(default_factory=dict)
    brings: Mapping[str, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    target: str = ""
