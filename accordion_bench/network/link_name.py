"""What a link is called: by its preset, or by its numbers where somebody has typed others."""

from accordion_bench.options.instantiate import Config
from accordion_bench.options.presets import overridden
from accordion_bench.options.units import human_rate

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
