"""Cluster that advice is for: workers, machines, cores and links, from the command line or from a probed link."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from accordion_bench.network.link_model import Network
from accordion_bench.network.links import MeasuredLink, costs_between, network_options, read_measured_link
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused, show
from accordion_bench.options.conf_dir import read_options, yaml_files
from accordion_bench.options.instantiate import build
from accordion_bench.options.override import taken
from accordion_bench.options.units import rate, without_units

OWN = ("workers", "machines", "workers_per_machine")
SLOWEST = 1e5  # bit/s; a smaller number without a unit is a mistake


@dataclass(frozen=True)
class Machines:
    """Number of machines, and of workers on each."""

    count: int
    workers_each: int

    @property
    def workers(self) -> int:
        return self.count * self.workers_each


def split(overrides: Sequence[str]) -> tuple[Machines, list[str]]:
    """Split the overrides into the cluster's size and the others; ConfigError for a bad number or rate."""
    said, rest = taken(overrides, OWN)
    numbers = {key: _integer(key, value, 2 if key == "workers" else 1) for key, value in said.items()}
    for key, _, value in (override.lstrip("+").partition("=") for override in rest):
        if key == "network.workers_per_machine":
            raise ConfigError(f"{key} must be left out here, got {value}; type workers_per_machine={value}")
    refuse_rate_without_unit(rest)
    return _machines(**numbers), rest


def _machines(workers: int | None = None, machines: int | None = None, workers_per_machine: int = 1) -> Machines:
    if workers is None and machines is None:
        raise ConfigError("workers must be given, got none; type workers=16, or machines=4 workers_per_machine=4")
    if machines is None:
        assert workers is not None
        if workers % workers_per_machine:
            rule = f"a divisor of workers={workers}"
            raise ValueRefused("workers_per_machine", rule, workers_per_machine, 1)
        machines = workers // workers_per_machine
    found = Machines(machines, workers_per_machine)
    if found.workers < 2:
        raise ValueRefused("machines", "at least 2 where each has one worker", machines, 2)
    if workers is not None and workers != found.workers:
        rule = f"machines x workers_per_machine = {machines} x {workers_per_machine}"
        raise ValueRefused("workers", rule, workers, found.workers)
    return found


def refuse_rate_without_unit(overrides: Sequence[str]) -> None:
    """Raise ValueRefused, with a rate to type, for bandwidths below 100 kbit/s: plain numbers are bit/s."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key in ("network.bandwidth", "network.slow_bandwidth") and value != "null":
            bits = rate(value)
            if bits is None:
                try:
                    bits = float(value)
                except ValueError:
                    raise ValueRefused(key, "a rate with its unit", value, "10gbit") from None
            if not bits >= SLOWEST:
                instead = f"{bits:g}gbit" if bits > 0 else "10gbit"
                raise ValueRefused(key, "a rate of at least 100kbit, with its unit", value, instead)


def _integer(key: str, value: str, at_least: int) -> int:
    number = int(value) if value.isdigit() else value
    return checks.integer(key, number, at_least=at_least, instead=16 if key == "workers" else at_least)


def link_of(path: Path | None, overrides: Sequence[str]) -> MeasuredLink | None:
    """Read the file of a probed link, None = no probe; ConfigError if it has no link, or `network=` is typed, too."""
    if path is None:
        return None
    if typed := next((word for word in overrides if word.startswith("network=")), None):
        raise ConfigError(f"--link must stand without {typed}, got both; type --link {path}, or {typed}")
    try:
        return read_measured_link(path)
    except ValueRefused as refused:
        raise ValueRefused("--link", refused.rule, refused.value, "link.json") from None


def words_of(link: MeasuredLink | None, workers_each: int) -> list[str]:
    """Return overrides that set the modelled link to the measured one. The user's overrides follow and take precedence.

    `workers_each` is the number of workers per machine.
    """
    if link is None:
        return []
    options = network_options(link, workers_each)
    return ["network=custom", *(f"network.{key}={show(value)}" for key, value in options.items())]


def error_of(link: MeasuredLink | None, workers_each: int) -> float:
    """Return the mean relative error of the lines fitted to a probe; 0 without a probe."""
    return 0.0 if link is None else mean(cost.error for cost in costs_between(link, workers_each).values())


def with_algorithm(network: Mapping[str, Any], typed: Sequence[str], backend: str) -> dict[str, Any]:
    """Return the link's options with the backend's algorithm, unless an override sets `network.algorithm`.

    It is `cheapest` with `nccl` or several workers per machine, otherwise `ring`.
    """
    if any(word.lstrip("+").startswith("network.algorithm=") for word in typed):
        return dict(network)
    several = (network.get("workers_per_machine") or 1) > 1
    return {**network, "algorithm": "cheapest" if backend == "nccl" or several else "ring"}


def link_named(
    network: str | Mapping[str, Any] | Network, workers_per_machine: int, inside: str | None
) -> tuple[Network, dict[str, Any]]:
    """Return the links, and their options for the advice; ConfigError if the name or an option is unknown."""
    if isinstance(network, Network):
        told = {key: getattr(network, key) for key in ("bandwidth", "latency", "workers_per_machine")}
        return network, told
    files = yaml_files("network")
    if isinstance(network, str):
        chosen, own = checks.choice("network", network, [name for name in files if name != "custom"]), {}
    else:
        chosen, own = "custom", dict(network)
    machine = {"workers_per_machine": workers_per_machine, "inside": inside}
    options = without_units({**read_options(files[chosen]), **machine, **own})
    link: Network = build(options, "network")
    return link, {key: value for key, value in options.items() if key != "_target_"}


@dataclass(frozen=True)
class Cluster:
    """Workers, links and cores of a cluster."""

    network: Network  # links between the workers
    workers: int  # A
    cores: float = math.inf  # cores per worker, shared by computation, codecs and gloo; infinity = nothing is shared

    @property
    def slowdown(self) -> float:
        """Factor by which computation takes longer where workers share a core; 1 = each has at least one core."""
        return max(1.0, 1.0 / self.cores)

    def at(self, bandwidth: float) -> "Cluster":
        """Return the same cluster with another bandwidth in bit/s between machines."""
        return replace(self, network=self.network.at(bandwidth))


def cluster_like_here(network: Network, workers: int, device: str, threads: int) -> Cluster:
    """Return a cluster of machines with as many cores as this one, shared by their workers.

    All compute threads of a worker count as one. On a GPU codecs slow computation down, because the kernels of the
    backward pass fill the device; communication does not.
    """
    if device != "cpu":
        return Cluster(network.without_cpu(), workers, 1.0)
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = min(network.workers_per_machine, workers) * threads
    return Cluster(network, workers, here / each)
