"""A measured link as the options of a modelled one."""

from collections.abc import Mapping
from typing import Any

from accordion_bench.network.measured_link import LEVELS, LinkCost, MeasuredLink
from accordion_bench.options.checks import show
from accordion_bench.options.instantiate import Config
from accordion_bench.options.presets import overridden
from accordion_bench.options.units import RATES, human_rate, typed_rate

CUSTOM = "custom"


def link_name(config: Config) -> str:
    """`1gbit`; of a preset with other options, and of one that is typed whole, `5 Gbit/s and 50 µs per round`.

    Args:
        config: of a run.
    """
    choice, options = (config.get("choices") or {}).get("network") or "", config.get("network") or {}
    named = choice not in ("", CUSTOM) and not overridden("network", choice, options)
    return choice if named or "bandwidth" not in options else show_link(options)


def show_link(network: Config) -> str:
    """`1 Gbit/s and 50 µs per round`, with jitter, the slowest link and the machines where there are any."""
    text = f"{human_rate(network['bandwidth'])} and {network['latency'] * 1e6:g} µs per round"
    jitter, slow = network.get("jitter"), network.get("slow_bandwidth")
    text += f", {jitter * 1e6:g} µs of jitter" if jitter else ""
    text += f", the slowest {human_rate(slow)}" if slow else ""
    each, inside = network.get("workers_per_machine") or 1, network.get("inside")
    text += f", machines of {each} workers" if each > 1 else ""
    return text + (f" over {inside}" if each > 1 and isinstance(inside, str) else "")


def link_table(link: MeasuredLink) -> str:
    """Markdown, one line for each kind of collective and level."""
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
    """What collectives between machines take, by kind: a machine's only worker, or all its workers together.

    Args:
        link: the link.
        workers_each: of each machine.
    """
    return (link.between if workers_each == 1 else link.between_together) or link.kinds


def network_options(link: MeasuredLink, workers_each: int | None = None) -> dict[str, Any]:
    """What `Network` takes. All-reduces say what is usual, and the burst; the kinds what is their own.

    Of machines of several workers, `bandwidth` is what all workers of one have sent together.

    Args:
        link: the link.
        workers_each: of each machine; None = as many as were probed.
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
    """The overrides for a modelled link with these numbers, as a shell takes them.

    Args:
        link: the link.
    """
    return " ".join(["network=custom", *(_word(key, value) for key, value in network_options(link).items())])


def _word(key: str, value: Any) -> str:
    text = show(_short(key, value))
    return f"'network.{key}={text}'" if isinstance(value, Mapping) else f"network.{key}={text}"


def _short(key: str, value: Any) -> Any:
    """Four digits of each number, rates with their unit."""
    if isinstance(value, Mapping):
        return {inner: _short(inner, held) for inner, held in value.items()}
    if key in RATES:
        return typed_rate(value)
    return float(f"{value:.4g}") if isinstance(value, float) else value
