"""Cost model of collectives: bytes, rounds and seconds by kind, on links of one or two levels.

A workers, G of them on each of M = A/G machines; n = total payload of a worker in bytes:

    all-reduce   ring          2(A-1)/A n, 2(A-1) rounds
                 tree          2 n, 2 ceil(log2 A) rounds (a double tree, Sanders, Speck and Traeff 2009)
                 hierarchical  inside 2(G-1)/G n, 2(G-1) rounds; between the cheaper of ring and tree over M machines
    all-gather   ring          (A-1) n, A-1 rounds
                 hierarchical  between (M-1) G n, M-1 rounds; inside (G-1) M n, G-1 rounds
    gather of unequal messages
                 direct        (A-1) n, A-1 rounds; each message is sent from its owner to all others
    all-to-all   direct        (A-1)/A n, A-1 rounds
                 hierarchical  inside (G-1)/G n, G-1 rounds; between G (M-1)/M n, M-1 rounds
    pairs        direct        n, 1 round, for any A

A round takes the latency of its level, a byte 8/bandwidth. The slowest hop of a ring through machines determines its
rate, and each machine's link carries the bytes of one worker. In all other cases the G workers of a machine share its
link. At the same time the inner link carries what a worker sends to the other G-1; a pair may be within one machine.
The times of the stages of a hierarchical collective are added, which is an upper bound for long messages.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.conf_dir import yaml_file, yaml_files
from accordion_bench.options.units import without_units


class KindCost(NamedTuple):
    """Cost of one kind of collective between machines."""

    latency: float  # seconds per round
    bandwidth: float  # bit/s
    cpu: float = 0.0  # seconds of processor time per byte that a worker sends


class Hop(NamedTuple):
    """Link parameters for one kind of collective."""

    latency: float  # seconds per round
    bandwidth: float  # bit/s, one direction
    at_once: float = 0.0  # bytes of the burst, which take no time

    def seconds(self, wire: float, rounds: float) -> float:
        """Return the seconds for this number of bytes and rounds."""
        return 8 * max(0.0, wire - self.at_once) / self.bandwidth + rounds * self.latency


def wire_and_rounds(kind: str, payload: float, times: float, workers: int) -> tuple[float, float]:
    """Return (bytes sent over one worker's link, number of rounds), as the ledger counts them.

    Args:
        kind: kind of collective.
        payload: n, payload of a worker in bytes, over all collectives.
        times: number of successive collectives.
        workers: A.
    """
    others = workers - 1
    if kind == "all_reduce":
        return 2 * others / workers * payload, 2 * others * times
    if kind == PAIRS:
        return min(1, others) * payload, min(1, others) * times
    return (others / workers if kind == "all_to_all" else others) * payload, others * times


def payload_and_times(kind: str, wire: float, rounds: float, workers: int) -> tuple[float, float]:
    """Return (payload of a worker in bytes, number of collectives): the inverse of `wire_and_rounds` for A >= 2."""
    one_byte, one_collective = wire_and_rounds(kind, 1.0, 1.0, workers)
    return wire / one_byte, rounds / one_collective


def link_share(kind: str, workers: int, per_machine: int) -> float:
    """Return the bytes over a machine's link per byte that one worker sends in a flat collective."""
    if workers <= per_machine:
        return 0.0  # all workers are in one machine
    if kind not in DIRECT:
        return 1.0
    return per_machine * (workers - per_machine) / (workers - 1)


def inner_share(kind: str, workers: int, per_machine: int) -> float:
    """Return the maximum fraction of a worker's bytes in a flat collective that stays in its machine.

    The neighbour in a ring, or the partner of a pair, may be in the same machine. The slowest worker counts, not the
    mean one.
    """
    return (per_machine - 1) / (workers - 1) if kind in ("all_to_all", UNEVEN) else 1.0


def ring(kind: str, payload: float, times: float, workers: int, per_machine: int, outer: Hop, inner: Hop) -> float:
    """Return the seconds of flat collectives (ring or direct) of all workers, ordered machine by machine.

    Args:
        kind, payload, times, workers: as for `wire_and_rounds`.
        per_machine: G.
        outer, inner: link between machines, and inside a machine.
    """
    wire, rounds = wire_and_rounds(kind, payload, times, workers)
    if workers <= per_machine:
        return inner.seconds(wire, rounds)
    if per_machine == 1:
        return outer.seconds(wire, rounds)
    inside, between = inner_share(kind, workers, per_machine) * wire, link_share(kind, workers, per_machine) * wire
    pace = max(inner.seconds(inside, 0), outer.seconds(between, 0))
    return pace + rounds * max(inner.latency, outer.latency)


def tree(payload: float, times: float, workers: int, hop: Hop) -> float:
    """Return the seconds of all-reduces along a double tree of workers with equal links."""
    return hop.seconds(2 * payload, 2 * math.ceil(math.log2(workers)) * times)


def hierarchical(
    kind: str, payload: float, times: float, workers: int, per_machine: int, outer: Hop, inner: Hop
) -> float:
    """Return the seconds of hierarchical collectives, with one stage inside machines and one between them."""
    machines = math.ceil(workers / per_machine)
    inside, between = (per_machine - 1) * times, (machines - 1) * times
    if kind == "all_reduce":
        own = inner.seconds(2 * (per_machine - 1) / per_machine * payload, 2 * inside)
        return own + _all_reduce_between(payload, times, machines, outer)
    if kind == "all_to_all":
        own = inner.seconds((per_machine - 1) / per_machine * payload, inside)
        return own + outer.seconds(per_machine * (machines - 1) / machines * payload, between)
    own = inner.seconds((per_machine - 1) * machines * payload, inside)
    return own + outer.seconds((machines - 1) * per_machine * payload, between)


def _all_reduce_between(payload: float, times: float, machines: int, outer: Hop) -> float:
    if machines == 1:
        return 0.0
    return min(ring("all_reduce", payload, times, machines, 1, outer, outer), tree(payload, times, machines, outer))


def cheapest(kind: str, payload: float, times: float, workers: int, per_machine: int, outer: Hop, inner: Hop) -> float:
    """Return the seconds of the fastest algorithm: ring or direct, tree, or hierarchical."""
    found = [ring(kind, payload, times, workers, per_machine, outer, inner)]
    if kind == "all_reduce" and (per_machine == 1 or workers <= per_machine):
        found.append(tree(payload, times, workers, outer if per_machine == 1 else inner))
    if 1 < per_machine < workers and kind in KINDS:
        found.append(hierarchical(kind, payload, times, workers, per_machine, outer, inner))
    return min(found)


def checked_kinds(kinds: Any, usual: Hop) -> dict[str, KindCost]:
    """Return the costs by kind of collective, with missing numbers from `usual`; ValueRefused if one is invalid."""
    if not isinstance(kinds, Mapping) or not {*kinds} <= {*KINDS}:
        raise ValueRefused("kinds", f"groups of numbers by kind of collective ({', '.join(KINDS)})", kinds, None)
    found = {}
    for kind, said in without_units(dict(kinds)).items():
        if not isinstance(said, Mapping) or set(said) - set(KindCost._fields):
            raise ValueRefused(f"kinds.{kind}", f"a group of {', '.join(KindCost._fields)}", said, None)
        own = {"latency": usual.latency, "bandwidth": usual.bandwidth, "cpu": 0.0, **said}
        latency = checks.number(f"kinds.{kind}.latency", own["latency"], at_least=0, instead=usual.latency)
        bandwidth = checks.number(f"kinds.{kind}.bandwidth", own["bandwidth"], above=0, instead=usual.bandwidth)
        cpu = checks.number(f"kinds.{kind}.cpu", own["cpu"], at_least=0, instead=0)
        found[str(kind)] = KindCost(latency, bandwidth, cpu)
    return found


def inner_hop(inside: Any) -> Hop:
    """Return the link inside a machine, from the name of a file in conf/network or from {bandwidth, latency}."""
    if isinstance(inside, Mapping):
        said = without_units(dict(inside))
        if set(said) != {"latency", "bandwidth"}:
            raise ValueRefused("inside", "a preset's name, or a group of bandwidth and latency", inside, "pcie4")
        bandwidth = checks.number("inside.bandwidth", said["bandwidth"], above=0, instead=2e11)
        return Hop(checks.number("inside.latency", said["latency"], at_least=0, instead=1e-5), bandwidth)
    file = yaml_file("network", inside) if isinstance(inside, str) else None
    said = yaml.safe_load(file.read_text(encoding="utf-8")) if file else {}
    if not said.get("bandwidth"):
        known = [known for known in yaml_files("network") if known != "custom"]
        raise ValueRefused("inside", f"one of {', '.join(known)}", inside, checks.closest(str(inside), known))
    numbers = without_units(said)
    return Hop(numbers["latency"], numbers["bandwidth"])


KINDS = ("all_reduce", "all_gather", "all_to_all")  # kinds with costs of their own
UNEVEN = "all_gather_uneven"
PAIRS = "send_receive"  # each worker waits for one partner only
DIRECT = ("all_to_all", UNEVEN, PAIRS)  # messages are sent directly to their receiver, not along a ring
