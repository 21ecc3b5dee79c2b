"""Times of runs and arms: modelled times at a common speed and on other links, and comparability of measured times."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accordion_bench.network.link_model import Exchanges, Network, exchanges_from
from accordion_bench.processes.waiting import BUSY
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.parallel import each
from accordion_bench.report.read import Run
from accordion_bench.report.read.metrics_rows import MetricsRows
from accordion_bench.report.read.schema import network_of
from accordion_bench.runs.metrics import is_number

# keys of configuration and environment that affect a step's computation time, besides its samples
COMPUTES = (
    "model",
    "dataset",
    "precision",
    "compile",
    "channels_last",
    "bn",
    "micro_batch_size",
    "clip_norm",
    "clip_at",
)
RUNS_ON = ("processor", "cpu_cores", "gpus", "threads")
SENT = ("wire_bytes", "rounds")
MODELLED = ("modelled_seconds", "modelled_exposed_seconds", "seconds_by_bucket")


def at_common_speed(runs: Sequence[Run]) -> list[Run]:
    """Rescale the modelled columns of runs as if all that compute the same had computed at the same speed.

    A run's slowness is its median computation time of a step over the median of these over all runs that compute the
    same. All measured inputs of the model are divided by it: computation, updates, codec. The relative spread of step
    times, which determines the wait for the slowest worker, is also replaced by the median over these runs. If some of
    the runs are known to have had a quiet machine, medians are taken over those only: other load slows the parts of a
    step unequally. Medians of the whole run are used for every epoch, so that curves stay monotonic in time.

    The summary gets `modelled_slowness`, this quotient, and `own_modelled_seconds`, the run's original modelled time.
    Runs that overlap exchange and backward pass in another thread share no speed, because the exchange slows their
    computation down; nor do users' own loops, which may compute something else. Runs of older versions are unchanged.
    """
    alike: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if is_shared(run):
            alike[what_computes(run)].append(run)
    common = {key: Common.of(members) for key, members in alike.items() if len(members) > 1}
    pairs = [(run, common.get(what_computes(run)) if is_shared(run) else None) for run in runs if _is_modelled(run)]
    remodelled = iter(each(_at_speed, pairs, "comparing"))
    return [next(remodelled) if _is_modelled(run) else run for run in runs]


def quiet(runs: Sequence[Run]) -> Sequence[Run]:
    """Return the runs whose processes are known to have had free cores; all runs if there are none."""
    return [run for run in runs if (share := waited(run)) is not None and share < BUSY] or runs


def waited(run: Run) -> float | None:
    """Return the share of its time that a run has waited for a core; None if unknown."""
    share = run.summary.get("waited_for_cores")
    return share if is_number(share) else None


class Common(NamedTuple):
    """Medians over runs that compute the same.

    compute: by samples per step: the number of runs with such steps, and the median of their medians in seconds.
    spread: median relative spread of step times.
    """

    compute: dict[int, tuple[int, float]]
    spread: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Common":
        """Compute the medians of some runs; for each kind of step over the quiet runs that have it."""
        found: dict[int, list[Run]] = defaultdict(list)
        for run in runs:
            for samples in _computing(run):
                found[samples].append(run)
        compute = {
            samples: (len(having), statistics.median(_computing(run)[samples][1] for run in quiet(having)))
            for samples, having in found.items()
        }
        return cls(compute, statistics.median(map(_spread, quiet(runs))))


def is_shared(run: Run) -> bool:
    """Whether the computation time of its steps may be compared with that of other runs."""
    beside = run.summary.get("processes") != 1 and (run.config.get("comm") or {}).get("overlap") is not False
    elsewhere = len(set(map(_runs_on, run.environments))) > 1  # resumed on another machine
    return run.finished and not run.attached and not beside and not elsewhere and bool(_computing(run))


def what_computes(run: Run) -> str:
    """Return a text that is the same for runs whose steps of equally many samples compute the same."""
    device = run.config.get("device")
    parts = [run.summary.get("workers"), run.summary.get("processes"), device]
    parts += [run.config.get(key) for key in COMPUTES]
    return json.dumps([*parts, _runs_on(run.environment)], sort_keys=True)


def _runs_on(environment: dict[str, Any]) -> str:
    versions = environment.get("versions") or {}
    return json.dumps([*(environment.get(key) for key in RUNS_ON), versions.get("torch")], sort_keys=True)


def _computing(run: Run) -> dict[int, tuple[int, float]]:
    """Return (number of steps, median seconds) by samples per step, over the whole run."""
    usual = (run.rows[-1].get("seconds_by_phase") or []) if run.rows else []
    return {phase: (steps, seconds) for part, phase, steps, seconds in usual if part == "compute" and seconds > 0}


def _spread(run: Run) -> float:
    """Return the relative spread of the waits of a run, for its most frequent kind of exchange."""
    kinds = [kind for kind in exchanges_from(run.rows[-1]["seconds_by_bucket"]) if kind.wait > 0]
    most = max(kinds, key=lambda kind: kind.times, default=None)
    return most.spread / most.wait if most else 0.0


def _is_modelled(run: Run) -> bool:
    """Whether the rows contain the inputs of the model; those of older versions do not."""
    return bool(run.rows) and all(run.rows[-1].get(key) is not None for key in ("seconds_by_phase", *MODELLED))


def _at_speed(pair: tuple[Run, Common | None]) -> Run:
    run, common = pair
    own, slowness = _computing(run), 1.0
    if common:  # the kind of step that most runs have; of several the most frequent one in this run
        samples = max(own, key=lambda samples: (common.compute[samples][0], own[samples][0]))
        slowness = own[samples][1] / common.compute[samples][1]
    last = run.rows[-1]
    whole = Whole(
        {(part, str(phase)): seconds for part, phase, _, seconds in last["seconds_by_phase"]},
        exchanges_from(last["seconds_by_bucket"]),
        network_of(run.config),
        slowness,
    )
    changed = [_remodelled(run, row, whole, common) for row in run.rows[:-1]]
    changed.append(_remodelled(run, last, whole, common) if common else last)
    columns = {key: [row.get(key) for row in changed] for key in MODELLED}
    if any(row.get("looks") for row in run.rows):
        columns["looks"] = [_looks(*pair) for pair in zip(run.rows, columns["modelled_seconds"], strict=True)]
    rows = MetricsRows.of(run.rows).replaced(**columns)
    kept = {key: rows[-1][key] for key in MODELLED if key in run.summary}
    summary = {**run.summary, **kept, "modelled_slowness": slowness}
    return replace(run, rows=rows, summary={**summary, "own_modelled_seconds": run.summary.get("modelled_seconds")})


class Whole(NamedTuple):
    """Totals of a finished run.

    usual: median seconds of a step by part and phase.
    exchanges: all exchanges until the end.
    network: network on which it was modelled.
    slowness: speed relative to the runs that compute the same.
    """

    usual: dict[tuple[str, str], float]
    exchanges: Sequence[Exchanges]
    network: Network
    slowness: float


def _remodelled(run: Run, row: Mapping[str, Any], whole: Whole, common: Common | None) -> Mapping[str, Any]:
    """Return the modelled columns of a row, computed with the medians of the whole run at another speed."""
    if any(row.get(key) is None for key in ("seconds_by_phase", *MODELLED, *SENT)):
        return row
    local_workers = run.summary["workers"] // run.summary.get("processes", 1)
    now = row["seconds_by_phase"]
    later = sum(steps * (whole.usual.get((part, str(phase)), own) - own) for part, phase, steps, own in now)
    own = (row["modelled_seconds"] - row["modelled_exposed_seconds"] + later / local_workers) / whole.slowness
    kinds = _in_hindsight(exchanges_from(row["seconds_by_bucket"]), whole.exchanges)
    if common:
        kinds = [_at(whole.slowness, common.spread, kind) for kind in kinds]
    wire_bytes, rounds = (row[key] + (row.get(f"control_{key}") or 0) for key in SENT)
    exposed = whole.network.exposed(kinds, wire_bytes, rounds, run.summary["workers"], own)
    as_read = [[*kind[:3], [list(bucket) for bucket in kind.buckets], kind.spread] for kind in kinds]
    return {"modelled_seconds": own + exposed, "modelled_exposed_seconds": exposed, "seconds_by_bucket": as_read}


def _looks(row: Mapping[str, Any], seconds: float | None) -> list[dict[str, Any]] | None:
    """Return the evaluations within a row's epoch, with modelled times scaled like that of the row."""
    looks, before = row.get("looks"), row.get("modelled_seconds")
    if not looks or not before or seconds is None:
        return looks
    return [
        look
        if look.get("modelled_seconds") is None
        else {**look, "modelled_seconds": look["modelled_seconds"] * seconds / before}
        for look in looks
    ]


def _in_hindsight(kinds: Sequence[Exchanges], last: Sequence[Exchanges]) -> list[Exchanges]:
    """Return the exchanges until some epoch with the median times of the whole run; kinds are only ever added."""
    found = []
    for now, then in zip(kinds, last, strict=False):
        if now.workers == then.workers and len(now.buckets) == len(then.buckets):
            pairs = zip(now.buckets, then.buckets, strict=True)
            buckets = [whole._replace(wire=own.wire, rounds=own.rounds) for own, whole in pairs]
            now = then._replace(times=now.times, buckets=buckets)
        found.append(now)
    return found


def _at(slowness: float, spread: float, kind: Exchanges) -> Exchanges:
    buckets = [
        bucket._replace(**{part: getattr(bucket, part) / slowness for part in ("ready", "encode", "decode")})
        for bucket in kind.buckets
    ]
    wait = kind.wait / slowness
    return kind._replace(wait=wait, spread=spread * wait, buckets=buckets)


def is_ddp(config: dict[str, Any]) -> bool:
    """Whether a run used DistributedDataParallel, which cannot separate communication from computation."""
    return (config.get("comm") or {}).get("engine") == "ddp"


def communicates(arm: Arm) -> bool:
    """Whether measured times include communication: each process has one worker."""
    return bool(arm.values("comm_seconds")) or is_ddp(arm.config)


def shares_process(arm: Arm) -> bool:
    """Whether its workers share a process, so nothing was sent over a link; False for a user's own loop (unknown)."""
    return not arm.attached and not communicates(arm)


def comparable(arm: Arm, dense: Arm, column: str) -> bool:
    """Whether times compare: same machine, and for `seconds` both or neither with communication, else same network."""
    if unlike([arm, dense]):
        return False
    if column == "seconds":
        return communicates(arm) == communicates(dense)
    return bool(arm.config.get("network") == dense.config.get("network"))


def machine(run: Run) -> str:
    """Return processor and GPUs of a run; for one that was resumed elsewhere, of each machine."""
    return ", then ".join(machines(run))


def machines(run: Run) -> list[str]:
    """Return the distinct machines of a run."""
    return list(dict.fromkeys(map(_machine, run.environments)))


def _machine(environment: dict[str, Any]) -> str:
    cores = f"{environment.get('processor') or 'unknown processor'}, {environment.get('cpu_cores', '?')} cores"
    return ", ".join([cores, *map(str, environment.get("gpus") or [])])


def unlike(arms: Iterable[Arm]) -> str:
    """Return why times of these arms are not comparable, to follow `because`; "" if no reason is known."""
    runs = [run for arm in arms for run in arm.runs]
    if len({machine for run in runs for machine in machines(run)}) > 1:
        return "the runs come from different machines"
    if len({environment.get("threads") for run in runs for environment in run.environments} - {None}) > 1:
        return "the runs differ in threads per process"
    return ""


NEEDED = ("modelled_seconds", "modelled_comm_seconds", "wire_bytes", "rounds")


def on_link(arm: Arm, bandwidth: float) -> Network:
    """Return the network of an arm's runs, with the limits of its slowest link, at another bandwidth of all links."""
    own = {"bandwidth": bandwidth, "latency": 0.0, **(arm.config.get("network") or {})}
    return network_of({"network": own}).at(bandwidth)


def modelled_seconds(arm: Arm, bandwidths: Sequence[float], epochs: Sequence[int] | None = None) -> NDArray[np.float64]:
    """Return the modelled time on other links: T = T_compute + T_exposed, the communication time that is not hidden.

    Args:
        arm: arm whose rows have modelled columns; in rows of older versions nothing is hidden.
        bandwidths: send bandwidths of a worker in bit/s; everything else is that of the runs' network.
        epochs: epochs, counted from 0; None = all until the shortest run's end.

    Returns:
        seconds [bandwidths, seeds, epochs]; NaN where a row has no model.
    """
    if epochs is None:
        epochs = range(min(len(run.rows) for run in arm.runs))
    links = [on_link(arm, bandwidth) for bandwidth in bandwidths]
    found = [_of_rows([run.rows[epoch] for epoch in epochs], links, arm.workers) for run in arm.runs]
    return np.array(found).swapaxes(0, 1)


def _of_rows(rows: Sequence[Mapping[str, Any]], links: Sequence[Network], workers: int) -> NDArray[np.float64]:
    """Return seconds [links, rows]. Rows of a run mostly repeat the same exchanges, so each is modelled once."""
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
    """Return the seconds of all exchanges, whether hidden or not."""
    each = {key: sum(link.of_bucket(bucket, one.workers) for bucket in one.buckets) for key, one in exchanges.items()}
    return np.sum([times[key] * seconds for key, seconds in each.items()], axis=0)


def _outside(
    link: Network, wire: NDArray[np.float64], rounds: NDArray[np.float64], workers: int
) -> NDArray[np.float64]:
    """Return the seconds of bytes and rounds that belong to no exchange."""
    if link.flat:
        return wire * link.seconds(1.0, 0.0, workers) + rounds * link.seconds(0.0, 1.0, workers)
    return np.array([link.seconds(*pair, workers) for pair in zip(wire, rounds, strict=True)])
