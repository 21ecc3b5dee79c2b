"""What a compressor's knob can be set to, for policies that are told levels as numbers."""

from typing import Any

from accordion_bench.options import checks

BITS = (2, 8)  # fewest and most
DENSE: dict[str, float] = {"rank": 1_000_000, "density": 1.0}
"""Levels that leave nothing out, where a knob has one; a rank is cut to the smaller side of each matrix."""


def check_level(key: str, value: Any, knob: str, instead: Any) -> float:
    """A value that the knob can take: a share for `density`, `BITS` for `bits`, else an integer of at least 1.

    Raises:
        ValueRefused: with `instead` as what to type.
    """
    if knob == "density":
        return checks.number(key, value, above=0, at_most=1, instead=instead)
    least, most = BITS if knob == "bits" else (1, DENSE["rank"])
    if type(value) is not int or not least <= value <= most:
        name = "number of bits" if knob == "bits" else knob
        raise checks.ValueRefused(key, f"an integer from {least} to {most:g}, as a {name}", value, instead)
    return value


def is_positive(value: Any) -> bool:
    """Whether this is a finite number above 0, as every level of every knob is."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
