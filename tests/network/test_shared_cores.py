"""Two threads on the cores of a worker: limits, conservation of work, and a twin that goes tick by tick."""

import random

import pytest

from accordion_bench.comm.stages import Stage
from accordion_bench.network.link_model import Network, fair_rates, step_ends


def some_buckets(draw: random.Random, backward: int) -> list[Stage]:
    """With numbers of whole ticks."""
    ready = sorted(draw.randrange(backward + 8) for _ in range(draw.randrange(1, 7)))
    return [Stage(when, *(draw.randrange(6) for _ in range(4))) for when in ready]


def test_with_two_cores_it_is_the_pipeline():
    draw = random.Random(0)
    for burst in (0, 4):
        network = Network(8, 1, burst=burst)
        for _ in range(200):
            buckets = some_buckets(draw, 20)
            backward, end = step_ends(network, buckets, 4, 20.0, cores=2)
            assert backward == pytest.approx(20) and end == pytest.approx(network.end(buckets, 4))


@pytest.mark.parametrize("cores", [0.5, 1.0])
def test_no_work_is_lost(cores):
    """Without links, a worker of C <= 1 cores is done after the sum of all work over C: one of both is never idle."""
    draw, free = random.Random(1), Network(1e30, 0)
    for _ in range(100):
        buckets = [bucket._replace(ready=min(bucket.ready, 19)) for bucket in some_buckets(draw, 20)]
        work = 20 + sum(bucket.encode + bucket.decode for bucket in buckets)
        assert max(step_ends(free, buckets, 4, 20.0, cores)) == pytest.approx(work / cores)


def tick_by_tick(buckets: list[Stage], backward: float, cores: float, size: float) -> tuple[float, float]:
    """The same in small ticks, in each of which cores are dealt out anew; links of one byte a second, 0.25 cores."""
    queue = [(bucket.ready, [(bucket.encode, 1.0), (bucket.wire, 0.25), (bucket.decode, 1.0)]) for bucket in buckets]
    now = computed = end = 0.0
    over = None
    while queue or computed < backward - 1e-9:
        while queue and not queue[0][1]:
            queue.pop(0)
            end = now
        works = bool(queue) and (computed >= min(queue[0][0], backward) - 1e-9)
        busy = computed < backward - 1e-9
        own, other = fair_rates(float(busy), queue[0][1][0][1] if works else 0.0, cores)
        if works:
            left, demand = queue[0][1][0]
            queue[0][1][0] = left - other * size, demand
            if queue[0][1][0][0] <= 1e-9:
                queue[0][1].pop(0)
        computed += own * size * busy
        now += size
        if computed >= backward - 1e-9 and over is None:
            over = now
    return over, end


@pytest.mark.parametrize("cores", [0.5, 1.0, 1.2])
def test_as_tick_by_tick(cores):
    draw, size = random.Random(2), 0.01
    network = Network(8, 0, kinds={"all_reduce": {"cpu": 0.25}})
    for _ in range(15):
        buckets = [bucket._replace(ready=min(bucket.ready, 10), rounds=0) for bucket in some_buckets(draw, 10)]
        ours, theirs = step_ends(network, buckets, 4, 10.0, cores), tick_by_tick(buckets, 10.0, cores, size)
        assert ours == pytest.approx(theirs, abs=4 * size * (1 + 3 * len(buckets)))


def test_shares_are_fair():
    assert fair_rates(1, 1, 2) == (1, 1) and fair_rates(1, 0, 1) == (1, 1)
    assert fair_rates(1, 1, 1) == (0.5, 0.5) and fair_rates(1, 0, 0.5) == (0.5, 1)
    assert fair_rates(1, 0.25, 1) == (0.75, 1) and fair_rates(0.25, 1, 1) == (1, 0.75)
    assert fair_rates(1, 0.5, 0.5) == (0.25, 0.5)


def test_gloo_slows_computing_where_there_is_one_core():
    """A collective of 4 s that needs half a core takes 2 s of computing away; a step is longer by it, and not by 4."""
    network = Network(8, 0, kinds={"all_reduce": {"cpu": 0.5}})
    backward, end = step_ends(network, [Stage(0, 0, 0, 4, 0)], 2, 10.0, cores=1)
    assert (backward, end) == (pytest.approx(12), pytest.approx(4))
    assert step_ends(network, [Stage(0, 0, 0, 4, 0)], 2, 10.0, cores=2) == (pytest.approx(10), pytest.approx(4))
