"""Collectives over links of two levels: identities, limits, and rings counted message by message."""

import itertools
import math

import pytest

from accordion_bench.comm.ledger import Ledger
from accordion_bench.comm.stages import Stage
from accordion_bench.network.collective_costs import (
    KINDS,
    PAIRS,
    UNEVEN,
    Hop,
    cheapest,
    hierarchical,
    payload_and_times,
    ring,
    tree,
    wire_and_rounds,
)
from accordion_bench.network.link_model import Network
from accordion_bench.options.checks import ConfigError

SLOW, FAST = Hop(1e-3, 1e8), Hop(1e-5, 1e11)
EVERY = (*KINDS, UNEVEN)


@pytest.mark.parametrize("kind", [*EVERY, PAIRS])
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_wire_and_rounds_are_what_the_ledger_charges(kind, workers):
    ledger, each = Ledger(workers), 1200
    if kind == "all_to_all":
        ledger.all_to_all([each // workers] * workers)
    elif kind == "all_gather_uneven":
        ledger.all_gather_uneven([each] * workers)
    elif kind == PAIRS:
        ledger.send_receive(each, range(workers))
    else:
        getattr(ledger, kind)(each)
    columns = ledger.columns()
    charged = (columns["wire_bytes"], columns["rounds"])
    assert wire_and_rounds(kind, each, 1, workers) == pytest.approx(charged, rel=1e-12)
    assert payload_and_times(kind, *charged, workers) == pytest.approx((each, 1), rel=1e-12)
    sent, rounds = ledger.kinds[kind]
    assert (sent / workers, rounds) == charged and sum(wire for wire, _ in ledger.kinds.values()) == sent


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("workers", [2, 5, 16])
def test_one_level_is_the_equation(kind, workers):
    """8 wire / bandwidth + rounds latency, however the machines are called."""
    wire, rounds = wire_and_rounds(kind, 1e6, 2, workers)
    assert ring(kind, 1e6, 2, workers, 1, SLOW, FAST) == SLOW.seconds(wire, rounds)
    assert ring(kind, 1e6, 2, workers, workers, SLOW, FAST) == FAST.seconds(wire, rounds)
    assert hierarchical(kind, 1e6, 2, workers, workers, SLOW, FAST) == pytest.approx(FAST.seconds(wire, rounds))
    alone = hierarchical(kind, 1e6, 2, workers, 1, SLOW, FAST)
    if kind == "all_reduce":
        assert alone == min(SLOW.seconds(wire, rounds), tree(1e6, 2, workers, SLOW))
    else:
        assert alone == pytest.approx(SLOW.seconds(wire, rounds))


def crossed(kind: str, machines: int, per_machine: int) -> float:
    """Bytes that the busiest machine's link sends, of one byte in all from each worker, counted message by message."""
    workers, sent = machines * per_machine, [0.0] * machines
    of = [worker // per_machine for worker in range(workers)]
    if kind == "all_to_all":
        for a, b in itertools.permutations(range(workers), 2):
            sent[of[a]] += (of[a] != of[b]) / workers
        return max(sent)
    if kind == UNEVEN:
        for a, b in itertools.permutations(range(workers), 2):
            sent[of[a]] += of[a] != of[b]
        return max(sent)
    passes = 2 * (workers - 1) / workers if kind == "all_reduce" else workers - 1
    for worker in range(workers):  # each hands on to the next
        sent[of[worker]] += passes * (of[worker] != of[(worker + 1) % workers])
    return max(sent)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize(("machines", "per_machine"), [(2, 2), (3, 4), (8, 4)])
def test_a_flat_collective_over_machines(kind, machines, per_machine):
    """With no latency and nothing to pay inside, what the busiest link sends decides."""
    free, link = Hop(0, math.inf), Hop(0, 8)
    took = ring(kind, 1.0, 1, machines * per_machine, per_machine, link, free)
    assert took == pytest.approx(crossed(kind, machines, per_machine))


@pytest.mark.parametrize("kind", ["all_to_all", UNEVEN])
@pytest.mark.parametrize(("machines", "per_machine"), [(2, 2), (3, 4), (8, 4)])
def test_the_link_inside_carries_what_stays_in_a_machine(kind, machines, per_machine):
    """With nothing to pay between machines, a worker's messages to the others of its machine decide."""
    free, link, workers = Hop(0, math.inf), Hop(0, 8), machines * per_machine
    each = 1 / workers if kind == "all_to_all" else 1
    stays = sum(each for other in range(1, workers) if other // per_machine == 0)  # of the first worker
    assert ring(kind, 1.0, 1, workers, per_machine, free, link) == pytest.approx(stays)


def test_unequal_messages_are_gathered_directly_whatever_is_cheapest():
    """16 workers on 4 machines, 1 MB each: a machine sends four messages to twelve workers, 48 MB at 1 Gbit/s."""
    link, inside = Hop(0, 1e9), Hop(0, 2e12)
    assert ring(UNEVEN, 1e6, 1, 16, 4, link, inside) == pytest.approx(0.384)
    assert cheapest(UNEVEN, 1e6, 1, 16, 4, link, inside) == pytest.approx(0.384)
    assert cheapest("all_to_all", 16e6, 1, 16, 4, link, inside) == pytest.approx(0.384)  # the same messages


@pytest.mark.parametrize("kind", KINDS)
def test_hierarchical_wins_where_latency_or_sharing_costs(kind):
    """32 workers on 8 machines: a short message takes 7 outer rounds, or a tree's 6, instead of 31 or 62."""
    short = [make(kind, 8.0, 1, 32, 4, SLOW, FAST) for make in (ring, hierarchical, cheapest)]
    assert short[1] < short[0] / 4 and short[2] == short[1]
    assert cheapest(kind, 1e9, 1, 32, 4, SLOW, FAST) <= ring(kind, 1e9, 1, 32, 4, SLOW, FAST)


def test_a_tree_wins_for_short_messages_and_the_ring_for_long_ones():
    network = Network(1e9, 1e-3, algorithm="cheapest")
    wire, rounds = wire_and_rounds("all_reduce", 100, 1, 64)
    assert network.seconds(wire, rounds, 64) == tree(100, 1, 64, Hop(1e-3, 1e9)) < rounds * 1e-3 / 10
    wire, rounds = wire_and_rounds("all_reduce", 1e10, 1, 4)
    assert network.seconds(wire, rounds, 4) == Network(1e9, 1e-3).seconds(wire, rounds, 4)


def test_each_kind_has_its_own_link():
    kinds = {"all_to_all": {"bandwidth": 5e7}, "all_gather": {"latency": 1e-2, "cpu": 1e-9}}
    network = Network(1e8, 1e-3, kinds=kinds)
    assert network.seconds(100, 3, 4) == 8 * 100 / 1e8 + 3e-3
    assert network.seconds(100, 3, 4, "all_to_all") == 8 * 100 / 5e7 + 3e-3
    assert network.seconds(100, 3, 4, "all_gather_uneven") == network.seconds(100, 3, 4, "all_to_all")
    assert network.seconds(100, 3, 4, "all_gather") == 8 * 100 / 1e8 + 3e-2
    bucket = Stage(0, 0, 0, 300, 9, {"all_gather": (200.0, 6.0), "all_to_all": (100.0, 3.0)})
    by_kind = network.seconds(200, 6, 4, "all_gather") + network.seconds(100, 3, 4, "all_to_all")
    assert network.of_bucket(bucket, 4) == network.end([bucket], 4) == by_kind
    assert network.processor_seconds(bucket) == 200 * 1e-9
    twice = network.at(2e8)
    assert twice.seconds(1e9, 0, 4, "all_to_all") == network.seconds(1e9, 0, 4, "all_to_all") / 2
    assert network.bandwidth == 1e8


def test_inside_a_machine():
    """32 workers on 8 machines with a switch of infinite speed inside are 8 workers to an all-reduce."""
    network = Network(1e9, 0, workers_per_machine=4, inside="nvlink", algorithm="cheapest")
    wire, rounds = wire_and_rounds("all_reduce", 1e8, 1, 32)
    alone = Network(1e9, 0).seconds(*wire_and_rounds("all_reduce", 1e8, 1, 8), 8)
    assert alone < network.seconds(wire, rounds, 32) < alone * 1.01
    by_numbers = {"inside": {"bandwidth": 2e12, "latency": 5e-6}, "workers_per_machine": 4, "algorithm": "cheapest"}
    assert Network(1e9, 0, **by_numbers).seconds(wire, rounds, 32) == network.seconds(wire, rounds, 32)
    few = wire_and_rounds("all_reduce", 1e8, 1, 4)
    assert network.seconds(*few, 4) == pytest.approx(Hop(5e-6, 2e12).seconds(*few))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"inside": "pcie9"}, "inside must be one of 100gbit"),
        ({"inside": {"bandwidth": 1}}, "inside must be a preset's name, or a group of bandwidth and latency"),
        ({"inside": {"bandwidth": 0, "latency": 0}}, "inside.bandwidth must be a number above 0, got 0"),
        ({"workers_per_machine": 4}, "inside must be a link where workers_per_machine is above 1, got null"),
        ({"workers_per_machine": 0}, "workers_per_machine must be an integer of at least 1, got 0"),
        ({"algorithm": "torus"}, "algorithm must be one of ring, cheapest, got torus"),
        (
            {"kinds": {"gather": {}}},
            "all_to_all), got {gather:{}}; type kinds=null",
        ),
        ({"kinds": {"all_gather": {"bandwidth": 0}}}, "kinds.all_gather.bandwidth must be a number above 0, got 0"),
        ({"kinds": {"all_gather": {"speed": 1}}}, "kinds.all_gather must be a group of latency, bandwidth, cpu"),
        ({"kinds": 3}, "kinds must be groups of numbers by kind of collective"),
    ],
)
def test_one_sentence(options, told):
    with pytest.raises(ConfigError) as refused:
        Network(1e9, 1e-4, **options)
    assert told in str(refused.value) and "\n" not in str(refused.value)


def test_pairs_cost_the_same_among_any_number_of_workers():
    alike = Network(1e8, 1e-3, jitter=1e-3)
    assert {alike.seconds(1e6, 1, workers, PAIRS) for workers in (2, 16, 4096)} == {0.08 + 1e-3 + 1e-3 * 1.5}
    assert cheapest(PAIRS, 1e6, 1, 8, 1, SLOW, FAST) == SLOW.seconds(1e6, 1)
    # on machines of four, a worker's partner is elsewhere in 4 of 7 cases, and four share the link
    assert ring(PAIRS, 1e6, 1, 8, 4, SLOW, FAST) == pytest.approx(8e6 * 4 * 4 / 7 / 1e8 + 1e-3)
    assert cheapest(PAIRS, 1e6, 1, 8, 4, SLOW, FAST) == ring(PAIRS, 1e6, 1, 8, 4, SLOW, FAST)
