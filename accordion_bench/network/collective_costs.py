"""Collectives: what they send, by kind, and how long they take on links of one level or two.

Of A workers, G of them on each of M = A/G machines; n bytes in all that a worker hands over:

    all-reduce   ring          2(A-1)/A n, 2(A-1) rounds
                 tree          2 n, 2 ceil(log2 A) rounds (a double tree, Sanders, Speck and Traeff 2009)
                 hierarchical  inside 2(G-1)/G n, 2(G-1) rounds; between the cheaper of ring and tree over M machines
    all-gather   ring          (A-1) n, A-1 rounds
                 hierarchical  between (M-1) G n, M-1 rounds; inside (G-1) M n, G-1 rounds
    gather of unequal messages
                 direct        (A-1) n, A-1 rounds; all get the whole message from its owner
    all-to-all   direct        (A-1)/A n, A-1 rounds
                 hierarchical  inside (G-1)/G n, G-1 rounds; between G (M-1)/M n, M-1 rounds
    pairs        direct        n, 1 round, however many workers there are

A round of one level takes its latency; a byte 8/bandwidth. A ring through machines goes at the pace of its slowest hop,
and sends over each machine's link what one worker sends. In all others the G workers of a machine share its link, and
the link inside carries, at the same time, what a worker sends to the other G-1 (a pair may be all inside). The stages
of a hierarchical collective count one after another, which is an upper bound for long messages.
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
    """One kind of collective between machines.

    latency: seconds that each round adds.
    bandwidth: bit/s.
    cpu: seconds of processor time for each byte that a worker sends.
    """

    latency: float
    bandwidth: float
    cpu: float = 0.0


class Hop(NamedTuple):
    """A link as messages of one kind see it.

    latency: seconds that each round adds.
    bandwidth: bit/s, one direction.
    at_once: bytes that pass in no time.
    """

    latency: float
    bandwidth: float
    at_once: float = 0.0

    def seconds(self, wire: float, rounds: float) -> float:
        """Of so many bytes in so many rounds."""
        return 8 * max(0.0, wire - self.at_once) / self.bandwidth + rounds * self.latency


def wire_and_rounds(kind: str, payload: float, times: float, workers: int) -> tuple[float, float]:
    """(Bytes that one worker's link sends, messages one after another), as the ledger charges them.

    Args:
        kind: of collective.
        payload: bytes that a worker hands over in all of them, n.
        times: collectives, one after another.
        workers: A.
    """
    others = workers - 1
    if kind == "all_reduce":
        return 2 * others / workers * payload, 2 * others * times
    if kind == PAIRS:
        return min(1, others) * payload, min(1, others) * times
    return (others / workers if kind == "all_to_all" else others) * payload, others * times


def payload_and_times(kind: str, wire: float, rounds: float, workers: int) -> tuple[float, float]:
    """(Bytes that a worker has handed over, collectives): the inverse of `wire_and_rounds`, of at least two workers."""
    one_byte, one_collective = wire_and_rounds(kind, 1.0, 1.0, workers)
    return wire / one_byte, rounds / one_collective


def link_share(kind: str, workers: int, per_machine: int) -> float:
    """How many times what one worker sends a machine's link carries, of flat collectives."""
    if workers <= per_machine:
        return 0.0  # all are in one machine
    if kind not in DIRECT:
        return 1.0
    return per_machine * (workers - per_machine) / (workers - 1)


def inner_share(kind: str, workers: int, per_machine: int) -> float:
    """Which part of what one worker sends stays in its machine, or may, of flat collectives.

    A worker of a ring may have its neighbour there, and one of a pair its partner; none waits for the mean one.
    """
    return (per_machine - 1) / (workers - 1) if kind in ("all_to_all", UNEVEN) else 1.0


def ring(kind: str, payload: float, times: float, workers: int, per_machine: int, outer: Hop, inner: Hop) -> float:
    """Seconds of collectives through all workers as if they were alike, machine after machine.

    Args:
        kind: of collective.
        payload: bytes that a worker hands over in all of them.
        times: collectives, one after another.
        workers: A.
        per_machine: G.
        outer: between machines.
        inner: inside a machine.
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
    """Seconds of all-reduces along a double tree of workers that are alike."""
    return hop.seconds(2 * payload, 2 * math.ceil(math.log2(workers)) * times)


def hierarchical(
    kind: str, payload: float, times: float, workers: int, per_machine: int, outer: Hop, inner: Hop
) -> float:
    """Seconds of collectives first inside machines and then between them, or the other way round."""
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
    """Seconds of whichever takes least: ring or direct, tree, hierarchical."""
    found = [ring(kind, payload, times, workers, per_machine, outer, inner)]
    if kind == "all_reduce" and (per_machine == 1 or workers <= per_machine):
        found.append(tree(payload, times, workers, outer if per_machine == 1 else inner))
    if 1 < per_machine < workers and kind in KINDS:
        found.append(hierarchical(kind, payload, times, workers, per_machine, outer, inner))
    return min(found)


def checked_kinds(kinds: Any, usual: Hop) -> dict[str, KindCost]:
    """What differs by kind of collective; what is not said of one is as usual.

    Raises:
        ValueRefused: a name is no kind, or a number none.
    """
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
    """The link inside a machine: that of a file in conf/network, or {bandwidth, latency}.

    Raises:
        ValueRefused: there is no file of this name, or a number is none.
    """
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


KINDS = ("all_reduce", "all_gather", "all_to_all")  # of which links differ
UNEVEN = "all_gather_uneven"
PAIRS = "send_receive"  # two workers wait for each other alone
DIRECT = ("all_to_all", UNEVEN, PAIRS)  # messages go to their receiver, not to a neighbour
