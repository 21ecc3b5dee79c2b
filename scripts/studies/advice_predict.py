"""Predictions of the advice's own model, from a trial and from probes of the links."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from accordion_bench.advising.advice import DrawnMeasurements, interval
from accordion_bench.advising.cluster import Cluster
from accordion_bench.advising.predict import MethodCost, step
from accordion_bench.advising.step_times import StepTimes
from accordion_bench.netlab import options
from accordion_bench.network.link_model import Network
from accordion_bench.network.links import LinkCost, MeasuredLink, read_measured_link
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes.environment import cores
from scripts.studies import advice_cells as cells
from scripts.studies.advice_cells import ALONE, Cell, period
from scripts.studies.advice_trial import SAME, cost_from, times_from


def link_folder(out: Path, hosts: int, rate: str) -> Path:
    """Return the folder to which the probe of a link writes."""
    return out / "links" / f"{hosts}-hosts-{rate}"


def told(file: Path) -> tuple[int, str]:
    """Return the hosts and the rate in the name of the folder."""
    hosts, rate = file.parent.name.split("-hosts-")
    return int(hosts), rate


def beside(hosts: int) -> int:
    """Return the number of processes whose codecs run at the same time; hosts beyond the cores wait for their turn."""
    return min(hosts, cores())


def trial_of(trials: Sequence[Cell], model: str, hosts: int) -> Cell | None:
    """Return step and codec times with this number of hosts, each with its own cores; None = not tried.

    The step time is that of as many processes as hosts, divided by the number of processes that share a core: two
    processes on two cores slow each other down more than four do. Codecs are too short for this, and their times are
    those of as many processes as cores.
    """
    steps = cells.find(trials, model=model, processes=hosts)
    codecs = cells.find(trials, model=model, processes=beside(hosts))
    if steps is None or codecs is None:
        return None
    times = times_from(steps["step"]).scaled(beside(hosts) / hosts)
    alike = times_from(codecs["step"]).steps  # turns at a core are no noise for which others wait
    return {**codecs, "hosts": hosts, "step": asdict(replace(times, steps=alike))}


def links(out: Path, hosts: int) -> dict[float, MeasuredLink]:
    """Return every probe of this number of hosts behind limited links, by their rate in bit/s.

    Raises:
        ConfigError: no probe exists.
    """
    files = {options.rate(told(file)[1]): file for file in sorted(out.glob(f"links/{hosts}-hosts-*/link.json"))}
    found = {rate: read_measured_link(file) for rate, file in files.items() if rate is not None}
    if not found:
        raise ConfigError(
            f"{out / 'links'} must hold a probe of {hosts} hosts, got none; "
            f"type python -m scripts.studies.validate_advice probe --hosts {hosts}"
        )
    return found


def link_at(rate: float, probed: Mapping[float, MeasuredLink]) -> Mapping[str, LinkCost]:
    """Return the link that a probe at this rate would measure, interpolated linearly over log rate between probed
    links.

    Args:
        rate: limit of the links in bit/s.
        probed: probed links by that rate. A link outside their range has the shares of the nearest.
    """
    rates = sorted(probed)

    def between(kind: str, part: str, per_rate: bool = False) -> float:
        values = [getattr(probed[known].kinds[kind], part) / (known if per_rate else 1.0) for known in rates]
        return float(np.interp(math.log(rate), np.log(rates), values)) * (rate if per_rate else 1.0)

    def cost(kind: str) -> LinkCost:
        shares = {part: between(kind, part, per_rate=True) for part in ("bandwidth", "burst")}
        same = {part: between(kind, part) for part in ("latency", "cpu", "error")}
        return LinkCost(**shares, **same)

    return {kind: cost(kind) for kind in probed[rates[0]].kinds}


def cluster_of(kinds: Mapping[str, LinkCost], hosts: int) -> Cluster:
    """Return a cluster of hosts behind such links that share this machine's cores, one worker on one thread each."""
    told = {kind: {"latency": one.latency, "bandwidth": one.bandwidth, "cpu": one.cpu} for kind, one in kinds.items()}
    ring = kinds["all_reduce"]
    return Cluster(Network(ring.bandwidth, ring.latency, burst=ring.burst or None, kinds=told), hosts, cores() / hosts)


def costs_of(trial: Cell) -> dict[str, MethodCost]:
    """Return the costs by arm, with its period; DistributedDataParallel counts as dense."""
    costs = {name: cost_from(said) for name, said in trial["methods"].items()}
    costs |= {name: replace(costs[other], name=name) for name, other in SAME.items() if other in costs}
    costs[ALONE] = MethodCost(ALONE, (), ())
    return {name: replace(cost, period=period(name)) for name, cost in costs.items()}


def parts(times: StepTimes, cost: MethodCost, cluster: Cluster) -> dict[str, float]:
    """Return the modelled parts of a step, as the clock of a run counts them, without slowdown by other processes."""
    stages = cost.stages(times.ready, cluster.workers)
    network = cluster.network
    taken = {
        "encode": math.fsum(stage.encode for stage in stages),
        "comm": math.fsum(network.of_bucket(stage, cluster.workers, network.burst) for stage in stages),
        "decode": math.fsum(stage.decode for stage in stages),
    }
    own = {part: seconds / cost.period for part, seconds in taken.items()}
    return {"compute": times.backward_end, **own, "exposed": step(times, cost, cluster).exposed}


def rows(trials: Sequence[Cell], out: Path) -> Iterator[Cell]:
    """Return the seconds of a step of each arm of each trial behind each probed link, with their interval.

    Args:
        trials: trials of this machine.
        out: folder with the probes.
    """
    for file in sorted(out.glob("links/*/link.json")):
        (hosts, rate), kinds = told(file), read_measured_link(file).kinds
        for model in dict.fromkeys(trial["model"] for trial in trials):
            if trial := trial_of(trials, model, hosts):
                times, cluster = times_from(trial["step"]), cluster_of(kinds, hosts)
                drawn = DrawnMeasurements(times, cluster, statistics.mean(one.error for one in kinds.values()))
                for arm, cost in costs_of(trial).items():
                    seconds = [one.seconds for one in drawn.steps(cost)]
                    found = interval(step(times, cost, cluster).seconds, seconds)
                    yield {
                        **{"model": trial["model"], "hosts": hosts, "rate": rate, "arm": arm},
                        **{"seconds": found.value, "low": found.low, "high": found.high},
                        "parts": parts(times, cost, cluster),
                    }
