"""Checks of configured values; each error is one sentence with key, rule, value and what to type instead."""

import difflib
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from accordion_bench.options.units import with_unit

ALIKE = 0.6  # minimum similarity of two words, from 0 to 1, for a suggestion
SHORTEST = 4  # minimum letters of a word that is matched as a prefix


class Less(NamedTuple):
    """A remedy without a value: `a lower compressor.rank`."""

    how: str
    key: str


Way = Mapping[str, Any] | Less | str
"""A remedy: options to set together, by key; a lower value of one option; or text."""


Wording = Callable[[str, Sequence[Way]], str]
"""Function that joins a sentence and its remedies: `typed` for the command line, `passed` for Python."""


class ConfigError(ValueError):
    """A configured value breaks a rule; `str()` is one sentence for the user.

    Args:
        what: the sentence without remedies.
        ways: alternative remedies.
    """

    def __init__(self, what: str, *ways: Way) -> None:
        self.what, self.ways = what, ways
        super().__init__(typed(what, ways))

    def in_python(self) -> "ConfigError":
        """Return the same error, worded for arguments passed in Python."""
        return ConfigError(passed(self.what, self.ways))


class ValueRefused(ConfigError):
    """A `ConfigError` about one key.

    Args:
        key: key of the option.
        rule: requirement that its value breaks; `{null}`, `{true}`, `{false}` are spelled as the reader types them.
        value: the wrong value.
        instead: a valid value.
    """

    def __init__(self, key: str, rule: str, value: Any, instead: Any) -> None:
        self.key, self.rule, self.value, self.instead = key, rule, value, instead
        super().__init__(f"{key} must be {_said(rule, show)}, got {show(value)}", {key: instead})

    def under(self, prefix: str) -> "ValueRefused":
        """Return the same error with the config group `prefix` added to the key."""
        return ValueRefused(f"{prefix}.{self.key}", self.rule, self.value, self.instead)

    def in_python(self) -> ConfigError:
        what = f"{_in_call(self.key)} must be {_said(self.rule, repr)}, got {self.value!r}"
        return ConfigError(passed(what, self.ways))


# ---- remedies, worded for the command line and for Python


def typed(what: str, ways: Sequence[Way]) -> str:
    """Word remedies for the command line: `...; type compressor=topk, or sync=every_step`."""

    def one(way: Way) -> str:
        if isinstance(way, str | Less):
            return way if isinstance(way, str) else f"{way.how} {way.key}"
        return " ".join(f"{key}={with_unit(key, value) or show(value)}" for key, value in way.items())

    return f"{what}; type {_either([one(way) for way in ways])}" if ways else what


def passed(what: str, ways: Sequence[Way]) -> str:
    """Word remedies for Python: `...; pass compressor='topk', or call ab.attach(model, optimizer)`."""

    def one(way: Way) -> str:
        if isinstance(way, str | Less):
            return way if isinstance(way, str) else f"{way.how} {_in_call(way.key)}"
        return ", ".join(_argument(key, value) for key, value in way.items())

    calls = [_call(dict(way)) for way in ways if isinstance(way, Mapping) and "sync" in way]
    arguments = [one(way) for way in ways if not (isinstance(way, Mapping) and "sync" in way)]
    instead = [f"pass {_either(arguments)}"] if arguments else []
    return f"{what}; {', or '.join([*instead, *calls])}" if ways else what


def _either(ways: Sequence[str]) -> str:
    return ", or ".join(ways) if len(ways) <= 2 else f"one of {', '.join(ways)}"


def _call(chosen: dict[str, Any]) -> str:
    """Return the call for another synchronisation scheme, which may be another function."""
    scheme = chosen.pop("sync")
    door, own = ("attach", []) if scheme == "every_step" else ("local", [f"sync={scheme!r}"])
    return f"call ab.{door}({', '.join(['model', 'optimizer', *own, *map(_argument, chosen, chosen.values())])})"


OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}  # optimizers that methods require


def _argument(key: str, value: Any) -> str:
    """Format an option as an argument: by its name, within its policy's dict, or of the optimizer."""
    group, _, option = key.partition(".")
    if group == "adaptive" and option:
        policy, _, option = option.partition(".")
        return f"adaptive={{{policy!r}: {{{option!r}: {value!r}}}}}"
    if group == "optimizer" and option:
        return f"{option}={value!r} to the optimizer"
    if group == "optimizer":
        return f"a torch.optim.{OPTIMIZERS[value]}" if value in OPTIMIZERS else f"an optimizer {value}"
    return "another schedule" if group == "schedule" else f"{_in_call(key)}={value!r}"


def _in_call(key: str) -> str:
    """Return the argument's name: options of the compressor and of the scheme have no prefix in Python."""
    return key.removeprefix("compressor.").removeprefix("sync.")


def _said(rule: str, spell: Callable[[Any], str]) -> str:
    for value in (None, True, False):
        rule = rule.replace(f"{{{show(value)}}}", spell(value))
    return rule


# ---- values, and checks of them


def show(value: Any) -> str:
    """Format a value as it is typed on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(v)}" for key, v in value.items()) + "}"
    return str(value)


def as_typed(key: str, text: str) -> str:
    """Format `key=text` for a shell, quoted for Hydra's grammar and for the shell if needed."""
    return shlex.quote(f"{key}={text if re.fullmatch(r'[A-Za-z0-9_./:@%+-]+', text) else for_hydra(text)}")


def for_hydra(text: str) -> str:
    """Quote text for Hydra's grammar."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + found[2].replace("'", r"\'"), text)
    return f"'{escaped}'"


def kind_of(value: Any) -> str:
    """Return the phrase for a value of the same kind."""
    if isinstance(value, bool):
        return "true or false"
    kinds = {int: "a number", float: "a number", str: "text", list: "a list", dict: "a group of options"}
    return kinds.get(type(value), "one value")


def _is_number(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def integer(key: str, value: Any, at_least: int, instead: int | None = None, at_most: int | None = None) -> int:
    """Check for an integer from `at_least` to `at_most`; errors suggest `instead`, or the nearest valid integer."""
    most = math.inf if at_most is None else at_most
    if _is_number(value, int) and at_least <= value <= most:
        return int(value)
    if instead is None:
        near = _is_number(value, (int, float)) and math.isfinite(value)
        instead = int(min(max(round(value), at_least), most)) if near else at_least
    too_large = _is_number(value, int) and value > most
    raise ValueRefused(
        key, f"an integer of at {f'most {at_most}' if too_large else f'least {at_least}'}", value, instead
    )


def number(
    key: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    instead: float,
) -> float:
    """Check for a finite number within the given limits; return it as float."""
    limits = {"above": above, "at least": at_least, "at most": at_most, "below": below}
    rule = "a number " + " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if limit is not None)
    good = _is_number(value, (int, float)) and abs(value) < float("inf")
    good = good and (above is None or value > above) and (at_least is None or value >= at_least)
    good = good and (at_most is None or value <= at_most) and (below is None or value < below)
    if not good:
        raise ValueRefused(key, rule.strip(), value, instead)
    return float(value)


def boolean(key: str, value: Any, instead: bool = True) -> bool:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise ValueRefused(key, "{true} or {false}", value, instead)
    return value


def betas(value: Any, instead: list[float]) -> tuple[float, float]:
    """Check for the two moment coefficients of an optimizer, in [0, 1)."""
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(pair) != 2 or not all(_is_number(beta, (int, float)) and 0 <= beta < 1 for beta in pair):
        raise ValueRefused("betas", "two numbers at least 0 and below 1", pair or value, instead)
    return pair[0], pair[1]


def choice(key: str, value: Any, choices: Sequence[str], instead: str | None = None) -> str:
    """Check for one of `choices`; errors suggest the most similar one, or `instead` for values that are not strings."""
    if value not in choices:
        near = nearest(str(value), choices)
        more = f", ... ({len(choices)} in all)" if len(near) < len(choices) else ""
        suggested = closest(str(value), choices) if isinstance(value, str) or instead is None else instead
        raise ValueRefused(key, f"one of {', '.join(near)}{more}", value, suggested)
    return value


def closest(word: str, choices: Sequence[str], cutoff: float = 0.0) -> str:
    """Return the choice most similar to `word`, ignoring case and dashes; "" if none reaches `cutoff`."""
    found = _alike(word, choices, 1, cutoff)
    return found[0] if found else "" if cutoff else choices[0]


def nearest(word: str, choices: Sequence[str], count: int = 5) -> list[str]:
    """Return all choices in order, or if there are more than `count`, the most similar ones, best first."""
    if len(choices) <= count:
        return list(choices)
    return _alike(word, choices, count, 0.0)


def _alike(word: str, choices: Sequence[str], count: int, cutoff: float) -> list[str]:
    """Return the choices that equal the word, those that start with it, then similar ones."""
    plain, typed = {_plain(choice): choice for choice in reversed(choices)}, _plain(word)
    begun = [choice for choice in choices if len(typed) >= SHORTEST and _plain(choice).startswith(typed)]
    similar = [plain[found] for found in difflib.get_close_matches(typed, list(plain), n=count, cutoff=cutoff)]
    exact = [choice for choice in similar if _plain(choice) == typed]
    return list(dict.fromkeys([*exact, *begun, *similar]))[:count]


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")
