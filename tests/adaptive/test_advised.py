"""Advised: levels by the modelled end of a step, from a timeline; without one, L-GreCo's."""

import itertools
import re

import numpy as np
import pytest

from accordion_bench import train
from accordion_bench.adaptive.lgreco import Advised, LGreCo, Turn, end, send_slots_of, total
from accordion_bench.comm.stages import Stage
from accordion_bench.network.link_model import Network
from accordion_bench.network.timeline_file import read_timeline
from accordion_bench.plan import RunFacts, Signals, TensorSpec
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, tiny
from tests.kit.policies import ERRORS, measured, refused, started, values
from tests.kit.timelines import made, specs_of, write

SPECS = [TensorSpec("a", (8, 8)), TensorSpec("b", (8, 8))]
FAST, SLOW = 1e9, 8.0  # bit/s: a byte takes no time, and a second


def decided(policy, run=None):
    """Its values for two tensors with the errors of ERRORS and 10 bytes per rank, and what it records."""
    policy, ladder, plan = started(policy, "rank", run=run)
    plan = policy.update(Signals(0, 0.1, 0.1, probes=measured(ladder, ERRORS)), plan)
    return values(plan, ladder), policy.decision()


def advised(tmp_path, ready, wait, bandwidth, buckets=(), run=None, **options):
    """Advised by a timeline, between the same levels as L-GreCo at reference 2."""
    path = write(tmp_path / "timeline.json", made(SPECS, ready, wait, buckets))
    options = {
        "bandwidth": bandwidth,
        "latency": 0.0,
        "reference": 2,
        "levels": [1, 2, 3, 4],
        "tolerance": 0,
        **options,
    }
    return decided(Advised(timeline=path, **options), run or RunFacts(workers=4, specs=SPECS))


def test_without_a_timeline_it_is_lgreco():
    for options in ({"reference": 2}, {"reference": 2, "alpha": 1.4}, {"reference": 3}):
        levels, found = decided(Advised(levels=[1, 2, 3, 4], tolerance=0, **options))
        expected, other = decided(LGreCo(levels=[1, 2, 3, 4], **options))
        assert levels == expected
        assert {key: found[key] for key in other} == other
        run = RunFacts()
        seconds = 8 * found["wire_bytes"] / run.bandwidth
        assert found["modelled_step"] == pytest.approx(seconds) and found["modelled_wait"] == 0


def test_what_is_hidden_costs_no_error(tmp_path):
    """As fast a link as one likes: the weakest levels, and the step is the computation. A slow one: L-GreCo's."""
    levels, found = advised(tmp_path, [0.5, 0.25], 1.0, FAST)
    assert levels == [4, 4] and found["modelled_step"] == found["modelled_wait"] == 1.0
    assert found["error"] < found["error_limit"]
    levels, found = advised(tmp_path, [0.5, 0.25], 1.0, SLOW)
    assert levels == decided(LGreCo(reference=2))[0] == [1, 3]
    assert found["modelled_step"] == pytest.approx(40.25) and found["modelled_step_before"] == pytest.approx(40.25)


def test_bytes_are_not_time(tmp_path):
    """b is ready at 0, a at 30 s: what b sends until then is free, so that (1, 3) and 30 s for b beat (2, 2)."""
    levels, found = advised(tmp_path, [30.0, 0.0], 31.0, SLOW, [((1,), 0.0, 6.0), ((0,), 0.0, 6.0)])
    assert levels == [1, 3] and found["modelled_step"] == 40
    # more error allowed: b's rank costs nothing up to 3, so that the error of (1, 3) is taken, not that of (1, 1)
    levels, found = advised(tmp_path, [30.0, 0.0], 31.0, SLOW, [((1,), 0.0, 6.0), ((0,), 0.0, 6.0)], alpha=1.4)
    assert levels == [1, 3] and decided(LGreCo(reference=2, alpha=1.4))[0] == [1, 1]


def test_a_little_longer_for_a_smaller_error(tmp_path):
    """(1, 1) takes 20 s at an error of 8.0, (2, 1) 30 s at 6.0, (1, 3) 40 s at 5.0; the limit is 8.3."""
    found = {}
    for tolerance in (0.0, 0.49, 0.5, 1.0, 10.0):
        found[tolerance], _ = advised(tmp_path, [0.0, 0.0], 1.0, SLOW, alpha=8.3 / 5.9, tolerance=tolerance)
    assert found == {0.0: [1, 1], 0.49: [1, 1], 0.5: [2, 1], 1.0: [1, 3], 10.0: [4, 4]}


@pytest.mark.parametrize("seed", range(20))
def test_the_turns_are_the_pipeline_of_the_network(tmp_path, seed):
    """`end` over the turns of a timeline is the model of `Network.end` over the same buckets, at any levels."""
    draw = np.random.default_rng(seed)
    specs = [TensorSpec(f"t{i}", (16, int(draw.integers(1, 64))) if i % 3 else (24,)) for i in range(9)]
    names, workers = [spec.name for spec in specs if spec.ndim == 2], int(draw.integers(2, 9))
    buckets = [(range(6, 9), 1e-3, 6.0), (range(2, 6), 2e-3, 12.0), (range(2), 3e-3, 6.0)]
    ready = np.sort(draw.uniform(0, 0.02, 9))[::-1].tolist()
    path = write(tmp_path / "t.json", made(specs, ready, 0.02, buckets))
    link = Network(bandwidth=1e7, latency=1e-4)
    turns = send_slots_of(read_timeline(path), names, workers, link.bandwidth, link.latency)
    wire = draw.uniform(100, 5000, (len(names), 1))
    stages = []
    for members, codec, rounds in buckets:
        dense = sum(4 * specs[i].numel * 2 * (workers - 1) / workers for i in members if specs[i].ndim == 1)
        sent = dense + sum(float(wire[names.index(specs[i].name), 0]) for i in members if specs[i].ndim == 2)
        at = max(ready[i] for i in members)
        stages.append(Stage(at, codec, 0.0, sent, rounds * (workers - 1) / 3))
    got = 8 * end(wire, [0] * len(names), turns) / link.bandwidth
    assert got == pytest.approx(link.end(stages, workers), rel=1e-6)  # times are in parts of a byte


def test_the_whole_decision_equals_trying_everything(tmp_path):
    """On a grid of links: no other levels within the limit end earlier, nor as early with less error."""
    ready, wait = [0.03, 0.01], 0.05
    for bandwidth in (1e2, 1e4, 5e3, 2e4, 1e6):
        _, found = advised(tmp_path, ready, wait, bandwidth, alpha=1.2)
        errors = np.array(list(ERRORS.values()))
        seconds = np.array([[80 * rank / bandwidth for rank in (1, 2, 3, 4)]] * 2)
        turns = [Turn(ready[1], 0.0, [1]), Turn(ready[0], 0.0, [0])]
        within = [c for c in itertools.product(range(4), repeat=2) if total(errors, c) <= found["error_limit"]]
        best = min((end(seconds, c, turns, wait), total(errors, c)) for c in within)
        assert (found["modelled_step"], found["error"]) == pytest.approx(best)


def test_a_timeline_of_one_worker_and_one_without_buckets(tmp_path):
    alone = made(SPECS, [0.4, 0.2], 1.0, [((0, 1), 0.1, 0.0)], workers=1)
    (turn,) = send_slots_of(read_timeline(write(tmp_path / "one.json", alone)), ["a", "b"], 4, 8e3, 0.5)
    assert turn == Turn(400, 1000 * (0.1 + 6 * 0.5), [0, 1])  # an all-reduce of four workers has six rounds
    bare = read_timeline(write(tmp_path / "bare.json", made(SPECS, [0.4, 0.2], 1.0)))
    assert send_slots_of(bare, ["a"], 4, 8e3, 0.5) == [Turn(200, 1.5 * 256, []), Turn(400, 0.0, [0])]


def test_whole_model_and_blocks(tmp_path):
    specs = [TensorSpec(name, (8,)) for name in "abcd"]
    step = read_timeline(write(tmp_path / "t.json", made(specs, [4.0, 3.0, 2.0, 1.0], 5.0, [(range(4), 0.0, 0.0)])))
    assert send_slots_of(step, ["model"], 2, 8.0, 0.0) == [Turn(4.0, 0.0, [0])]
    assert send_slots_of(step, ["bucket from a", "bucket from c"], 2, 8.0, 0.0) == [Turn(4.0, 0.0, [0, 1])]


def test_levels_to_choose_from():
    assert Advised().ladder("rank", (1, 2)) == (1, 2, 3, 4, 1_000_000)
    assert Advised().ladder("density", (0.1, 0.99))[-1] == 1.0
    assert Advised().ladder("bits", (3, 8)) == (2, 3, 4, 5, 6, 7, 8)
    assert Advised(levels=[1, 4]).ladder("rank", (1, 2)) == (1, 2, 4)


ROW = ["adaptive=advised", "adaptive.advised.samples=2", "adaptive.advised.bandwidth=2mbit"]


def net_timeline(path) -> str:
    """Of the tiny network, two buckets."""
    specs = specs_of(tiny.Net(3, 10))
    ready = [0.01 * (len(specs) - i) for i in range(len(specs))]
    split = len(specs) // 2
    buckets = [(range(split, len(specs)), 1e-4, 6.0), (range(split), 1e-4, 6.0)]
    return write(path, made(specs, ready, 0.01 * (len(specs) + 1), buckets))


@pytest.mark.sample(3)
@pytest.mark.parametrize("compressor", ["powersgd", "topk", "qsgd"])
def test_wherever_the_workers_live(tmp_path, compressor):
    """The same plans, bytes and modelled steps in one process and in two; decisions stand in the rows."""
    rows = {}
    timeline = net_timeline(tmp_path / "timeline.json")
    few = ["adaptive.advised.levels=[2,3]", "adaptive.advised.reference=2"] if compressor == "qsgd" else []
    for name, place in (("one", ["comm=simulated"]), ("two", ["comm=gloo", "comm.processes=2"])):
        options = [f"compressor={compressor}", *ROW, *few, f"adaptive.advised.timeline={timeline}", "epochs=2", *place]
        train.run(composed.run(tmp_path / name, *options))
        rows[name] = RunFolder(tiny.only(tmp_path / name)).read_metrics()
    for one, two in zip(*rows.values(), strict=True):
        assert one["plan"] == two["plan"] and one["wire_bytes"] == two["wire_bytes"]
        (ours,), (theirs,) = (row["decisions"]["advised"]["updates"] for row in (one, two))
        assert ours["levels"] == theirs["levels"] and ours["modelled_step"] == pytest.approx(theirs["modelled_step"])
        assert ours["modelled_wait"] <= ours["modelled_step"] <= 1.01 * ours["modelled_step_before"]


def test_another_models_timeline_is_refused_before_the_first_step(tmp_path):
    path = write(tmp_path / "t.json", made(SPECS, [0.4, 0.2], 1.0))
    with pytest.raises(
        ValueError,
        match=r"advised\.timeline must be null or .* of the same model, got a \[8, 8\] .*; type adaptive\.advised\.ti",
    ):
        train.run(composed.run(tmp_path / "runs", "compressor=powersgd", *ROW, f"adaptive.advised.timeline={path}"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["adaptive.advised.bandwidth=0"], "advised.bandwidth must be a number above 0, got 0"),
        (["adaptive.advised.tolerance=-1"], "advised.tolerance must be a number at least 0, got -1"),
        (["adaptive.advised.latency=-1"], "advised.latency must be a number at least 0, got -1"),
        (
            ["adaptive.advised.timeline=no.json"],
            "advised.timeline must be null or a file .* it cannot be read",
        ),
        (["adaptive.advised.timeline=3"], "advised.timeline must be null or a file .* got 3"),
        (["adaptive.advised.alpha=0"], "advised.alpha must be a number above 0, got 0"),
        (["adaptive=[advised,accordion]"], r"drive the level; type adaptive=\[accordion,advised\]"),
        (["compressor=signsgd"], "adaptive=advised needs a compressor with levels"),
    ],
)
def test_refused_advised(options, told):
    assert re.search(told, refused("adaptive=advised", "compressor=powersgd", *options))
