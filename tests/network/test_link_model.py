"""Modelled time: the ledger's integers times a link, apart from what was measured."""

import json
import random
import re
from pathlib import Path

import pytest
import torch

from accordion_bench import train
from accordion_bench.__main__ import typed
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.stages import Stage
from accordion_bench.network.link_model import Exchanges, Network, exchanges_from, exchanges_of, largest_of, step_ends
from accordion_bench.options.checks import ConfigError
from accordion_bench.report.compare.grouping import group
from accordion_bench.report.compare.times import modelled_seconds
from accordion_bench.report.read import read_run
from accordion_bench.report.read.schema import problem
from accordion_bench.report.render import captions
from accordion_bench.report.render.figures import sheet
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, tiny
from tests.kit.helpers import yaml_names


def run(tmp_path, *overrides) -> RunFolder:
    train.run(tiny.cfg(tmp_path, "epochs=2", *overrides))
    return RunFolder(tiny.only(tmp_path))


def test_ring_all_reduce_by_hand():
    """2(A-1) rounds, in each of which a worker sends 1/A of its message (Thakur et al. 2005)."""
    workers, numel, network = 4, 1000, Network(bandwidth=1e6, latency=0.01)
    comm = Comm(workers)
    comm.all_reduce_mean([torch.ones(workers, numel)])
    ledger = comm.ledger.columns()
    one_round = 0.01 + 8 * (4 * numel / workers) / 1e6
    expected = 2 * (workers - 1) * one_round
    assert network.seconds(ledger["wire_bytes"], ledger["rounds"], workers) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_a_round_waits_for_the_slowest_of_its_messages(workers):
    """The mean over many draws of the largest of A exponential delays."""
    delays = torch.empty(200_000, workers).exponential_(generator=torch.Generator().manual_seed(0))
    slowest = 1e-3 * delays.max(dim=1).values.double()
    error = 5 * slowest.std() / len(slowest) ** 0.5
    assert abs(Network(1e9, 0.5, jitter=1e-3).seconds(0, 1, workers) - 0.5 - slowest.mean()) < error


def test_everybody_waits_for_the_slowest_link():
    slow = Network(1e9, 1e-4, slow_bandwidth=1e8)
    assert slow.seconds(1000, 3, 4) == Network(1e8, 1e-4).seconds(1000, 3, 4)


def test_a_slow_link_is_slower_by_the_same_factor_for_every_kind():
    usual = {"bandwidth": 1e8, "latency": 0, "kinds": {"all_to_all": {"bandwidth": 7.5e7}}}
    slow, other = Network(**usual, slow_bandwidth=2e7), Network(**usual).at(2e7)
    assert slow.seconds(1e6, 0, 4, "all_to_all") == other.seconds(1e6, 0, 4, "all_to_all") == pytest.approx(8 / 15)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_dense_twin_is_what_dense_spends(workers):
    comm = Comm(workers)
    for _ in range(3):
        comm.ledger.dense_step(1000)
        comm.all_reduce_mean([torch.ones(workers, 1000)])
    columns = comm.ledger.columns()
    assert columns["dense_rounds"] == columns["rounds"] == 3 * 2 * (workers - 1)
    modelled = Network(1e9, 1e-3).columns(comm)
    assert modelled["modelled_comm_seconds"] == modelled["modelled_dense_comm_seconds"]


# ---- buckets, one after another behind the backward pass

THREE = [Stage(1, 0.5, 0.25, 100, 2), Stage(2, 0.5, 0.25, 300, 2), Stage(4, 0.5, 0.25, 50, 2)]


def exposed(network, buckets, wait) -> float:
    """Of one exchange, and no other traffic."""
    sent, rounds = (sum(getattr(bucket, part) for bucket in buckets) for part in ("wire", "rounds"))
    return network.exposed([Exchanges(4, 1, wait, buckets)], sent, rounds, 4)


def test_without_overlap_everything_is_added():
    buckets = [bucket._replace(ready=5) for bucket in THREE]
    expected = 3 * 0.75 + 8 * 450 / 1e3 + 6 * 0.1
    assert exposed(Network(1e3, 0.1), buckets, 5) == pytest.approx(expected, rel=1e-12)


def test_on_an_infinitely_fast_link_only_the_last_codec_is_left():
    fast = Network(1e30, 0)
    assert exposed(fast, THREE, 4) == pytest.approx(0.75)
    assert exposed(fast, THREE, 10) == 0
    assert exposed(fast, [bucket._replace(encode=0, decode=0) for bucket in THREE], 4) == pytest.approx(0)


def test_one_bucket_by_hand():
    """Ready at 1, encoded at 1.5, arrived 0.8 + 0.2 later, decoded at 2.75."""
    for wait, left in ((1, 1.75), (2, 0.75), (3, 0)):
        assert exposed(Network(1e3, 0.1), THREE[:1], wait) == pytest.approx(left)


def test_bound_by_the_link():
    """Nothing is idle between the first bucket's start and the last one's end, whenever the others are ready."""
    network, seconds = Network(100, 0), 3 * 0.75 + 8 * 450 / 100
    assert network.end(THREE, 4) == pytest.approx(1 + seconds)
    assert network.end([bucket._replace(ready=0) for bucket in THREE], 4) == pytest.approx(seconds)


def in_ticks(buckets, burst=0) -> int:
    """The tick in which the last bucket has been decoded: a link of one byte and a round of one tick."""
    queue, now, tokens = list(buckets), 0, burst
    while queue:
        ready, encode, decode, wire, rounds, _ = queue.pop(0)
        work = ["wait"] * max(0, ready - now) + ["encode"] * encode
        tokens = min(burst, tokens + len(work))
        work += ["send"] * max(0, wire - tokens) + ["round"] * rounds + ["decode"] * decode
        tokens = min(burst, max(0, tokens - wire) + decode)
        now += len(work)
    return now


@pytest.mark.parametrize("burst", [0, 4, 1000])
def test_buckets_as_in_a_simulation(burst):
    draw = random.Random(burst)
    network = Network(8, 1, burst=burst)
    for _ in range(200):
        buckets = [
            Stage(ready, *(draw.randrange(6) for _ in range(4)))
            for ready in sorted(draw.randrange(40) for _ in range(draw.randrange(1, 8)))
        ]
        assert network.end(buckets, 4) == in_ticks(buckets, burst)


def test_a_burst_passes_at_once_after_a_pause():
    one, network = Stage(0, 0, 0, 100, 0), Network(8, 0, burst=60)
    assert network.end([one], 4) == 40
    assert network.end([one, one], 4) == 140
    assert network.end([one, one._replace(ready=70)], 4) == 70 + 70  # 30 idle ticks
    assert network.end([one, one._replace(ready=1000)], 4) == 1040
    assert network.end([one._replace(wire=50)] * 2, 4) == 40


@pytest.mark.parametrize("kind", ["all_to_all", "all_gather_uneven", "send_receive", "all_reduce"])
def test_a_burst_passes_a_machines_link_once_whoever_sends(kind):
    """125 kB at 100 Mbit/s are worth 10 ms, of messages to anybody, too; half of them is left for the next one."""
    network = Network(1e8, 0, burst=125_000, workers_per_machine=4, inside="nvlink")
    share = network.carried(Stage(0, 0, 0, 1, 0, {kind: (1, 0)}), 16)
    assert share == (1 if kind == "all_reduce" else pytest.approx(3.2))
    long, short = (Stage(0, 0, 0, sent / share, 0, {kind: (sent / share, 0)}) for sent in (3e6, 62_500))
    assert network.of_bucket(long, 16, 125_000) == pytest.approx(network.of_bucket(long, 16) - 0.01)
    for end in (network.end([short, long], 16), max(step_ends(network, [short, long], 16, 0.0))):
        assert end == pytest.approx(network.of_bucket(long, 16) - 0.005, abs=1e-4)


@pytest.mark.parametrize("algorithm", ["ring", "cheapest"])
@pytest.mark.parametrize("kind", ["all_to_all", "all_gather", "all_reduce"])
def test_no_burst_hastens_a_slow_link_inside(kind, algorithm):
    """With nothing to pay between machines, a burst there changes nothing."""
    slow = {"bandwidth": 1e6, "latency": 0}
    network = Network(1e30, 0, burst=1e9, workers_per_machine=4, inside=slow, algorithm=algorithm)
    one = Stage(0, 0, 0, 1e6, 0, {kind: (1e6, 15)})
    assert network.end([one], 16) == pytest.approx(network.of_bucket(one, 16))


def clocked(workers, **totals) -> Comm:
    """What a process of so many workers has on its clock."""
    comm = Comm(workers)
    comm.clock.totals.update(totals)
    return comm


@pytest.mark.parametrize("workers", [1, 4])
def test_local_workers_compute_side_by_side(workers):
    """What was measured around exchanges is left out; traffic of no exchange hides behind nothing."""
    comm = clocked(workers, data=1.0, compute=2.0, exposed=4.0, update=8.0, policy=16.0, encode=1, comm=3.0, warmup=99)
    comm.ledger.all_gather(1000)
    modelled = Network(1e3, 0.5).columns(comm)
    communication = (workers - 1) * (8 * 1000 / 1e3 + 0.5)
    assert modelled["modelled_comm_seconds"] == modelled["modelled_exposed_seconds"] == communication
    assert modelled["modelled_seconds"] == 27 / workers + communication


EXCHANGE = "gradient-4"
UNTIMED = {"series": {}, "steps": []}  # sums alone


@pytest.mark.parametrize(("overlaps", "begin"), [(True, 3), (False, 5)])
def test_local_workers_encode_side_by_side_and_decode_once(overlaps, begin):
    """Two exchanges; per exchange one bucket, ready after 3 of 5 seconds, 4 x 0.5 s encoding, 1 s decoding."""
    comm = clocked(4, compute=40.0, gradient=0)
    spent = {"wait": 10, "count": 2, "0.ready": 6, "0.encode": 4, "0.decode": 2, "0.wire": 2000, "0.rounds": 4}
    comm.clock.load_state_dict({"clock": {f"{EXCHANGE}.{key}": value for key, value in spent.items()} | UNTIMED})
    comm.ledger.counts.update(wire=4 * 2000, rounds=4, control_wire=4 * 500, control_rounds=3)
    columns = Network(8e3, 0.25).columns(comm, overlaps)
    each = begin + 0.5 + (1.0 + 2 * 0.25) + 1.0 - 5
    assert columns["modelled_exposed_seconds"] == pytest.approx(2 * each + 0.5 + 3 * 0.25)
    assert columns["modelled_seconds"] == pytest.approx(10 + columns["modelled_exposed_seconds"])
    assert columns["modelled_comm_seconds"] == pytest.approx(2.5 + 7 * 0.25)


def test_groups_that_share_a_process_exchange_side_by_side():
    comm = clocked(4)
    spent = {"wait": 4, "count": 4, "0.ready": 4, "0.encode": 8, "0.decode": 4, "0.wire": 4000, "0.rounds": 4}
    comm.clock.load_state_dict({"clock": {f"difference-2.{key}": value for key, value in spent.items()} | UNTIMED})
    (kind,) = exchanges_of(comm, True)
    assert kind == Exchanges(2, 2, 1, [Stage(1, 1, 1, 1000, 1)])
    assert exchanges_from(json.loads(json.dumps([kind]))) == [kind]


SCHEMES = [
    ["comm.bucket_cap_mb=0.0005"],
    ["sync=local_sgd", "sync.period=3"],
    ["sync=hierarchical", "sync.groups=[[1,2],[3,4]]"],
]


@pytest.mark.parametrize("overrides", SCHEMES)
def test_buckets_hold_all_traffic_but_the_first_steps(tmp_path, overrides):
    """In a real run: what the buckets have sent is what the ledger counts, without control and the first exchange."""
    folder = run(tmp_path, "epochs=2", *overrides)
    summary = folder.read_json("summary.json")
    kinds = exchanges_from(folder.read_metrics()[-1]["seconds_by_bucket"])
    sent = sum(kind.times * bucket.wire for kind in kinds for bucket in kind.buckets)
    once = summary["dense_wire_bytes"] / summary["steps"]
    if overrides == SCHEMES[0]:
        (kind,) = kinds
        assert len(kind.buckets) > 1 and kind.times == summary["steps"] - 1
        assert all(0 < bucket.ready <= kind.wait for bucket in kind.buckets)
        assert sorted(bucket.ready for bucket in kind.buckets) == [bucket.ready for bucket in kind.buckets]
        assert sent == pytest.approx(summary["wire_bytes"] - once)
    elif overrides == SCHEMES[1]:
        assert sent == pytest.approx(summary["wire_bytes"])
    else:
        assert [kind.workers for kind in kinds] == [2, 4] and kinds[0].times + kinds[1].times == summary["steps"] - 1
        assert sent == pytest.approx(summary["wire_bytes"] - once * 2 / 3)  # the first exchange is one of pairs


def test_the_last_of_several_workers_is_waited_for():
    """Expected largest of standard normals by simulation; an exchange begins that much later."""
    draws = torch.randn(200_000, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for count in (1, 2, 4, 8):
        assert largest_of(count) == pytest.approx(float(draws[:, :count].amax(1).mean()), abs=0.01)
    buckets = [Stage(0.5, 0.1, 0.0, 1e6, 2), Stage(1.0, 0.1, 0.2, 1e6, 2)]
    alike, uneven = (Exchanges(4, 3, 1.0, buckets, spread) for spread in (0.0, 0.1))
    link = Network(1e8, 1e-3)
    later = link.exposed([uneven], 6e6, 12, 4) - link.exposed([alike], 6e6, 12, 4)
    assert later == pytest.approx(3 * 0.1 * largest_of(4))


def test_in_the_long_run_nothing_is_faster_than_the_link():
    """100 steps of 1 s, each with 400 bytes at 100 a second, after which nothing is left of a burst."""
    kinds, network = [Exchanges(4, 100, 1.0, [Stage(0.5, 0, 0, 400, 0)])], Network(800, 0, burst=1000)
    assert network.exposed(kinds, 4e4, 0, 4) == 0
    assert network.exposed(kinds, 4e4, 0, 4, own=100.0) == pytest.approx(4e4 / 100 - 100)
    assert network.exposed(kinds, 4e4, 0, 4, own=1000.0) == 0


def test_a_burst_is_that_of_machines_links_not_of_those_inside():
    network = Network(1e9, 0, burst=1e6, workers_per_machine=4, inside={"bandwidth": 1e9, "latency": 0})
    one = Stage(0, 0, 0, 1.5e6, 6)
    assert network.end([one], 4) == pytest.approx(8 * 1.5e6 / 1e9) and network.carried(one, 4) == 0


def test_a_faster_link_hides_more(tmp_path):
    """The same run on other links: from its own computation alone to the bound of the link."""
    row = run(tmp_path).read_metrics()[-1]
    kinds, alike = exchanges_from(row["seconds_by_bucket"]), (row["wire_bytes"], row["rounds"], 4)
    added = [Network(bandwidth, 0).exposed(kinds, *alike) for bandwidth in (1e6, 1e8, 1e10)]
    assert added == sorted(added, reverse=True) and added[0] >= 8 * row["wire_bytes"] / 1e6 - row["seconds"]
    assert row["modelled_exposed_seconds"] == pytest.approx(Network(1e9, 5e-5).exposed(kinds, *alike))


def test_reports_put_a_run_on_another_link(tmp_path):
    """What they show for another bandwidth is what the run would have written with it."""
    wide = ["compressor=topk", "comm.bucket_cap_mb=0.0005", "network.jitter=1e-5", "network.burst=300"]
    (arm,) = group([read_run(run(tmp_path, *wide).path)])[0]
    assert modelled_seconds(arm, [1e9])[0] == pytest.approx(sheet.column(arm, "modelled_seconds"))
    row, network = arm.runs[0].rows[-1], Network(2e6, 5e-5, jitter=1e-5, burst=300)
    exposed = network.exposed(exchanges_from(row["seconds_by_bucket"]), row["wire_bytes"], row["rounds"], 4)
    expected = row["modelled_seconds"] - row["modelled_exposed_seconds"] + exposed
    assert modelled_seconds(arm, [2e6])[0, 0, -1] == pytest.approx(expected)
    assert captions.hidden([arm]) == "as far as the backward pass does not hide it"
    del arm.runs[0].rows[0]["seconds_by_bucket"][0][3][0][4:]
    assert "seconds_by_bucket" in problem(arm.config, arm.runs[0].summary, arm.runs[0].rows, True)


# ---- runs


def test_rows_and_summary_follow_from_the_ledger(tmp_path):
    folder = run(tmp_path, "sync=local_sgd", "sync.period=3", "network=internet")
    rows, summary = folder.read_metrics(), folder.read_json("summary.json")
    for row in (*rows, summary):
        assert row["modelled_comm_seconds"] == 8 * row["wire_bytes"] / 1e8 + 0.03 * row["rounds"]
        assert row["modelled_dense_comm_seconds"] == 8 * row["dense_wire_bytes"] / 1e8 + 0.03 * row["dense_rounds"]
        assert row["modelled_dense_comm_seconds"] == pytest.approx(3 * row["modelled_comm_seconds"])
    assert summary["modelled_seconds"] == rows[-1]["modelled_seconds"]


def test_decisions_take_modelled_time_too(tmp_path):
    """A dense all-reduce per measurement, beside a sparse exchange; checksums are on no clock."""
    noise = ["compressor=topk", "adaptive=noise_scale", "adaptive.noise_scale.every=2", "network=internet"]
    folder = run(tmp_path, *noise, "adaptive.noise_scale.threshold=1e9")
    summary, levels = folder.read_json("summary.json"), folder.read_metrics()[0]["plan"]["levels"]
    measured, dense = 6, 4 * summary["parameters"]  # of 12 exchanges; after each, and after each epoch, goes the plan
    plan = 4 * (3 + len(levels))
    assert summary["control_wire_bytes"] == measured * (1.5 * (dense + 8) + 0.75 * plan) + 2 * 0.75 * plan
    assert summary["control_rounds"] == measured * (6 + 6 + 3) + 2 * 3
    wire_bytes = summary["wire_bytes"] + summary["control_wire_bytes"]
    rounds = summary["rounds"] + summary["control_rounds"]
    assert summary["modelled_comm_seconds"] == 8 * wire_bytes / 1e8 + 0.03 * rounds


def test_what_control_collectives_send():
    """Ring all-reduce, chain, all-gather: mean over the workers of what each sends."""
    comm = Comm(4)
    comm.sum_(torch.zeros(100), "control")
    comm.broadcast_([torch.zeros(100)], "control")
    comm.all_gather(torch.zeros(4, 400, dtype=torch.uint8), "control")
    for account in ("eval", "setup"):
        comm.sum_(torch.zeros(100), account)
    comm.agree(7, "nothing")
    columns = comm.ledger.columns()
    assert columns["control_bytes"] == 3 * 400 + 8
    assert columns["control_wire_bytes"] == (1.5 + 0.75 + 3) * 400 and columns["control_rounds"] == 6 + 3 + 3


def test_inner_bytes_cross_the_same_link(tmp_path):
    folder = run(tmp_path, "sync=hierarchical", "sync.groups=[[1,2],[3,4]]")
    summary = folder.read_json("summary.json")
    assert 0 < summary["inner_wire_bytes"] < summary["wire_bytes"]
    assert summary["modelled_comm_seconds"] == 8 * summary["wire_bytes"] / 1e9 + 5e-5 * summary["rounds"]


def rows_behind(name: str, runs: Path) -> list[dict]:
    """Metrics behind a network, without times."""
    by_hand = ["network.bandwidth=2e7"] if name == "custom" else []
    folder = run(runs, f"network={name}", "compressor=topk", *by_hand)
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in folder.read_metrics()]


@pytest.fixture(scope="module")
def of_the_default(tmp_path_factory):
    return rows_behind("1gbit", tmp_path_factory.mktemp("default"))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", sorted(set(yaml_names("network")) - {"1gbit"}, reverse=True))
def test_the_network_changes_nothing_else(tmp_path, of_the_default, name):
    assert rows_behind(name, tmp_path) == of_the_default


def test_the_footer_says_modelled(tmp_path, capsys):
    run(tmp_path, "network=10gbit")
    told = capsys.readouterr().out
    assert re.search(r"\nmodelled  .* s for one worker on 10gbit; .* s of communication .* not hidden", told)
    folder = RunFolder(tiny.only(tmp_path))
    config, summary = RunConfig.from_dict(folder.read_config()), folder.read_json("summary.json")
    stalls = {"outlier_seconds_count": 1, "outlier_seconds": 8.0, "seconds": 10.0}
    assert "\noutliers   1 of 12 steps took 3 times" in train.footer(summary | stalls, config, folder.path)
    assert "outliers" not in train.footer(summary | stalls | {"outlier_seconds": 0.05}, config, folder.path)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("network.bandwidth=0", "network.bandwidth must be a number above 0, got 0; type network.bandwidth=1gbit"),
        ("network.bandwidth=-1e9", "network.bandwidth must be a number above 0, got -1000000000.0; type"),
        ("network.latency=-1", "network.latency must be a number at least 0, got -1; type network.latency=0.05ms"),
        ("network.latency=soon", "network.latency must be a number, got soon; type network.latency="),
        ("network.bandwidth=inf", "network.bandwidth must be a number above 0, got inf; type"),
        ("network=custom", "network.bandwidth must be a number above 0, got null; type network.bandwidth=1gbit"),
        ("network.jitter=-1e-3", "network.jitter must be a number at least 0, got -0.001; type network.jitter=0.1ms"),
        (
            "network.slow_bandwidth=2e9",
            "network.slow_bandwidth must be a number above 0 and at most 1e+09, got 2000000000.0; type",
        ),
        ("+network.loss=0.1", "network.loss is no option of Network; type --help"),
    ],
)
def test_one_sentence(tmp_path, override, told):
    with pytest.raises(ConfigError) as refused:
        train.run(tiny.cfg(tmp_path, override))
    assert told in str(refused.value) and "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_keeps_its_network(tmp_path):
    """Its earlier rows are modelled on it."""
    folder = RunFolder.create(str(tmp_path / "runs"), "x", tiny.cfg(tmp_path, "network=10gbit"))
    overrides = [f"resume={folder.path}", "network=1gbit", "model._target_=tests.kit.tiny.Net"]
    with pytest.raises(ConfigError, match="network must be 10gbit as in the run that is resumed, got 1gbit"):
        train.run(composed.cfg(*overrides), typed(overrides))


def test_columns_are_numbers(tmp_path):
    summary = run(tmp_path).read_json("summary.json")
    assert json.loads(json.dumps(summary)) == summary
    assert isinstance(summary["dense_rounds"], int) and isinstance(summary["modelled_seconds"], float)
