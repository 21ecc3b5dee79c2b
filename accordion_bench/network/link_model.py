"""Network model: time of the collectives of a run on given links, and of a step whose threads share cores.

`Network` models the links. `step_ends` models a step with two threads per worker: one computes, the other encodes,
communicates and decodes. Computation and codecs demand one core; a collective demands its processor time divided by its
duration. Cores are shared max-min fairly, as by operating systems, and a thread slows down in proportion to its share
of its demand. With two cores per worker the result equals `Network.end`.
"""

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.special import ndtr

from accordion_bench.comm.stages import Stage
from accordion_bench.network.collective_costs import (
    PAIRS,
    UNEVEN,
    Hop,
    KindCost,
    cheapest,
    checked_kinds,
    inner_hop,
    link_share,
    payload_and_times,
    ring,
)
from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.option import NEAREST, Choice, check_options, option, with_options

if TYPE_CHECKING:
    from accordion_bench.comm.collectives import Comm  # imports torch, which reports do not need

COLUMNS = (
    *("modelled_seconds", "modelled_exposed_seconds", "modelled_comm_seconds", "modelled_dense_comm_seconds"),
    *("seconds_by_bucket", "seconds_by_phase"),
)


class Exchanges(NamedTuple):
    """Exchanges of one kind as made by one worker alone on its machine; times are medians over the run."""

    workers: int  # number of participating workers
    times: float  # number of exchanges
    wait: float  # seconds from the start of a step until only waiting for the exchange remains
    buckets: Sequence[Stage]  # buckets in the order of their exchange; `ready` is relative to the same start
    spread: float = 0.0  # standard deviation of `wait` over steps, without outliers


OF_BUS = {"bandwidth": "bit/s of each worker, one direction, about 80 % of the bus; an assumption, not a measurement"}
OF_NVLINK = "NVLink of the A100 (600 GB/s of both directions), inside a machine: network.inside=nvlink"
OF_HAND = "a link by hand: network=custom network.bandwidth=20mbit network.latency=1ms"
OF_CUSTOM = {
    "bandwidth": "bit/s of each machine's link, one direction; 10gbit, 20mbit work too; must be given",
    "latency": "seconds per round of a collective",
}


@with_options
class Network:
    """Model of the links between and inside machines; a collective costs alpha rounds + beta bytes.

    All wire bytes use these links, also those within groups and of decisions. Work outside the clock (set-up,
    evaluation, checksums) takes no modelled time. Workers are ordered machine by machine. Source: Thakur et al. 2005.

    The delay of a message is exponentially distributed. A round ends with the last of its A messages and so takes
    jitter (1 + 1/2 + ... + 1/A) longer (Rényi 1953: the expected largest of A independent exponential delays). Every
    collective waits for the slowest machine's link; kinds with a bandwidth of their own are slowed by the same factor.
    `inside` is the name of a file in conf/network, or {bandwidth, latency}. `kinds` overrides {bandwidth, latency, cpu}
    of a kind of collective, where `cpu` is seconds of processor time per byte that a worker sends. The algorithm
    `cheapest` is the fastest of ring, tree and hierarchical.
    """

    bandwidth: float = option(
        "bit/s of each machine's link, one direction; 10gbit, 20mbit work too", default=1e9, above=0
    )
    latency: float = option(
        "seconds per round of a collective; an assumption, not a measurement", default=5e-5, at_least=0
    )
    jitter: float = option(
        "seconds, mean of the random delay of a message; null = none", default=None, at_least=0, instead=1e-4
    )
    slow_bandwidth: float | None = option(
        "bit/s of the slowest worker's link, for which all wait; null = all links are equal", default=None
    )
    burst: float = option(
        "bytes that pass an idle link in no time, as in a token bucket; null = none",
        default=None,
        at_least=0,
        instead=125000,
    )
    workers_per_machine: int = option(
        "workers that share a machine's link; null = 1", default=None, at_least=1, instead=NEAREST
    )
    inside: str | Mapping[str, float] | None = option(
        "the link inside a machine: pcie3, pcie4, pcie5, nvlink; null = a machine has one worker", default=None
    )
    algorithm: str = option(
        "of collectives: ring = all flat, as in gloo; cheapest = also trees and hierarchical, as in NCCL; null = ring",
        default=None,
        choices=("ring", "cheapest"),
    )
    kinds: Mapping[str, Any] = option(
        "overrides for one kind of collective: {all_to_all: {bandwidth: 7.5e7, latency: 1e-4}}", default=None
    )

    chosen_as = {
        name: Choice(told, {"bandwidth": bandwidth, "latency": latency}, comments=comments)
        for name, told, bandwidth, latency, comments in (
            ("100mbit", "100 Mbit/s Ethernet over TCP", 1e8, 1e-4, {}),
            ("1gbit", "1 Gbit/s Ethernet over TCP", 1e9, 5e-5, {}),
            ("10gbit", "10 Gbit/s Ethernet over TCP", 1e10, 2e-5, {}),
            ("25gbit", "25 Gbit/s Ethernet with RDMA", 2.5e10, 1e-5, {}),
            ("100gbit", "100 Gbit/s Ethernet with RDMA", 1e11, 5e-6, {}),
            ("200gbit", "200 Gbit/s Ethernet with RDMA", 2e11, 5e-6, {}),
            ("400gbit", "400 Gbit/s Ethernet with RDMA", 4e11, 5e-6, {}),
            ("internet", "sites joined by 100 Mbit/s and 30 ms", 1e8, 3e-2, {}),
            ("pcie3", "PCIe 3.0 x16, inside a machine: network.inside=pcie3", 1e11, 1e-5, OF_BUS),
            ("pcie4", "PCIe 4.0 x16, inside a machine: network.inside=pcie4", 2e11, 1e-5, OF_BUS),
            ("pcie5", "PCIe 5.0 x16, inside a machine: network.inside=pcie5", 4e11, 1e-5, OF_BUS),
            ("nvlink", OF_NVLINK, 2e12, 5e-6, OF_BUS),
            ("custom", OF_HAND, None, 5e-5, OF_CUSTOM),
        )
    }

    def __post_init__(self) -> None:
        check_options(self)
        self.jitter, self.burst = self.jitter or 0.0, self.burst or 0.0
        self.kinds = checked_kinds(self.kinds or {}, Hop(self.latency, self.bandwidth))
        if self.slow_bandwidth is not None:
            limits = {"above": 0, "at_most": self.bandwidth}
            slow = checks.number("slow_bandwidth", self.slow_bandwidth, **limits, instead=self.bandwidth / 5)
            self.kinds = _scaled(self.kinds, slow / self.bandwidth)
            self.bandwidth = slow
        self.workers_per_machine = self.workers_per_machine or 1
        if self.inside is None and self.workers_per_machine > 1:
            raise ValueRefused("inside", "a link where workers_per_machine is above 1", None, "pcie4")
        self.inner = Hop(self.latency, self.bandwidth) if self.inside is None else inner_hop(self.inside)
        self.algorithm = self.algorithm or "ring"

    def at(self, bandwidth: float) -> "Network":
        """Return a copy with another bandwidth between machines; bandwidths by kind are scaled by the same factor."""
        other = copy.copy(self)
        other.bandwidth, other.kinds = bandwidth, _scaled(self.kinds, bandwidth / self.bandwidth)
        if self.workers_per_machine == 1:
            other.inner = Hop(self.latency, bandwidth)
        return other

    def without_cpu(self) -> "Network":
        """Return a copy in which communication takes no processor time."""
        other = copy.copy(self)
        other.kinds = {kind: cost._replace(cpu=0.0) for kind, cost in self.kinds.items()}
        return other

    @property
    def flat(self) -> bool:
        """Whether the time of a collective is linear in bytes and rounds."""
        return self.algorithm == "ring" and self.workers_per_machine == 1

    def cost(self, kind: str) -> KindCost:
        """Return the cost of a kind of collective between machines; unequal messages have that of an all-to-all."""
        return self.kinds.get("all_to_all" if kind == UNEVEN else kind) or KindCost(self.latency, self.bandwidth)

    def seconds(
        self, wire_bytes: float, rounds: float, workers: int, kind: str = "all_reduce", tokens: float = 0.0
    ) -> float:
        """Return the modelled seconds: 8 wire_bytes / bandwidth + rounds (latency + jitter H_A) on equal links.

        Args:
            wire_bytes, rounds: bytes that one worker sends, as the ledger counts them, and successive rounds.
            workers: A, the number of participating workers; H_A = 1 + 1/2 + ... + 1/A.
            kind: kind of collective.
            tokens: bytes that pass a machine's link in no time; 0 = the link was not idle before.
        """
        slowest = self.jitter * harmonic(min(workers, 2) if kind == PAIRS else workers)
        cost, per_machine = self.cost(kind), self.workers_per_machine
        outer = Hop(cost.latency + slowest, cost.bandwidth, tokens)
        if workers < 2 or self.flat:
            return outer.seconds(wire_bytes, rounds)
        take = ring if self.algorithm == "ring" else cheapest
        payload, times = payload_and_times(kind, wire_bytes, rounds, workers)
        return take(kind, payload, times, workers, per_machine, outer, self.inner)

    def of_bucket(self, bucket: Stage, workers: int, tokens: float = 0.0) -> float:
        """Return the seconds of the collectives of one bucket; `tokens` bytes pass a machine's link in no time."""
        taken = 0.0
        for kind, (wire, rounds) in bucket.by_kind.items():
            taken += self.seconds(wire, rounds, workers, kind, tokens)
            tokens = max(0.0, tokens - link_share(kind, workers, self.workers_per_machine) * wire)
        return taken

    def carried(self, bucket: Stage, workers: int) -> float:
        """Return the bytes of one bucket that a machine's link carries."""
        found = bucket.by_kind.items()
        return sum(link_share(kind, workers, self.workers_per_machine) * wire for kind, (wire, _) in found)

    def processor_seconds(self, bucket: Stage) -> float:
        """Return the seconds of processor time that the collectives of one bucket use on a worker's cores."""
        return math.fsum(self.cost(kind).cpu * wire for kind, (wire, _) in bucket.by_kind.items())

    def end(self, buckets: Sequence[Stage], workers: int) -> float:
        """Return the end of the last bucket, relative to the same start as `ready`; one thread processes the buckets.

        end_k = max(ready_k, end_(k-1)) + encode_k + comm_k + decode_k
        """
        end = idle_since = 0.0
        tokens = self.burst
        for bucket in buckets:
            begin = max(bucket.ready, end) + bucket.encode
            tokens = min(self.burst, tokens + (begin - idle_since) * self.bandwidth / 8)
            idle_since = begin + self.of_bucket(bucket, workers, tokens)
            tokens = max(0.0, tokens - self.carried(bucket, workers))
            end = idle_since + bucket.decode
        return end

    def exposed(
        self, kinds: Sequence[Exchanges], wire_bytes: float, rounds: float, workers: int, own: float = math.inf
    ) -> float:
        """Return the seconds that communication and codec add to a worker's computation over the run.

        For each exchange, this is the time that remains when the worker can only wait; all other traffic counts fully.
        An exchange starts when the last of A workers is ready, `spread` e_A after the mean worker. e_A is the expected
        largest of A standard normal numbers; the times of workers are assumed independent and normally distributed.
        Each exchange finds the full burst, which refills only while the link is idle. The total over the run is
        therefore bounded below by the time of the link without a burst.

        Args:
            kinds: exchanges by kind.
            wire_bytes, rounds, workers: bytes that one worker sends, and rounds, inside and outside exchanges; workers.
            own: seconds that a worker computes in the run; infinity = every burst refills completely.
        """
        inside = math.fsum(kind.times * self.left(kind) for kind in kinds)
        found = inside + self._outside(kinds, wire_bytes, rounds, workers)
        return max(found, self.alone(kinds, wire_bytes, rounds, workers) - own) if self.burst else found

    def left(self, kind: Exchanges) -> float:
        """Return the seconds of one exchange that remain when the worker can only wait for it."""
        return max(0.0, self.end(late(kind), kind.workers) - kind.wait)

    def alone(self, kinds: Sequence[Exchanges], wire_bytes: float, rounds: float, workers: int) -> float:
        """Return the seconds of all communication, hidden or not; arguments as for `exposed`."""
        if not self.kinds and self.flat:
            return self.seconds(wire_bytes, rounds, workers)
        inside = [kind.times * self.of_bucket(bucket, kind.workers) for kind in kinds for bucket in kind.buckets]
        return math.fsum(inside) + self._outside(kinds, wire_bytes, rounds, workers)

    def _outside(self, kinds: Sequence[Exchanges], wire_bytes: float, rounds: float, workers: int) -> float:
        sent = math.fsum(kind.times * bucket.wire for kind in kinds for bucket in kind.buckets)
        taken = math.fsum(kind.times * bucket.rounds for kind in kinds for bucket in kind.buckets)
        return self.seconds(max(0.0, wire_bytes - sent), max(0.0, rounds - taken), workers)

    def columns(self, comm: "Comm", overlaps: bool = True) -> dict[str, Any]:
        """Return the modelled columns of a metrics row; all but the dense one are None if exchanges are not counted.

        `modelled_seconds` is the time of one worker alone on its machine: the computation of this process outside
        exchanges, divided by its local workers, plus `modelled_exposed_seconds`. Work done once for all local workers
        (the step of a common optimizer) is divided as well and therefore underestimated. The first step is excluded, as
        in `seconds`. Computation is steps x median, by phase, which excludes stalls of the machine.
        `modelled_comm_seconds` is communication alone, hidden or not. `modelled_dense_comm_seconds` is that of an fp32
        ring all-reduce in every step. `seconds_by_bucket` is the model's input, from which reports compute the run's
        time on other links. `seconds_by_phase` contains usual step times, for comparisons with other runs. `overlaps`:
        buckets are sent during the backward pass rather than after it, also if all workers share a process.
        """
        sent = comm.ledger.columns()
        dense = self.seconds(sent["dense_wire_bytes"], sent["dense_rounds"], comm.workers)
        if not comm.ledger.complete:
            return {**dict.fromkeys(COLUMNS), "modelled_dense_comm_seconds": dense}
        own = comm.clock.own_seconds() / comm.local_workers
        wire_bytes, rounds = (sent[key] + sent[f"control_{key}"] for key in ("wire_bytes", "rounds"))
        kinds = exchanges_of(comm, overlaps)
        exposed = self.exposed(kinds, wire_bytes, rounds, comm.workers, own)
        return {
            "modelled_seconds": own + exposed,
            "modelled_exposed_seconds": exposed,
            "modelled_comm_seconds": self.alone(kinds, wire_bytes, rounds, comm.workers),
            "modelled_dense_comm_seconds": dense,
            "seconds_by_bucket": kinds,
            "seconds_by_phase": comm.clock.steps.usual(),
        }


def _scaled(kinds: Mapping[str, KindCost], factor: float) -> dict[str, KindCost]:
    return {kind: cost._replace(bandwidth=factor * cost.bandwidth) for kind, cost in kinds.items()}


def late(kind: Exchanges) -> list[Stage]:
    """Return the buckets with `ready` of the last worker among those that wait for each other: all workers, or two."""
    in_pairs = all(set(bucket.kinds or ()) == {PAIRS} for bucket in kind.buckets)
    later = kind.spread * largest_of(min(kind.workers, 2) if in_pairs else kind.workers)
    return [bucket._replace(ready=bucket.ready + later) for bucket in kind.buckets]


@functools.cache
def harmonic(count: int) -> float:
    """Return the harmonic number 1 + 1/2 + ... + 1/count."""
    return math.fsum(1 / n for n in range(1, count + 1))


@functools.cache
def largest_of(count: int) -> float:
    """Return the expected largest of A standard normal numbers: the integral of 1 - F^A - (1 - F)^A over x >= 0."""
    x = np.linspace(0, 12, 24001)
    below = ndtr(x)
    return float(np.trapezoid(1 - below**count - (1 - below) ** count, x))


def exchanges_of(comm: "Comm", overlaps: bool) -> list[Exchanges]:
    """Return the exchanges of one worker from the clock of a process.

    Local workers encode one after another and decode once for all. Groups that exchange in parallel in a distributed
    run exchange one after another in one process; the numbers are divided accordingly. Unless `overlaps`, buckets are
    sent when only waiting remains, rather than when they are ready.
    """
    found = []
    for kind, (count, wait, spread, buckets) in comm.clock.exchanges().items():
        workers = kind.workers
        rows, groups = min(comm.local_workers, workers), max(1, comm.local_workers // workers)
        own = [b._replace(encode=b.encode / rows, ready=b.ready if overlaps else wait) for b in buckets]
        found.append(Exchanges(workers, count / groups, wait, own, spread))
    return found


def exchanges_from(column: Sequence[Any]) -> list[Exchanges]:
    """Read `seconds_by_bucket` of a metrics row; rows of version 0.2 and before have no kinds of collectives."""

    def stage(ready: float, encode: float, decode: float, wire: float, rounds: float, kinds: Any = None) -> Stage:
        by_kind = {name: (float(sent), float(made)) for name, (sent, made) in kinds.items()} if kinds else None
        return Stage(ready, encode, decode, wire, rounds, by_kind)

    return [
        Exchanges(workers, times, wait, [stage(*bucket) for bucket in buckets], spread[0] if spread else 0.0)
        for workers, times, wait, buckets, *spread in column
    ]


LEAST = 1e-12  # seconds; less remaining work counts as done


def step_ends(
    network: Network, buckets: Sequence[Stage], workers: int, backward: float, cores: float = math.inf
) -> tuple[float, float]:
    """Return (end of the backward pass, end of the last bucket's decoding) in seconds from the start of the step.

    Args:
        network, workers: links of the exchange, and number of participating workers.
        buckets: buckets in the order of their exchange; `ready` is without contention for cores.
        backward: seconds of forward and backward pass without contention.
        cores: cores per worker; below 1 if workers share one.
    """
    threads = _Threads(backward, cores)
    idle_since, tokens = 0.0, network.burst
    for bucket in buckets:
        threads.wait_for(bucket.ready)
        threads.work(bucket.encode, 1.0)
        tokens = min(network.burst, tokens + (threads.now - idle_since) * network.bandwidth / 8)
        seconds = network.of_bucket(bucket, workers, tokens)
        threads.work(seconds, min(1.0, network.processor_seconds(bucket) / seconds) if seconds else 0.0)
        idle_since, tokens = threads.now, max(0.0, tokens - network.carried(bucket, workers))
        threads.work(bucket.decode, 1.0)
    end = threads.now
    threads.wait_for(backward)
    return threads.backward_over, end


class _Threads:
    """Compute thread, which never waits, and exchange thread, whose current time is `now`."""

    def __init__(self, backward: float, cores: float) -> None:
        self.backward, self.cores = backward, cores
        self.now = self.computed = 0.0
        self.backward_over = 0.0 if backward <= LEAST else math.inf

    def wait_for(self, ready: float) -> None:
        """Idle until this much is computed; any excess over the backward pass is waited for after its end."""
        if self.computed < min(ready, self.backward) - LEAST:
            self._compute((min(ready, self.backward) - self.computed) / min(1.0, self.cores), min(1.0, self.cores))
        if ready > self.backward:
            self.now = max(self.now, self.backward_over + ready - self.backward)

    def work(self, seconds: float, demand: float) -> None:
        """Work in the exchange thread while the other thread computes."""
        while seconds > LEAST:
            computes = self.computed < self.backward - LEAST
            own, other = fair_rates(1.0 if computes else 0.0, demand, self.cores)
            lasts = seconds / other
            if computes:
                lasts = min(lasts, (self.backward - self.computed) / own)
            seconds -= other * lasts
            self._compute(lasts, own if computes else 0.0)

    def _compute(self, lasts: float, rate: float) -> None:
        self.now += lasts
        self.computed += rate * lasts
        if self.computed >= self.backward - LEAST and self.backward_over == math.inf:
            self.backward_over = self.now


def fair_rates(one: float, other: float, cores: float) -> tuple[float, float]:
    """Return the rates of two threads with these demands in cores under max-min fair sharing; 1 = full speed."""
    if one + other <= cores:
        return 1.0, 1.0
    least = min(one, other, cores / 2)
    most = cores - least
    first, second = (least, most) if one <= other else (most, least)
    return min(1.0, first / one) if one else 1.0, min(1.0, second / other) if other else 1.0
