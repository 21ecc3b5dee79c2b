"""Checks of configured values: each failure is one sentence with key, rule, value and what to type instead."""

import difflib
import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

from accordion_bench.options.units import with_unit

ALIKE = 0.6  # of two words, from 0 to 1, so that one may be meant by the other
SHORTEST = 4  # letters of a word that may be the beginning of what was meant


class ConfigError(ValueError):
    """A configured value that breaks a rule; `str()` is the one sentence the user reads."""


class ValueRefused(ConfigError):
    """As `ConfigError`, for one key; `under` puts the config group in front of the key."""

    def __init__(self, key: str, rule: str, value: Any, instead: Any) -> None:
        self.key, self.rule, self.value, self.instead = key, rule, value, instead
        typed = with_unit(key, instead) or show(instead)
        super().__init__(f"{key} must be {rule}, got {show(value)}; type {key}={typed}")

    def under(self, prefix: str) -> "ValueRefused":
        return ValueRefused(f"{prefix}.{self.key}", self.rule, self.value, self.instead)


def show(value: Any) -> str:
    """The value as one types it on the command line."""
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
    """`key=text` as one types it in a shell: quoted for Hydra's grammar, and for the shell, where that is needed."""
    return shlex.quote(f"{key}={text if re.fullmatch(r'[A-Za-z0-9_./:@%+-]+', text) else for_hydra(text)}")


def for_hydra(text: str) -> str:
    """The text in quotes, as Hydra's grammar reads it."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + found[2].replace("'", r"\'"), text)
    return f"'{escaped}'"


def kind_of(value: Any) -> str:
    """What a value of the same kind is called in a sentence."""
    if isinstance(value, bool):
        return "true or false"
    kinds = {int: "a number", float: "a number", str: "text", list: "a list", dict: "a group of options"}
    return kinds.get(type(value), "one value")


def _is_number(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def integer(key: str, value: Any, at_least: int, instead: int | None = None, at_most: int | None = None) -> int:
    """An integer of at least `at_least`, and at most `at_most`; the nearest one is suggested, unless another is."""
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
    """A finite number inside the given limits."""
    limits = {"above": above, "at least": at_least, "at most": at_most, "below": below}
    rule = "a number " + " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if limit is not None)
    good = _is_number(value, (int, float)) and abs(value) < float("inf")
    good = good and (above is None or value > above) and (at_least is None or value >= at_least)
    good = good and (at_most is None or value <= at_most) and (below is None or value < below)
    if not good:
        raise ValueRefused(key, rule.strip(), value, instead)
    return float(value)


def boolean(key: str, value: Any, instead: bool = True) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueRefused(key, "true or false", value, instead)
    return value


def betas(value: Any, instead: list[float]) -> tuple[float, float]:
    """Two memories of an optimizer, in [0, 1)."""
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(pair) != 2 or not all(_is_number(beta, (int, float)) and 0 <= beta < 1 for beta in pair):
        raise ValueRefused("betas", "two numbers at least 0 and below 1", pair or value, instead)
    return pair[0], pair[1]


def choice(key: str, value: Any, choices: Sequence[str]) -> str:
    """One of `choices`; the closest one is suggested."""
    if value not in choices:
        near = nearest(str(value), choices)
        more = f", ... ({len(choices)} in all)" if len(near) < len(choices) else ""
        raise ValueRefused(key, f"one of {', '.join(near)}{more}", value, closest(str(value), choices))
    return value


def closest(word: str, choices: Sequence[str], cutoff: float = 0.0) -> str:
    """The choice that looks most like `word`, whatever its case and dashes; "" where none is as similar as `cutoff`."""
    found = _alike(word, choices, 1, cutoff)
    return found[0] if found else "" if cutoff else choices[0]


def nearest(word: str, choices: Sequence[str], count: int = 5) -> list[str]:
    """All choices in their order, or where they are many those that look most like `word`, best first."""
    if len(choices) <= count:
        return list(choices)
    return _alike(word, choices, count, 0.0)


def _alike(word: str, choices: Sequence[str], count: int, cutoff: float) -> list[str]:
    """The choices that begin with the word, then those that look like it."""
    plain, typed = {_plain(choice): choice for choice in reversed(choices)}, _plain(word)
    begun = [choice for choice in choices if len(typed) >= SHORTEST and _plain(choice).startswith(typed)]
    similar = [plain[found] for found in difflib.get_close_matches(typed, list(plain), n=count, cutoff=cutoff)]
    exact = [choice for choice in similar if _plain(choice) == typed]
    return list(dict.fromkeys([*exact, *begun, *similar]))[:count]


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")
