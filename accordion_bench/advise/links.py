"""The cluster's links: a probe's file in the place of a preset, and the collectives that its backend has."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from accordion_bench.network.link_options import costs_between, network_options
from accordion_bench.network.measured_link import MeasuredLink, read_measured_link
from accordion_bench.options.checks import ConfigError, ValueRefused, show


def link_of(path: Path | None, overrides: Sequence[str]) -> MeasuredLink | None:
    """What a probe has written.

    Args:
        path: of its file; None = no probe.
        overrides: that were typed.

    Raises:
        ConfigError: the file is none of a link, or another link is typed beside.
    """
    if path is None:
        return None
    if typed := next((word for word in overrides if word.startswith("network=")), None):
        raise ConfigError(f"--link must stand without {typed}, got both; type --link {path}, or {typed}")
    try:
        return read_measured_link(path)
    except ValueRefused as refused:
        raise ValueRefused("--link", refused.rule, refused.value, "link.json") from None


def words_of(link: MeasuredLink | None, workers_each: int) -> list[str]:
    """The overrides that make the modelled link the measured one; those that are typed come after, and win.

    Args:
        link: that was probed; None = none.
        workers_each: of each machine.
    """
    if link is None:
        return []
    options = network_options(link, workers_each)
    return ["network=custom", *(f"network.{key}={show(value)}" for key, value in options.items())]


def error_of(link: MeasuredLink | None, workers_each: int) -> float:
    """Relative error of the lines that were fitted to a probe; 0 = the link is taken as it is typed.

    Args:
        link: that was probed; None = none.
        workers_each: of each machine.
    """
    return 0.0 if link is None else mean(cost.error for cost in costs_between(link, workers_each).values())


def with_algorithm(network: Mapping[str, Any], typed: Sequence[str], backend: str) -> dict[str, Any]:
    """The link's options with the collectives of the backend, where none are typed: NCCL chooses, gloo has rings.

    Args:
        network: options of the link.
        typed: overrides.
        backend: `nccl` or `gloo`; machines of several workers are taken to have a library that chooses, too.
    """
    if any(word.lstrip("+").startswith("network.algorithm=") for word in typed):
        return dict(network)
    several = (network.get("workers_per_machine") or 1) > 1
    return {**network, "algorithm": "cheapest" if backend == "nccl" or several else "ring"}
