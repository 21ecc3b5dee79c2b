"""The table of advice from times and costs by hand."""

import math
from dataclasses import replace

import pytest

from accordion_bench.advising.advice import advise
from accordion_bench.advising.cluster import Cluster
from accordion_bench.advising.predict import break_even, shortest_period, step
from accordion_bench.advising.text import text
from accordion_bench.network.link_model import Network
from accordion_bench.options.checks import ConfigError
from tests.advising.made_up_costs import ALL, BF16, FP32, GATHERED, LOCAL, NUMEL, SMALL, method, times


def cluster(bandwidth=1e9, workers=4, latency=0.0, cores=math.inf) -> Cluster:
    return Cluster(Network(bandwidth, latency), workers, cores)


def test_bound_by_computing_and_by_the_link():
    """Without codec: computing alone on a fast link; on a slow one the first gradient, all messages, the update."""
    assert step(times(), FP32, cluster(1e15)).seconds == pytest.approx(0.1)
    slow = step(times(), FP32, cluster(1e6))
    messages = 4 * 1.5 * 4 * NUMEL * 8 / 1e6
    assert slow.seconds == pytest.approx(0.03 + messages + 0.01)
    assert slow.exposed == pytest.approx(slow.seconds - 0.1)


def test_codecs_hide_behind_computing_but_the_last_one():
    assert step(times(), SMALL, cluster(1e15)).seconds == pytest.approx(0.09 + 0.01 + 0.01)


def test_on_one_core_all_work_is_added():
    work = 0.09 + 4 * 0.01 + 0.01
    assert step(times(), SMALL, cluster(1e15, cores=1)).seconds == pytest.approx(work)
    assert step(times(), SMALL, cluster(1e15, cores=0.5)).seconds == pytest.approx(2 * work)


def test_turns_at_a_core_are_no_communication():
    """Four workers on two cores compute for twice as long, whatever they send; it is not exposed, and hides nothing."""
    alone = replace(FP32, buckets=())
    taken = step(times(), alone, cluster(cores=0.5))
    assert taken.seconds == pytest.approx(0.2) and taken.exposed == pytest.approx(0)
    found = advise(times(), ALL, cluster(1e9, cores=0.5))
    assert found.compute.value == pytest.approx(0.2) and found.row("local SGD").period < 100


def test_without_overlap_everything_is_added():
    late = replace(FP32, overlaps=False)
    assert step(times(), late, cluster(1e9)).seconds == pytest.approx(0.1 + 4 * 1.5 * 4 * NUMEL * 8 / 1e9)


def test_gathered_messages_grow_with_the_workers():
    """Bytes of an all-gather, and decoding, are linear in A; of an all-reduce, bounded."""
    few, many = (step(times(), GATHERED, cluster(1e9, workers)).seconds for workers in (4, 64))
    assert few < step(times(), FP32, cluster(1e9, 4)).seconds
    assert many > step(times(), FP32, cluster(1e9, 64)).seconds


def test_the_shortest_period_is_the_shortest():
    for bandwidth in (3e6, 1e7, 1e8, 1e9):  # the first between 8192 and 16384 steps
        where = cluster(bandwidth)
        found = shortest_period(times(), LOCAL, where)
        taken = step(times(), found, where)
        assert taken.exposed < 0.05 * taken.seconds
        one_less = step(times(), replace(found, period=found.period - 1), where)
        assert one_less.exposed >= 0.05 * one_less.seconds
    assert shortest_period(times(), LOCAL, cluster(1e13)).period == 1


def test_a_longest_period_that_does_not_hide_is_said():
    far, near = (text(advise(times(), ALL, cluster(bandwidth))) for bandwidth in (1e6, 3e6))
    (line,) = [line for line in far.splitlines() if line.startswith("local SGD")]
    assert "16384, 10 % exposed" in line
    assert " % exposed" not in near


def test_fewer_workers_of_a_machine_share_its_cores():
    """Eight workers on two cores have a quarter of one each; of two workers, each has one. A GPU is not shared."""
    network = Network(1e9, 0.0, workers_per_machine=8, inside="pcie4")
    crowded = Cluster(network, 16, 0.25)
    for device, cores in (("cpu", 1.0), ("cuda", 0.25)):
        found = advise(times(device=device), ALL, crowded).by_workers
        expected = step(times(), FP32, Cluster(network, 2, cores)).seconds
        assert found.steps["dense fp32"][found.at.index(2)] == expected


def test_an_average_that_travels_beside_the_next_steps():
    """It is free while computing takes longer, and then what lasts."""
    beside = replace(LOCAL, overlaps=True, period=8)
    assert step(times(), beside, cluster(1e9)).seconds == pytest.approx(0.1)
    messages = 4 * 1.5 * 4 * NUMEL * 8 / 1e6
    assert step(times(), beside, cluster(1e6)).seconds == pytest.approx(messages / 8)
    blocking = step(times(), replace(beside, overlaps=False), cluster(1e6))
    assert blocking.seconds == pytest.approx(0.1 + messages / 8)


def test_fragments_travel_beside_a_part_of_the_steps():
    """Each of two fragments has H / 2 steps and is hidden by two of them."""
    fragments = replace(LOCAL, overlaps=True, parts=((0, 3), (1, 2)), delay=2)
    each = 2 * 1.5 * 4 * NUMEL * 8  # bits of a fragment that a link carries
    hidden = step(times(), replace(fragments, period=8), cluster(each / 0.19))
    assert hidden.seconds == pytest.approx(0.1) and hidden.exposed == pytest.approx(0, abs=1e-12)
    taken = step(times(), replace(fragments, period=8), cluster(each / 0.5))
    assert taken.seconds == pytest.approx((0.5 + 2 * 0.1) / 4) and taken.exposed == pytest.approx(0.3 / 4)
    short = shortest_period(times(), fragments, cluster(each / 0.19))
    assert short.period == 6  # a fragment needs more than its delay
    longer = shortest_period(times(), fragments, cluster(each / 0.5))
    own = step(times(), longer, cluster(each / 0.5))
    assert longer.period % 2 == 0 and own.exposed < 0.05 * own.seconds
    one_less = step(times(), replace(longer, period=longer.period - 2), cluster(each / 0.5))
    assert one_less.exposed >= 0.05 * one_less.seconds
    whole = replace(LOCAL, overlaps=True, delay=None, period=8)
    assert step(times(), replace(whole, delay=8), cluster(1e6)) == step(times(), whole, cluster(1e6))


def test_break_even_is_where_both_take_the_same():
    where = cluster(1e9)
    found = break_even(times(), SMALL, FP32, where)
    own, dense = (step(times(), cost, where.at(found)).seconds for cost in (SMALL, FP32))
    assert own == pytest.approx(dense, rel=0.005) and 1e8 < found < 1e11
    below, above = where.at(found / 2), where.at(2 * found)
    assert step(times(), SMALL, below).seconds < step(times(), FP32, below).seconds
    assert step(times(), SMALL, above).seconds > step(times(), FP32, above).seconds


def test_break_even_of_what_always_and_never_wins():
    half = replace(FP32, name="half", buckets=BF16.scaled(0.0).buckets)
    slower = replace(FP32.scaled(1.0), name="slower", extra=1.0)
    assert 1e9 < break_even(times(), half, FP32, cluster()) < 1e12  # above it nothing is left to gain
    assert break_even(times(), replace(half, extra=-0.05), FP32, cluster()) == math.inf
    assert break_even(times(), slower, FP32, cluster()) == 0


def test_a_method_with_fewer_rounds_and_more_bytes_wins_on_fast_links_only():
    """Messages are gathered in half the rounds of an all-reduce, and are longer among many workers."""
    gathered = method("gathered", NUMEL, "all_gather")
    many = cluster(1e10, workers=16, latency=1e-3)
    assert step(times(), gathered, many).seconds < step(times(), FP32, many).seconds
    assert step(times(), gathered, many.at(1e7)).seconds > step(times(), FP32, many.at(1e7)).seconds
    assert math.isnan(break_even(times(), gathered, FP32, many))


def test_the_table():
    found = advise(times(), ALL, cluster(1e8))
    assert [row.step.value for row in found.rows] == sorted(row.step.value for row in found.rows)
    dense = found.row("dense fp32")
    assert dense.over_fp32 == (1, 1, 1) and dense.payload_bytes == 16 * NUMEL and dense.wire_bytes == 24 * NUMEL
    for row in found.rows:
        assert row.over_fp32.value == pytest.approx(dense.step.value / row.step.value)
        assert row.step.low <= row.step.value <= row.step.high
        assert found.by_bandwidth.steps[row.method][found.by_bandwidth.at.index(1e8)] == row.step.value
        assert found.by_workers.steps[row.method][found.by_workers.at.index(4)] == row.step.value
    assert found.by_bandwidth.at[0] == 1e7 and found.by_bandwidth.at[-1] == pytest.approx(4e11)
    assert found.by_workers.at[0] == 2 and found.by_workers.at[-1] == 4096
    local = found.row("local SGD")
    assert local.local and local.period > 1 and local.wire_bytes * local.period == pytest.approx(24 * NUMEL)
    assert found.compute.value == pytest.approx(0.1) and not found.doubts


def test_intervals_hold_what_was_measured_differently():
    """Steps that differ make intervals; ratios, of the same draws, differ less than steps."""
    uneven = times(steps=tuple(0.1 * factor for factor in (0.8, 0.9, 0.95, 1.0, 1.0, 1.0, 1.05, 1.1, 1.2, 1.3)))
    found = advise(uneven, ALL, cluster(1e10))
    bf16 = found.row("dense bf16")
    assert bf16.step.low < bf16.step.value < bf16.step.high
    wide = (bf16.step.high - bf16.step.low) / bf16.step.value
    assert bf16.over_fp32.high - bf16.over_fp32.low < wide / 5
    alike = advise(times(), ALL, cluster(1e7), link_error=0.1).row("dense fp32")
    assert alike.step.low < 0.9 * alike.step.value and alike.over_fp32 == (1, 1, 1)
    assert advise(uneven, ALL, cluster()) == advise(uneven, ALL, cluster())


def test_few_steps_and_wide_spreads_are_told():
    (few,) = advise(times(steps=(0.1,) * 9), ALL, cluster()).doubts
    assert few == "a trial here has 9 steps, fewer than 10: record more before you rely on this"
    wide = times(steps=(0.05, 0.1, 0.2, 0.3) * 3, source="timeline.json")
    (told,) = advise(wide, ALL, cluster()).doubts
    assert told.startswith("the steps of timeline.json differ by 46 % about their median, more than 30 %")


def test_without_a_baseline():
    with pytest.raises(ConfigError, match="methods must hold compressor=bf16, with which others are compared"):
        advise(times(), [FP32, SMALL], cluster())


def test_a_sparse_average_has_no_period_and_is_exposed_whole():
    """Each step waits for p of a model's bytes; the step of the optimizer comes before."""
    sparta = replace(LOCAL, name="SPARTA", overrides=("sync=sparta",), every_local_step=True)
    found = advise(times(), [*ALL, sparta], cluster(1e9)).row("SPARTA")
    assert (found.local, found.period) == (True, 1)
    assert found.exposed.value == pytest.approx(4 * 1.5 * 4 * NUMEL * 8 / 1e9)


def test_pairs_wait_for_one_other_worker():
    """Neither messages nor waiting grow with the workers, as they do where all average."""
    uneven = times(steps=(0.09, 0.1, 0.11) * 10)
    pairs = replace(method("noloco", 4 * NUMEL, "send_receive"), local=True, overlaps=False, period=10)
    everybody = replace(LOCAL, period=10)
    few, many = (step(uneven, pairs, cluster(1e9, workers, 1e-3)) for workers in (2, 1000))
    assert few == many
    assert few.exposed < step(uneven, everybody, cluster(1e9, 1000, 1e-3)).exposed
