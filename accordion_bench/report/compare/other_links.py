"""Modelled time of runs on links of other bandwidths than their own."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accordion_bench.network.link_model import Exchanges, Network, exchanges_from
from accordion_bench.report.compare.arms import Arm

NEEDED = ("modelled_seconds", "modelled_comm_seconds", "wire_bytes", "rounds")


def on_link(arm: Arm, bandwidth: float) -> Network:
    """The network of an arm's runs, as its slowest link lets it be, with links of another bandwidth, all alike."""
    own = {"bandwidth": bandwidth, "latency": 0.0, **(arm.config.get("network") or {})}
    return Network(**{key: value for key, value in own.items() if key != "_target_"}).at(bandwidth)


def modelled_seconds(arm: Arm, bandwidths: Sequence[float], epochs: Sequence[int] | None = None) -> NDArray[np.float64]:
    """Modelled time on other links: T = T_compute + what of communication is not hidden there.

    Args:
        arm: whose rows have modelled columns; in rows of older runs nothing is hidden.
        bandwidths: bit/s that a worker sends; everything else stays that of the runs' network.
        epochs: counted from 0; None = all until the shortest run's end.

    Returns:
        seconds [bandwidths, seeds, epochs]; NaN where the rows have no model.
    """
    if epochs is None:
        epochs = range(min(len(run.rows) for run in arm.runs))
    links = [on_link(arm, bandwidth) for bandwidth in bandwidths]
    found = [_of_rows([run.rows[epoch] for epoch in epochs], links, arm.workers) for run in arm.runs]
    return np.array(found).swapaxes(0, 1)


def _of_rows(rows: Sequence[Mapping[str, Any]], links: Sequence[Network], workers: int) -> NDArray[np.float64]:
    """Seconds [links, rows]. Most rows of a run have the same exchanges, only more of them: each is modelled once."""
    seconds = np.full((len(links), len(rows)), np.nan)
    known = [place for place, row in enumerate(rows) if all(row.get(name) is not None for name in NEEDED)]
    exchanges: dict[str, Exchanges] = {}
    times: dict[str, NDArray[np.float64]] = {}
    own, wire, rounds = np.zeros((3, len(known)))
    for i, row in enumerate(rows[place] for place in known):
        own[i] = row["modelled_seconds"] - row.get("modelled_exposed_seconds", row["modelled_comm_seconds"])
        wire[i], rounds[i] = (row[key] + (row.get(f"control_{key}") or 0) for key in ("wire_bytes", "rounds"))
        for kind in row.get("seconds_by_bucket") or []:
            key = repr([kind[0], kind[2:]])
            one = exchanges.setdefault(key, exchanges_from([kind])[0])
            times.setdefault(key, np.zeros(len(known)))[i] += kind[1]
            wire[i] -= kind[1] * sum(bucket.wire for bucket in one.buckets)
            rounds[i] -= kind[1] * sum(bucket.rounds for bucket in one.buckets)
    wire, rounds = wire.clip(0), rounds.clip(0)
    for link, of_link in zip(links, seconds, strict=True):
        exposed = sum((times[key] * link.left(one) for key, one in exchanges.items()), np.zeros(len(known)))
        outside = _outside(link, wire, rounds, workers)
        of_link[known] = own + exposed + outside
        if link.burst:  # see `Network.exposed`
            of_link[known] = np.maximum(of_link[known], outside + _alone(link, exchanges, times))
    return seconds


def _alone(
    link: Network, exchanges: Mapping[str, Exchanges], times: Mapping[str, NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Seconds of all exchanges, hidden or not."""
    each = {key: sum(link.of_bucket(bucket, one.workers) for bucket in one.buckets) for key, one in exchanges.items()}
    return np.sum([times[key] * seconds for key, seconds in each.items()], axis=0)


def _outside(
    link: Network, wire: NDArray[np.float64], rounds: NDArray[np.float64], workers: int
) -> NDArray[np.float64]:
    """Seconds of what travels in no exchange."""
    if link.flat:
        return wire * link.seconds(1.0, 0.0, workers) + rounds * link.seconds(0.0, 1.0, workers)
    return np.array([link.seconds(*pair, workers) for pair in zip(wire, rounds, strict=True)])
