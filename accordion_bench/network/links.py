"""Measured links: results of a probe by kind of collective, their file and options for `Network`, and link labels."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from accordion_bench.network.collective_costs import KINDS
from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused, show
from accordion_bench.options.instantiate import Config
from accordion_bench.options.presets import overridden
from accordion_bench.options.units import RATES, human_rate, typed_rate

Row = dict[str, Any]  # of a probe: one kind of collective at one size
FORMAT = 1
LEVELS = ("inside", "between", "between_together")
NUMBERS = ("latency", "bandwidth", "burst", "cpu_seconds_per_byte", "error")  # names of a cost's fields in the file
LARGEST = 16 << 20  # maximum file size in bytes; a probe writes about 20 kB
MADE_BY = "link.json, which python -m accordion_bench.advise --probe writes"


@dataclass(frozen=True)
class LinkCost:
    """Measured cost of one kind of collective: seconds = latency rounds + 8 max(0, wire - burst) / bandwidth."""

    latency: float  # seconds per round
    bandwidth: float  # bit/s of one worker's link
    burst: float = 0.0  # bytes that take no time after a pause
    cpu: float = 0.0  # seconds of processor time, over all threads of a worker, per byte that it sends; 0 on a GPU
    error: float = 0.0  # root mean square of the line's relative errors


@dataclass(frozen=True)
class MeasuredLink:
    """Result of a probe. Costs are by kind of collective; {} = not probed, because a machine has one worker, or all."""

    workers: int  # number of workers, one process each
    machines: int  # number of machines, with the same number of workers each
    backend: str  # `gloo` or `nccl`
    device: str  # `cpu` or `cuda`
    kinds: Mapping[str, LinkCost]  # costs among all workers in one group
    # costs among the workers of a machine, on all machines at the same time
    inside: Mapping[str, LinkCost] = field(default_factory=dict)
    # costs among one worker of each machine, while all others are idle
    between: Mapping[str, LinkCost] = field(default_factory=dict)
    # costs among the workers of equal local rank, with all such groups at the same time. Bandwidth and burst are those
    # of a machine, which its workers share.
    between_together: Mapping[str, LinkCost] = field(default_factory=dict)

    @property
    def workers_per_machine(self) -> int:
        """Number of workers per machine."""
        return self.workers // self.machines


def write_measured_link(path: Path, link: MeasuredLink, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a link with the rows that it was fitted to."""
    said = {
        "format": FORMAT,
        **{key: getattr(link, key) for key in ("workers", "machines", "backend", "device")},
        "kinds": _plain(link.kinds),
        **{level: _plain(costs) for level in LEVELS if (costs := getattr(link, level))},
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(said, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _plain(costs: Mapping[str, LinkCost]) -> dict[str, dict[str, float]]:
    return {kind: dict(zip(NUMBERS, astuple(cost), strict=True)) for kind, cost in costs.items()}


def read_measured_link(path: Path) -> MeasuredLink:
    """Read a file of `write_measured_link`; ValueRefused, with the key `probe`, for other contents."""
    try:
        return _link(_said(path))
    except _NoLink as why:
        raise ValueRefused("probe", "a file that a probe of a link has written", f"{path}, {why}", MADE_BY) from None
    except ValueRefused as refused:
        raise ValueRefused(
            "probe",
            f"a file in which {refused.key} is {refused.rule}",
            f"{path}, in which it is {checks.show(refused.value)[:60]}",
            MADE_BY,
        ) from None


class _NoLink(Exception):
    """A file contains no link; the message is a relative clause with the reason."""


def _said(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise _NoLink("which is no file" if path.exists() else "which does not exist")
        if path.stat().st_size > LARGEST:
            raise _NoLink(f"which has more than {LARGEST:,} bytes")
        said = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _NoLink(f"which cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise _NoLink("which is no JSON") from None
    if not isinstance(said, dict) or "format" not in said or "kinds" not in said:
        raise _NoLink("which says nothing of a link")
    if said["format"] != FORMAT:
        raise _NoLink(f"which has format {checks.show(said['format'])[:40]} where this version reads {FORMAT}")
    return said


def _link(said: dict[str, Any]) -> MeasuredLink:
    workers = checks.integer("workers", said.get("workers"), at_least=2)
    machines = checks.integer("machines", said.get("machines"), at_least=1, at_most=workers)
    if workers % machines:
        raise ValueRefused("machines", f"a divisor of workers={workers}", machines, 1)
    levels = {level: _costs(level, said[level]) for level in LEVELS if level in said}
    backend = checks.choice("backend", said.get("backend"), ("gloo", "nccl"))
    device = checks.choice("device", said.get("device"), ("cpu", "cuda"))
    return MeasuredLink(workers, machines, backend, device, _costs("kinds", said["kinds"]), **levels)


def _costs(level: str, said: Any) -> dict[str, LinkCost]:
    if not isinstance(said, dict) or set(said) != set(KINDS):
        raise ValueRefused(level, f"a group of {', '.join(KINDS)}", said, "")
    return {kind: _cost(f"{level}.{kind}", said[kind]) for kind in KINDS}


def _cost(key: str, said: Any) -> LinkCost:
    if not isinstance(said, dict):
        raise ValueRefused(key, "a group of numbers", said, "")

    def number(name: str) -> float:
        limit = {"above" if name == "bandwidth" else "at_least": 0}
        try:
            return checks.number(f"{key}.{name}", said.get(name), **limit, instead=0)
        except OverflowError:  # an integer beyond all floats
            raise ValueRefused(f"{key}.{name}", "a number that a link can have", "larger", 0) from None

    return LinkCost(*map(number, NUMBERS))


CUSTOM = "custom"


def link_name(config: Config) -> str:
    """Return the label of a run's link: `1gbit`, or unless it is a preset's, `5 Gbit/s and 50 µs per round`."""
    choice, options = (config.get("choices") or {}).get("network") or "", config.get("network") or {}
    named = choice not in ("", CUSTOM) and not overridden("network", choice, options)
    return choice if named or "bandwidth" not in options else show_link(options)


def show_link(network: Config) -> str:
    """Describe a link: `1 Gbit/s and 50 µs per round`, with jitter, slowest link and machines if set."""
    text = f"{human_rate(network['bandwidth'])} and {network['latency'] * 1e6:g} µs per round"
    jitter, slow = network.get("jitter"), network.get("slow_bandwidth")
    text += f", {jitter * 1e6:g} µs of jitter" if jitter else ""
    text += f", the slowest {human_rate(slow)}" if slow else ""
    each, inside = network.get("workers_per_machine") or 1, network.get("inside")
    text += f", machines of {each} workers" if each > 1 else ""
    return text + (f" over {inside}" if each > 1 and isinstance(inside, str) else "")


def link_table(link: MeasuredLink) -> str:
    """Return a Markdown table with one line per kind of collective and level."""
    lines = [
        "| collective | ms a round | Mbit/s | burst, kB | processor, ns a byte | residual error |",
        "|---|---:|---:|---:|---:|---:|",
        *_lines(link.kinds, ""),
    ]
    for level in LEVELS:
        lines += _lines(getattr(link, level), f", {level.replace('_', ' ')}")
    return "\n".join(lines)


def _lines(costs: Mapping[str, LinkCost], where: str) -> list[str]:
    return [
        f"| {kind}{where} | {1e3 * cost.latency:.3f} | {cost.bandwidth / 1e6:.1f} | {cost.burst / 1e3:.0f} | "
        f"{1e9 * cost.cpu:.2f} | {100 * cost.error:.0f} % |"
        for kind, cost in costs.items()
    ]


def costs_between(link: MeasuredLink, workers_each: int) -> Mapping[str, LinkCost]:
    """Return the costs of collectives between machines by kind, if one or all workers of each machine send."""
    return (link.between if workers_each == 1 else link.between_together) or link.kinds


def network_options(link: MeasuredLink, workers_each: int | None = None) -> dict[str, Any]:
    """Return the options of `Network` for a measured link.

    Bandwidth, latency and burst are those of all-reduces; `kinds` contains the costs of each kind. For machines with
    several workers (None = as probed), `bandwidth` is that of all workers of a machine together.
    """
    each = workers_each or link.workers_per_machine
    costs = costs_between(link, each)
    usual = costs["all_reduce"]
    options: dict[str, Any] = {"bandwidth": usual.bandwidth, "latency": usual.latency}
    if usual.burst:
        options["burst"] = usual.burst
    if link.inside and each > 1:
        inner = link.inside["all_reduce"]
        options["workers_per_machine"] = each
        options["inside"] = {"bandwidth": inner.bandwidth, "latency": inner.latency}
    options["kinds"] = {
        kind: {"latency": cost.latency, "bandwidth": cost.bandwidth, "cpu": cost.cpu} for kind, cost in costs.items()
    }
    return options


def to_type(link: MeasuredLink) -> str:
    """Return the overrides that model a measured link, quoted for a shell."""
    words = ["network=custom"]
    for key, value in network_options(link).items():
        quote = "'" if isinstance(value, Mapping) else ""
        words.append(f"{quote}network.{key}={show(_short(key, value))}{quote}")
    return " ".join(words)


def _short(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {inner: _short(inner, held) for inner, held in value.items()}
    if key in RATES:
        return typed_rate(value)
    return float(f"{value:.4g}") if isinstance(value, float) else value
