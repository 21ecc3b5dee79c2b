"""Parse and format numbers with units: rates, times, bytes, counts."""

import re
from collections.abc import Sequence
from typing import Any

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
RATES, TIMES = ("bandwidth", "slow_bandwidth"), ("latency", "jitter")  # options that accept a unit


def rate(text: str) -> float | None:
    """Parse `10gbit`, `2.5 Gbit/s` or `100mbps` to bit/s; None for other text."""
    found = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*([kmgt]?)(?:bits?(?:/s|ps)?|bps)", text.strip().lower())
    return _number(found[1], PREFIXES[found[2]]) if found else None


def seconds(text: str) -> float | None:
    """Parse `5ms` or `50us` to seconds; None for other text."""
    found = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*([mun\u00b5]?s)", text.strip().lower())
    return _number(found[1], SECONDS[found[2]]) if found else None


def with_unit(key: str, value: Any) -> str:
    """Format a rate or time as `1gbit` or `0.05ms`; "" if the option has no unit or the value is not a number."""
    name = key.rpartition(".")[2]
    if name not in (*RATES, *TIMES) or not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        return ""
    if name in RATES:
        prefix, size = next((item for item in reversed(PREFIXES.items()) if value >= item[1]), ("", 1.0))
        return f"{value / size:.15g}{prefix}bit"
    return f"{1000 * value:.15g}ms"


def without_units(options: Any) -> Any:
    """Convert values such as `bandwidth=10gbit` to 1e10 and `latency=5ms` to 0.005; keep other values."""
    if not isinstance(options, dict):
        return options
    found = {}
    for key, value in options.items():
        read = rate if key in RATES else seconds if key in TIMES else None
        number = read(value) if read and isinstance(value, str) else None
        found[key] = without_units(value) if number is None else number
    return found


def _number(digits: str, factor: float) -> float | None:
    try:
        return float(f"{float(digits) * factor:.15g}")
    except ValueError:
        return None


def digits(value: float, places: int = 3) -> str:
    """Format with `places` significant digits, or all digits before the decimal point: `1.02`, `1,024`."""
    return f"{value:,.0f}" if abs(value) >= 10**places - 0.5 else f"{value:.{places}g}"


def _scaled(value: float, units: Sequence[str], places: int) -> tuple[float, str]:
    """Round to `places` digits, and choose the unit (each 1000 times the one before) in which the number is short."""
    value = float(f"{value:.{places}g}")
    for unit in units[:-1]:
        if abs(value) < 1000:
            return value, unit
        value /= 1000
    return value, units[-1]


def human_bytes(count: float) -> str:
    """Format 1234567 as 1.23 MB (powers of 1000)."""
    count, unit = _scaled(count, ("B", "kB", "MB", "GB", "TB"), 3)
    return f"{digits(count)} {unit}"


def human_seconds(seconds: float) -> str:
    """Format as `45 s`, `3 min 20 s`, `2 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def duration(seconds: float) -> str:
    """Format a short time with three digits: `0.35 ms`, `12.3 ms`, `1.25 s`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def samples(batch: int | Sequence[int]) -> str:
    """Format as `32 samples`; for different batch sizes `64, 32 and 32 samples`."""
    if isinstance(batch, int):
        return counted(batch, "sample")
    *most, last = map(str, batch)
    return f"{', '.join(most)} and {last} samples"


def counted(count: int, noun: str) -> str:
    """Format a number with a noun: `1 worker`, `4 workers`, `2 processes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def typed_rate(bits: float) -> str:
    """Format 1.3e9 as 1.3gbit, which `rate` parses; four digits."""
    bits, unit = _scaled(bits, ("bit", "kbit", "mbit", "gbit"), 4)
    return f"{bits:g}{unit}"


def human_rate(bits: float) -> str:
    """Format 1.3e9 as 1.3 Gbit/s."""
    bits, unit = _scaled(bits, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"), 3)
    return f"{bits:g} {unit}"
