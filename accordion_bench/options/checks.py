"""Checks of configured values: each failure is one sentence with key, rule, value and what to type instead."""

import difflib
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from accordion_bench.options.units import with_unit

ALIKE = 0.6  # of two words, from 0 to 1, so that one may be meant by the other
SHORTEST = 4  # letters of a word that may be the beginning of what was meant


class Less(NamedTuple):
    """A way out that no value says: `a lower compressor.rank`."""

    how: str
    key: str


Way = Mapping[str, Any] | Less | str
"""What to do instead: options to choose together, by key; less of one; or in words."""


Wording = Callable[[str, Sequence[Way]], str]
"""A sentence, and what to do instead, as its reader would: `typed` or `passed`."""


class ConfigError(ValueError):
    """A configured value that breaks a rule; `str()` is the one sentence the user reads.

    Args:
        what: the sentence up to the ways out; the whole of it where there is none.
        ways: any of them will do.
    """

    def __init__(self, what: str, *ways: Way) -> None:
        self.what, self.ways = what, ways
        super().__init__(typed(what, ways))

    def in_python(self) -> "ConfigError":
        """The same for arguments that were passed in Python."""
        return ConfigError(passed(self.what, self.ways))


class ValueRefused(ConfigError):
    """As `ConfigError`, for one key; `under` puts the config group in front of the key.

    Args:
        key: of the option.
        rule: what its value must be. `{null}`, `{true}` and `{false}` in it are said as its reader writes them.
        value: that breaks the rule.
        instead: one that does not.
    """

    def __init__(self, key: str, rule: str, value: Any, instead: Any) -> None:
        self.key, self.rule, self.value, self.instead = key, rule, value, instead
        super().__init__(f"{key} must be {_said(rule, show)}, got {show(value)}", {key: instead})

    def under(self, prefix: str) -> "ValueRefused":
        return ValueRefused(f"{prefix}.{self.key}", self.rule, self.value, self.instead)

    def in_python(self) -> ConfigError:
        what = f"{_in_call(self.key)} must be {_said(self.rule, repr)}, got {self.value!r}"
        return ConfigError(passed(what, self.ways))


# ---- the two wordings of what to do instead


def typed(what: str, ways: Sequence[Way]) -> str:
    """`...; type compressor=topk, or sync=every_step`."""

    def one(way: Way) -> str:
        if isinstance(way, str | Less):
            return way if isinstance(way, str) else f"{way.how} {way.key}"
        return " ".join(f"{key}={with_unit(key, value) or show(value)}" for key, value in way.items())

    return f"{what}; type {_either([one(way) for way in ways])}" if ways else what


def passed(what: str, ways: Sequence[Way]) -> str:
    """`...; pass compressor='topk', or call ab.attach(model, optimizer)`."""

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
    """Another synchronisation is another function's argument."""
    scheme = chosen.pop("sync")
    door, own = ("attach", []) if scheme == "every_step" else ("local", [f"sync={scheme!r}"])
    return f"call ab.{door}({', '.join(['model', 'optimizer', *own, *map(_argument, chosen, chosen.values())])})"


OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}  # that methods ask for


def _argument(key: str, value: Any) -> str:
    """How an option is passed: by its own name, within that of its policy, or to the optimizer."""
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
    """The options of the compressor and of the scheme are arguments of their own."""
    return key.removeprefix("compressor.").removeprefix("sync.")


def _said(rule: str, spell: Callable[[Any], str]) -> str:
    for value in (None, True, False):
        rule = rule.replace(f"{{{show(value)}}}", spell(value))
    return rule


# ---- values, and checks of them


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
        raise ValueRefused(key, "{true} or {false}", value, instead)
    return value


def betas(value: Any, instead: list[float]) -> tuple[float, float]:
    """Two memories of an optimizer, in [0, 1)."""
    pair = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    if len(pair) != 2 or not all(_is_number(beta, (int, float)) and 0 <= beta < 1 for beta in pair):
        raise ValueRefused("betas", "two numbers at least 0 and below 1", pair or value, instead)
    return pair[0], pair[1]


def choice(key: str, value: Any, choices: Sequence[str], instead: str | None = None) -> str:
    """One of `choices`; the closest one is suggested, for what is no word `instead`."""
    if value not in choices:
        near = nearest(str(value), choices)
        more = f", ... ({len(choices)} in all)" if len(near) < len(choices) else ""
        suggested = closest(str(value), choices) if isinstance(value, str) or instead is None else instead
        raise ValueRefused(key, f"one of {', '.join(near)}{more}", value, suggested)
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
