"""Simulated runs: equal to the formula where nothing differs, and late by what makes them late."""

import heapq
import math
from dataclasses import replace

import numpy as np
import pytest

from accordion_bench.advising.cluster import Cluster
from accordion_bench.advising.disturbances import Disturbances, Outage, RandomSteps, UnsteadyLinks
from accordion_bench.advising.predict import BucketCost, Messages, MethodCost, step
from accordion_bench.advising.simulation import Simulated, SimulatedRun, simulate
from accordion_bench.advising.step_times import StepTimes
from accordion_bench.comm.stages import Stage
from accordion_bench.network.collective_costs import PAIRS
from accordion_bench.network.link_model import Exchanges, Network, largest_of
from accordion_bench.options.checks import ValueRefused
from accordion_bench.plan import TensorSpec

SPECS = tuple(TensorSpec(f"layer{i}", (500, 100)) for i in range(3))
TIMES = StepTimes(
    SPECS,
    ready=(0.09, 0.06, 0.04),
    backward_end=0.1,
    update=0.02,
    steps=(0.11, 0.12, 0.12, 0.13, 0.15),
    batch_size=8,
    model="three layers",
    device="cpu",
    source="a test",
)
BUCKETS = (
    BucketCost((2,), 0.001, (0.002, 0.0001), {"all_reduce": Messages(200_000, 0, 1)}),
    BucketCost(
        (1, 0), 0.002, (0.001, 0.0002), {"all_gather": Messages(10_000, 0, 1), "all_to_all": Messages(0, 9e4, 2)}
    ),
)
EVERY = MethodCost("every step", (), BUCKETS)
LOCAL = MethodCost("local", (), BUCKETS, overlaps=False, local=True, period=4, quorum=True)
BESIDE = replace(LOCAL, name="beside", overlaps=True, quorum=False)
LINK = Network(1e8, 1e-4)
SAME = Disturbances(spread=0.0)
MEETING = BucketCost((0, 1, 2), 0.001, (0.002, 0.0), {PAIRS: Messages(2 * 4 * 150_000, 0, 2)})
AT_OWN_PACE = replace(BESIDE, name="meets", buckets=(MEETING,), period=1, every_local_step=True, waits=False)
SMALL = MethodCost(
    "small", (), (BucketCost((0, 1, 2), 0.0, (0.0, 0.0), {"all_reduce": Messages(4, 0, 1)}),), overlaps=False
)


def run(cost=EVERY, network=LINK, workers=4, disturbances=SAME, steps=12, seed=0, **quorum) -> Simulated:
    return simulate(TIMES, cost, network, disturbances, SimulatedRun(workers, steps, seed, **quorum))


# ---- nothing differs


@pytest.mark.parametrize("workers", [2, 7, 1000])
@pytest.mark.parametrize("overlaps", [True, False])
def test_undisturbed_steps_are_those_of_the_formula(workers, overlaps):
    cost = replace(EVERY, overlaps=overlaps, extra=0.003)
    ready = TIMES.ready if overlaps else [TIMES.backward_end] * 3
    stages = cost.stages(ready, workers)
    exposed = LINK.exposed([Exchanges(workers, 1, TIMES.backward_end, stages)], 0, 0, workers)
    found = run(cost, workers=workers)
    assert found.seconds == pytest.approx(TIMES.compute + exposed + 0.003, rel=1e-12)
    assert found.exposed / 12 == pytest.approx(exposed, rel=1e-12)
    assert found.waiting_share == pytest.approx(0, abs=1e-12)
    assert (found.step.low, found.step.high) == pytest.approx((found.step.value, found.step.value))


@pytest.mark.parametrize("workers", [2, 7])
def test_undisturbed_periods_are_those_of_the_formula(workers):
    exchange = LINK.end(LOCAL.stages([0.0] * 3, workers), workers)
    found = run(LOCAL, workers=workers, steps=10)
    assert found.exchanges == 3  # after 4 and 8 steps, and after the last
    expected = [TIMES.compute + exchange / 4] * 8 + [TIMES.compute + exchange / 2] * 2
    assert found.seconds == pytest.approx(expected, rel=1e-12)
    assert not found.left_out.any()


def test_undisturbed_fragments_are_those_of_the_formula():
    """Each bucket is a fragment, and travels beside one of two steps; the last one beside none."""
    cost = replace(BESIDE, parts=((0,), (1,)), delay=1)
    first, second = (LINK.end([stage], 4) for stage in cost.stages([0.0] * 3, 4))
    found, own = run(cost, steps=8), TIMES.compute
    beside = [own, own, max(own, first), own, max(own, second), own, max(own, first), own + second]
    assert found.exchanges == 4 and found.seconds == pytest.approx(beside, rel=1e-12)


def test_a_burst_passes_at_once_where_the_link_has_been_idle():
    bursting = Network(1e8, 1e-4, burst=150_000)
    exposed = max(0.0, bursting.end(EVERY.stages(TIMES.ready, 4), 4) - TIMES.backward_end)
    first, second = run(network=bursting, steps=2).seconds
    assert first == pytest.approx(TIMES.compute + exposed, rel=1e-12)
    assert second >= first  # tokens come back while the link is idle, and it was busy
    saved = replace(TIMES, ready=(0.9, 0.6, 0.4), backward_end=1.0)
    found = simulate(saved, EVERY, bursting, SAME, SimulatedRun(4, 5, 0))
    assert found.seconds == pytest.approx(found.seconds[0], rel=1e-12)


@pytest.mark.parametrize("cost", [EVERY, LOCAL, replace(LOCAL, period=1), BESIDE])
def test_in_the_long_run_a_burst_is_what_comes_back(cost):
    fast, bursting = replace(TIMES.scaled(0.1), steps=()), Network(1e8, 1e-4, burst=150_000)
    found = simulate(fast, cost, bursting, SAME, SimulatedRun(4, 60, 0)).seconds[20:52]
    assert found == pytest.approx(step(fast, cost, Cluster(bursting, 4)).seconds, rel=1e-9)


def test_a_method_without_messages_computes_alone():
    alone = run(MethodCost("alone", (), ()), disturbances=Disturbances(slow={1: 2.0}, spread=0.0))
    assert alone.wall == pytest.approx(12 * 2 * TIMES.compute)
    assert alone.exposed == 0 and not alone.waited.any()


CLUSTERS = [
    Network(1e9, 5e-5, workers_per_machine=4, inside="pcie4", algorithm="cheapest"),
    Network(1e9, 5e-5, workers_per_machine=4, inside="pcie4"),
    Network(1e8, 1e-4, algorithm="cheapest"),
    Network(1e8, 1e-4, kinds={"all_gather": {"bandwidth": 7e7}, "all_to_all": {"latency": 1e-3}}),
]


@pytest.mark.parametrize("network", CLUSTERS)
def test_undisturbed_steps_are_those_of_the_formula_on_clusters(network):
    for cost in (EVERY, LOCAL, replace(EVERY, overlaps=False), replace(EVERY, extra=-0.5)):
        steady = replace(TIMES, steps=(0.12,) * 5)
        found = simulate(steady, cost, network, Disturbances(), SimulatedRun(16, 8, 0))
        assert found.seconds == pytest.approx(step(steady, cost, Cluster(network, 16)).seconds, rel=1e-12)


@pytest.mark.parametrize("cores", [0.4, 0.5, 1.0, 1.3, 2.0])
def test_undisturbed_workers_share_their_cores_as_in_the_formula(cores):
    costly = Network(1e8, 1e-4, kinds={kind: {"cpu": 3e-8} for kind in ("all_reduce", "all_gather", "all_to_all")})
    heavy = tuple(replace(one, encode=0.02, decode=(0.01, 0.001)) for one in BUCKETS)
    steady = replace(TIMES, steps=(0.12,) * 5)
    for cost in (replace(EVERY, buckets=heavy), replace(LOCAL, buckets=heavy, extra=0.001)):
        expected = step(steady, cost, Cluster(costly, 5, cores)).seconds
        found = simulate(steady, cost, costly, Disturbances(), SimulatedRun(5, 8, 0, cores=cores))
        assert found.seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("cores", [0.5, 1.3, math.inf])
@pytest.mark.parametrize("bandwidth", [1e6, 1e7, 1e9])
def test_exchanges_beside_local_steps_are_those_of_the_formula(cores, bandwidth):
    network, steady = Network(bandwidth, 1e-4), replace(TIMES, steps=(0.12,) * 5)
    expected = step(steady, BESIDE, Cluster(network, 5, cores)).seconds
    found = simulate(steady, BESIDE, network, Disturbances(), SimulatedRun(5, 16, 0, cores=cores))
    assert found.seconds[4:12] == pytest.approx(expected, rel=1e-9)  # the first period has none, the last also its own
    own = simulate(steady, LOCAL, network, Disturbances(), SimulatedRun(5, 16, 0, cores=cores))
    assert found.wall < own.wall * (1 + 1e-12)


def test_a_machines_link_is_that_of_all_its_workers():
    network = CLUSTERS[0]
    slow = Disturbances(spread=0.0, slow_links={5: 1e8})
    assert run(network=network, workers=8, disturbances=slow).wall == pytest.approx(
        run(network=network.at(1e8), workers=8).wall, rel=1e-12
    )
    lost = Disturbances(spread=0.0, outages=[Outage(5, 0.1, 1e6)])
    assert run(LOCAL, network, 8, lost, quorum=4).left_out.tolist() == [0] * 4 + [3] * 4


# ---- workers that wait for no one

FREE = replace(AT_OWN_PACE, buckets=(replace(MEETING, encode=0.0, decode=(0.0, 0.0)),))
ENDLESS = Network(1e18, 0.0)


def test_without_stragglers_and_links_all_steps_are_those_of_dense():
    dense = MethodCost("dense", (), (BucketCost((0, 1, 2), 0.0, (0.0, 0.0), {"all_reduce": Messages(6e5, 0, 1)}),))
    for workers in (2, 5, 64):
        own, theirs = (run(cost, ENDLESS, workers) for cost in (FREE, dense))
        assert own.seconds == pytest.approx(theirs.seconds, rel=1e-9)
        assert own.seconds == pytest.approx(TIMES.compute, rel=1e-9)
        assert own.exposed == pytest.approx(0.0, abs=1e-9) and not own.waited.any() and own.exchanges == 12


@pytest.mark.parametrize("cores", [0.5, 1.3, math.inf])
@pytest.mark.parametrize("network", [*CLUSTERS[:3], LINK, Network(1e6, 1e-4)])
def test_undisturbed_workers_at_their_own_pace_are_those_of_the_formula(network, cores):
    """Whether what is sent hides behind the next step, or not; no worker is later than another one."""
    cost = replace(AT_OWN_PACE, extra=0.001)
    expected = step(replace(TIMES, steps=()), cost, Cluster(network, 8, cores))
    found = run(cost, network, 8, cores=cores)
    assert found.seconds == pytest.approx(expected.seconds, rel=1e-9)
    noisy, waiting = (step(TIMES, one, Cluster(network, 8, cores)) for one in (cost, replace(cost, waits=True)))
    assert noisy.seconds == pytest.approx(expected.seconds, rel=1e-12)
    assert noisy.seconds <= waiting.seconds * (1 + 1e-12)


def test_all_others_keep_their_rate_beside_a_slow_worker():
    """A - 1 workers take a step each while the slow one takes a part of one."""
    steps, slow = 400, Disturbances(spread=0.0, slow={1: 5.0})
    found = run(FREE, ENDLESS, 4, slow, steps)
    assert found.wall == pytest.approx(steps * 4 / (3 + 1 / 5) * TIMES.compute, abs=TIMES.compute)
    assert run(EVERY, ENDLESS, 4, slow, steps).wall > 4.9 * steps * TIMES.compute
    halted = run(FREE, ENDLESS, 4, Disturbances(spread=0.0, slow={1: 1e9}), steps)
    assert halted.wall == pytest.approx(steps * 4 / 3 * TIMES.compute, abs=TIMES.compute)


def test_random_steps_of_workers_at_their_own_pace_take_their_mean():
    """And those of all who wait for each other the mean of the largest."""
    noisy = Disturbances(spread=0.3)
    found = run(FREE, ENDLESS, 16, noisy, 400)
    assert found.wall == pytest.approx(400 * TIMES.compute * math.exp(0.3**2 / 2), rel=0.01)
    assert found.wall < 0.7 * run(EVERY, ENDLESS, 16, noisy, 400).wall
    again = run(FREE, ENDLESS, 16, noisy, 400)
    assert (found.seconds == again.seconds).all()


def test_a_slow_link_slows_who_meets_its_worker():
    """With 8 workers each other one meets it in a seventh of its steps."""
    slow = Disturbances(spread=0.0, slow_links={2: 1e7})
    steady, found, all_slow = (
        run(AT_OWN_PACE, LINK, 8, SAME, 200),
        run(AT_OWN_PACE, LINK, 8, slow, 200),
        run(AT_OWN_PACE, Network(1e7, 1e-4), 8, SAME, 200),
    )
    longer = all_slow.wall - steady.wall
    assert 0.1 * longer < found.wall - steady.wall < 0.3 * longer


def test_meetings_wait_for_links_that_are_lost():
    lost = Disturbances(spread=0.0, outages=[Outage(1, 1.0, 50.0)])
    two = run(AT_OWN_PACE, LINK, 2, lost, 40)
    assert two.wall == pytest.approx(run(AT_OWN_PACE, LINK, 2, SAME, 40).wall + 50.0, abs=2 * TIMES.compute)
    late = Disturbances(spread=0.0, outages=[Outage(1, 1e6, 50.0)])
    assert run(AT_OWN_PACE, LINK, 2, late, 40).wall == run(AT_OWN_PACE, LINK, 2, SAME, 40).wall


# ---- steps that differ


@pytest.mark.parametrize("workers", [2, 8])
def test_the_last_worker_is_as_late_as_the_largest_of_normal_numbers(workers):
    """The modelled clock waits spread e_A for the last of A workers."""
    steps, spread = 6000, 0.01
    times = replace(TIMES, update=0.0)
    found = simulate(times, SMALL, Network(1e12, 0.0), Disturbances(spread=spread), SimulatedRun(workers, steps, 0))
    late = found.seconds - times.backward_end
    error = 4 * late.std() / math.sqrt(steps) + 0.01 * spread * times.backward_end
    assert abs(late.mean() - spread * largest_of(workers) * times.backward_end) < error
    waiting = float(found.waited.mean()) / steps
    assert abs(waiting - spread * largest_of(workers) * times.backward_end) < error


def test_measured_steps_are_drawn_with_replacement():
    draws = RandomSteps(TIMES, Disturbances(slow={2: 3.0}), 5000, seed=1).factors(7)
    draws[2] /= 3
    allowed = np.array(TIMES.steps) / 0.12
    assert set(np.round(draws, 12)) == set(np.round(allowed, 12))
    assert np.mean(np.isclose(draws, 1)) == pytest.approx(2 / 5, abs=0.03)


def test_log_normal_steps_have_the_median_and_spread_that_were_asked_for():
    draws = RandomSteps(TIMES, Disturbances(spread=0.2), 100_000, seed=1).factors(0)
    assert np.median(draws) == pytest.approx(1, abs=0.005)
    assert np.std(np.log(draws)) == pytest.approx(0.2, abs=0.003)


def test_a_seed_decides_everything():
    noisy = Disturbances(spread=0.1, outages_per_hour=300.0, outage_seconds=0.5)
    jittery = Network(1e8, 1e-4, jitter=1e-3)
    for cost, options in ((EVERY, {}), (LOCAL, {"quorum": 3, "grace": 0.01})):
        first, again, other = (run(cost, jittery, 6, noisy, 40, seed, **options) for seed in (3, 3, 4))
        assert (first.seconds == again.seconds).all() and (first.waited == again.waited).all()
        assert not np.isclose(first.seconds, other.seconds).any()


def test_what_a_worker_draws_hangs_on_no_other():
    for spread in (None, 0.1):
        few, many = (RandomSteps(TIMES, Disturbances(spread=spread), workers, 5) for workers in (3, 30))
        few.factors(0)
        assert (few.factors(9) == many.factors(9)[:3]).all()


# ---- links that differ


def around_the_ring(bandwidth: np.ndarray, latency: float, nbytes: float, delays: np.ndarray) -> float:
    """Chunk by chunk: a worker sends in a round what it has got from its neighbour in the one before."""
    workers = len(bandwidth)
    end = np.zeros(workers)
    for late in delays:
        end = np.maximum(end, np.roll(end, 1)) + 8 * nbytes / workers / bandwidth + latency + late
    return float(end.max())


def test_a_ring_goes_at_the_rate_of_its_slowest_link():
    slow = {1: 2e7, 3: 5e7}
    links = UnsteadyLinks(LINK, Disturbances(slow_links=slow), 5, seed=0)
    stage = BUCKETS[0].stage(0.0, 5)
    took = links.collectives(stage, 3.0, np.ones(5, dtype=bool)) - 3.0
    assert took == pytest.approx(8 * stage.wire / 2e7 + 8 * 1e-4, rel=1e-12)
    assert took == pytest.approx(around_the_ring(links.bandwidth, 1e-4, 200_000, np.zeros((8, 5))), rel=1e-12)


def test_delays_are_on_average_those_of_the_formula_and_a_ring_is_no_later():
    jittery = Network(1e9, 1e-4, jitter=1e-3)
    stage, draws = BUCKETS[0].stage(0.0, 4), 3000
    links = UnsteadyLinks(jittery, SAME, 4, seed=0)
    ends = [0.0]
    for _ in range(draws):
        ends.append(links.collectives(stage, ends[-1], np.ones(4, dtype=bool)))
    took = np.diff(ends)
    expected = jittery.seconds(stage.wire, stage.rounds, 4)
    assert abs(took.mean() - expected) < 4 * took.std() / math.sqrt(draws)
    delays = np.random.default_rng(0).exponential(1e-3, (500, 6, 4))
    ring = np.mean([around_the_ring(links.bandwidth, 1e-4, 200_000, each) for each in delays])
    assert 0.6 * expected < ring < expected


def test_delays_of_pairs_are_those_of_all_workers_who_wait_for_all():
    network = Network(1e9, 0.0, jitter=1e-3)
    links, all_reduces = (UnsteadyLinks(network, SAME, 16, seed=0) for _ in range(2))
    pairs, alike = (Stage(0, 0, 0, 0, 2, {kind: (0, 2)}) for kind in (PAIRS, "all_reduce"))
    everyone = np.ones(16, dtype=bool)
    assert links.collectives(pairs, 0.0, everyone) == pytest.approx(all_reduces.collectives(alike, 0.0, everyone))


def test_a_burst_passes_a_machines_link_once():
    """Of all-to-alls, in which four workers send over it to all others."""
    network = Network(1e8, 0.0, burst=125_000, workers_per_machine=4, inside="nvlink")
    links, stage = UnsteadyLinks(network, SAME, 16, seed=0), Stage(0, 0, 0, 5e4, 0, {"all_to_all": (5e4, 0)})
    first = links.collectives(stage, 0.0, np.ones(16, dtype=bool))
    assert first == pytest.approx(0.0128 - 0.01)
    assert links.collectives(stage, first, np.ones(16, dtype=bool)) == pytest.approx(first + 0.0128)


def test_a_slow_link_slows_every_step_but_no_exchange_without_it():
    slow = Disturbances(spread=0.0, slow_links={2: 1e7})
    assert run(disturbances=slow).wall == pytest.approx(run(network=Network(1e7, 1e-4)).wall, rel=1e-12)
    absent = Disturbances(spread=0.0, slow_links={2: 1e7}, slow={2: 1e6})
    found = run(LOCAL, disturbances=absent, quorum=3)
    assert found.seconds[:8] == pytest.approx(run(LOCAL, workers=3).seconds[:8], rel=1e-12)


# ---- links that fail


def test_a_lost_link_delays_a_synchronous_run_by_as_long_as_it_is_lost():
    busy = Network(1e6, 1e-4)  # seconds of every step are communication
    undisturbed = run(network=busy, workers=3).wall
    once = Disturbances(spread=0.0, outages=[Outage(1, 5.0, 7.5)])
    assert run(network=busy, workers=3, disturbances=once).wall == pytest.approx(undisturbed + 7.5, rel=1e-12)
    side_by_side = Disturbances(spread=0.0, outages=[Outage(2, 30.0, 1.0), Outage(1, 5.0, 7.5), Outage(0, 6.0, 8.0)])
    found = run(network=busy, workers=3, disturbances=side_by_side).wall
    assert found == pytest.approx(undisturbed + 9.0 + 1.0, rel=1e-12)


def test_a_link_that_is_back_before_it_is_needed_delays_nothing():
    short = Disturbances(spread=0.0, outages=[Outage(1, 0.0, 0.03)])  # the first bucket is ready after 0.04 s
    assert run(disturbances=short).wall == run().wall


def test_an_averaging_with_a_quorum_goes_on_without_a_lost_link():
    lost = Disturbances(spread=0.0, outages=[Outage(3, 0.4, 1e6)])
    found = run(LOCAL, disturbances=lost, quorum=3)
    assert found.seconds[:8] == pytest.approx(run(LOCAL, workers=3).seconds[:8], rel=1e-12)
    assert found.wall == pytest.approx(0.4 + 1e6 + 8 * TIMES.compute, rel=1e-12)  # all meet at the end
    assert found.left_out.tolist() == [0, 0, 0, 3]
    assert run(LOCAL, disturbances=lost).wall > 1e6


def test_random_outages_take_the_share_of_time_in_which_no_link_is_down():
    """Outages of W links at rate a with mean length m leave exp(-W a m) of the time (a queue with endless servers)."""
    busy = Network(1e6, 1e-4)
    failing = Disturbances(spread=0.0, outages_per_hour=40.0, outage_seconds=5.0)
    up = math.exp(-4 * 40 / 3600 * 5)
    assert run(network=busy, steps=3000).wall / run(
        network=busy, disturbances=failing, steps=3000
    ).wall == pytest.approx(up, rel=0.05)


# ---- quorum


def test_a_straggler_is_waited_for_at_the_end_and_before_where_the_quorum_needs_it():
    straggler = Disturbances(spread=0.0, slow={1: 50.0})
    without, own = run(LOCAL, workers=3).seconds[:8], 50 * 12 * TIMES.compute
    for quorum, left_out in ((1, 3), (2, 3), (3, 3), (4, 0), (None, 0)):
        found = run(LOCAL, disturbances=straggler, quorum=quorum)
        assert found.left_out.tolist() == [0, left_out, 0, 0]
        assert (found.seconds[:8] == pytest.approx(without, rel=1e-12)) == (left_out == 3), quorum
        assert (found.wall == pytest.approx(own, rel=1e-12)) == (left_out == 3), quorum
    assert found.wall > own


def test_nobody_averages_who_does_not_know_the_last_consensus():
    """Worker 1 comes after the first exchange, waits for those who were in it, and is late for the third one again."""
    found = run(LOCAL, disturbances=Disturbances(spread=0.0, slow={1: 1.5}), quorum=1)
    assert found.left_out.tolist() == [0, 2, 0, 0]


def test_who_is_late_by_less_than_the_grace_is_waited_for():
    late = Disturbances(spread=0.0, slow={1: 1.1})  # 0.048 s in a period
    assert run(LOCAL, disturbances=late, quorum=3, grace=0.05).left_out[1] == 0
    assert run(LOCAL, disturbances=late, quorum=3, grace=0.05).wall == run(LOCAL, disturbances=late).wall
    assert run(LOCAL, disturbances=late, quorum=3, grace=0.04).left_out[1] > 0


def one_by_one(period: list[float], exchange: dict[int, float], needed: int, grace: float, exchanges: int):
    """The same, arrival by arrival: (end of each exchange, how often each was left out)."""
    knows, started = set(range(len(period))), [1] * len(period)
    coming = [(seconds, worker) for worker, seconds in enumerate(period)]
    heapq.heapify(coming)
    here, ends, left_out, free = [], [], [0] * len(period), 0.0
    while len(ends) < exchanges:
        while len(here) < needed or knows.isdisjoint(worker for _, worker in here):
            here.append(heapq.heappop(coming))
        closes = here[-1][0] + grace
        while coming and coming[0][0] <= max(closes, free):
            here.append(heapq.heappop(coming))
        start = max(free, closes if coming else min(closes, here[-1][0]))
        free = start + exchange[len(here)]
        for _, worker in here:
            heapq.heappush(coming, (free + period[worker], worker))
            started[worker] += 1
        knows = {worker for _, worker in here}
        for worker in {*range(len(period))} - knows:
            left_out[worker] += 1
        here = []
        ends.append(free)
    ends[-1] = max(when + (exchanges - started[worker]) * period[worker] for when, worker in coming)
    return ends, left_out


@pytest.mark.parametrize("needed, grace", [(1, 0.0), (2, 0.0), (3, 0.1), (5, 0.3), (6, 0.0)])
def test_a_quorum_is_that_of_arrivals_one_by_one(needed, grace):
    light = tuple(replace(bucket, encode=0.0, decode=(0.0, 0.0)) for bucket in BUCKETS)
    cost = replace(LOCAL, buckets=light)
    exchange = {taking: LINK.end(cost.stages([0.0] * 3, taking), taking) for taking in range(1, 7)}
    for seed in range(10):
        slow = dict(enumerate(np.random.default_rng(seed).uniform(1, 6, 6).tolist()))  # no ties: rounding decides those
        period = [4 * TIMES.compute * factor for factor in slow.values()]
        ends, left_out = one_by_one(period, exchange, needed, grace, exchanges=30)
        disturbances = Disturbances(spread=0.0, slow=slow)
        found = run(cost, workers=6, disturbances=disturbances, steps=120, quorum=needed, grace=grace)
        assert found.seconds[::4] * 4 == pytest.approx(np.diff([0.0, *ends]), rel=1e-9)
        assert found.left_out.tolist() == left_out


# ---- bad input

REFUSED = [
    ({"workers": 1}, "workers must be an integer of at least 2, got 1; type workers=2"),
    ({"steps": 0}, "steps must be an integer of at least 1, got 0; type steps=200"),
    ({"seed": -1}, "seed must be an integer of at least 0, got -1; type seed=0"),
    ({"quorum": 5, "cost": LOCAL}, "sync.quorum must be an integer of at most 4, got 5; type sync.quorum=4"),
    ({"quorum": 0, "cost": LOCAL}, "sync.quorum must be an integer of at least 1, got 0; type sync.quorum=4"),
    ({"quorum": 0.75, "cost": LOCAL}, "sync.quorum must be an integer of at least 1, got 0.75; type sync.quorum=4"),
    (
        {"quorum": 3},
        "sync.quorum must be null with every step, of which no worker may be late, got 3; type sync.quorum=null",
    ),
    ({"quorum": 3, "cost": BESIDE}, "sync.quorum must be null with beside, of which no worker may be late, got 3"),
    (
        {"grace": 2.0, "cost": LOCAL},
        "sync.grace must be 0 without a quorum, where all are waited for, got 2.0; type sync.grace",
    ),
    ({"cores": 0.0}, "cores must be above 0, got 0.0; type cores=1.0"),
    ({"grace": -1.0, "cost": LOCAL}, "sync.grace must be a number at least 0, got -1.0; type sync.grace=0.5"),
    ({"disturbances": {"slow": {4: 2.0}}}, "slow must be about workers from 0 to 3, got 4; type slow=3"),
    ({"disturbances": {"slow_links": {-1: 2e7}}}, "slow_links must be about workers from 0 to 3, got -1"),
    ({"disturbances": {"outages": [Outage(9, 1.0, 1.0)]}}, "outages must be about workers from 0 to 3, got 9"),
    (
        {"disturbances": {"slow_links": {1: 2e7}}, "network": CLUSTERS[0]},
        "slow_links must be left out where all workers are in one machine, got {1:20000000.0}; type slow_links={}",
    ),
    ({"disturbances": {"slow": {1: 0.0}}}, "slow.1 must be a number above 0, got 0.0; type slow.1=2.0"),
    ({"disturbances": {"slow_links": {1: -1e6}}}, "slow_links.1 must be a number above 0, got -1000000.0"),
    ({"disturbances": {"outages": [Outage(1, -1.0, 1.0)]}}, "outages.0.at must be a number at least 0, got -1.0"),
    ({"disturbances": {"outages": [Outage(1, 1.0, math.inf)]}}, "outages.0.seconds must be a number above 0, got inf"),
    ({"disturbances": {"spread": -0.1}}, "spread must be a number at least 0 and at most 2, got -0.1; type spread=0.1"),
    ({"disturbances": {"outages_per_hour": 2.0}}, "outage_seconds must be above 0 where outages_per_hour is, got 0.0"),
    (
        {"disturbances": {"outages_per_hour": 1e4, "outage_seconds": 60.0}},
        "outages_per_hour must be at most 45 where 4 links fail for 60 s each, or exchanges hardly ever end, got 1",
    ),
]


@pytest.mark.parametrize("options, sentence", REFUSED)
def test_what_cannot_be_is_refused_in_one_sentence(options, sentence):
    with pytest.raises(ValueRefused) as refused:
        run(**{**options, "disturbances": Disturbances(**options.get("disturbances", {}))})
    assert str(refused.value).startswith(sentence)
    assert "; type " in str(refused.value)


def test_steps_that_nobody_measured_are_not_drawn():
    unknown = replace(TIMES, steps=())
    with pytest.raises(ValueRefused, match="spread must be a number where no single step is timed, got null"):
        simulate(unknown, EVERY, LINK, Disturbances(), SimulatedRun(2, 3, 0))
    assert simulate(unknown, EVERY, LINK, SAME, SimulatedRun(2, 3, 0)).wall > 0


def test_an_empty_stage_takes_no_time():
    links = UnsteadyLinks(Network(1e8, 0.0, jitter=1.0), SAME, 2, seed=0)
    assert links.collectives(Stage(0, 0, 0, 0, 0), 2.0, np.ones(2, dtype=bool)) == 2.0
