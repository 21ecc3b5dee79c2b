"""Modelled time in reports: runs that compute the same share their speed, whatever the machine did meanwhile."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from accordion_bench.network.link_model import Network
from accordion_bench.report.compare.beside import against_model, reached
from accordion_bench.report.compare.columns import tidy
from accordion_bench.report.compare.grouping import group
from accordion_bench.report.compare.times import modelled_seconds
from accordion_bench.report.read import Run
from accordion_bench.report.read.schema import problem
from accordion_bench.report.render import captions
from accordion_bench.report.render.captions import unequal
from accordion_bench.report.render.figures.sheet import column
from tests.kit.timed import Told

LINK = {"_target_": "accordion_bench.network.link_model.Network", "bandwidth": 1e6, "latency": 1e-3}


def run(compressor="none", seed=0, slower=1.0, steps=20, batches=(32,), stalled=None, processes=1, **of_step) -> Run:
    """Epochs of equal steps, one for each batch size, on a machine that was so many times slower than usual."""
    told, rows = Told(), []
    step = {"compute": 1.0, "encode": 0.02, "decode": 0.03, "update": 0.1, **of_step}
    step = {part: slower * seconds for part, seconds in step.items()}
    told.comm.ledger.dense_step(1000)
    for epoch, samples in enumerate(batches):
        for number in range(steps):
            stall = 8.0 if stalled == epoch * steps + number else 0.0
            told.step(**{**step, "compute": step["compute"] * samples / 32 + stall}, samples=samples)
        told.decide(slower * 0.01)
        columns = told.clock.columns(processes > 1) | told.comm.ledger.columns() | Network(1e6, 1e-3).columns(told.comm)
        columns = json.loads(json.dumps(columns))
        rows.append({"epoch": epoch, "step": steps * (epoch + 1), "lr": 0.1, "accuracy": 0.5 + 0.1 * epoch, **columns})
    config = {
        "model": {"_target_": "a"},
        "dataset": {"_target_": "b"},
        "compressor": {"_target_": compressor, "rank": 2} if compressor != "none" else {"_target_": "none"},
        "sync": {},
        "adaptive": {},
        "network": LINK,
        "batch_size": 32,
        "epochs": len(rows),
        "seed": seed,
        "target": 0.6,
        "choices": {"model": "m", "dataset": "d", "compressor": compressor, "sync": "every_step", "network": "custom"},
    }
    summary = {**rows[-1], "metric_name": "accuracy", "metric": 0.6, "best_metric": 0.6, "epochs": len(rows)}
    summary |= {"workers": processes, "processes": processes}
    return Run(Path(f"{compressor}-{seed}-{slower}"), config, {"processor": "x"}, summary, rows)


def arms(*runs):
    return group(runs)[0]


def test_a_busy_neighbour_changes_no_modelled_time():
    """Equal bytes, equal computation; one arm ran while the machine was half as fast."""
    found = arms(run(batches=(32, 32)), run("fp16", slower=2.0, batches=(32, 32)), run("bf16", batches=(32, 32)))
    quiet, slowed, _ = found
    assert slowed.mean("seconds") == pytest.approx(2 * quiet.mean("seconds"))
    for name in ("modelled_seconds", "modelled_exposed_seconds"):
        assert slowed.mean(name) == pytest.approx(quiet.mean(name))
        assert column(slowed, name) == pytest.approx(column(quiet, name))
    assert modelled_seconds(slowed, [1e5]) == pytest.approx(modelled_seconds(quiet, [1e5]))
    times = [reached(arm, 0.6, "modelled_seconds").seconds for arm in found]
    assert times[1] == pytest.approx(times[0])
    assert tidy(found)["modelled_seconds_over_dense"].tolist() == pytest.approx([1, 1, 1])
    (told,) = captions.modelled(found)
    assert "brought to one speed (what multiplied times: fp16 rank 2 0.50x)" in told


def with_waiting(share, *args, **options) -> Run:
    made = run(*args, **options)
    return replace(made, summary={**made.summary, "waited_for_cores": share})


def test_where_a_quiet_run_is_at_hand_it_says_how_fast_the_machine_is():
    """Not the median with busy ones, of which there are more; without any quiet one that counts, as ever."""
    quiet, busy = with_waiting(0.01), [with_waiting(0.4, "fp16", 1, 2.0), with_waiting(0.5, "bf16", 2, 3.0)]
    found = arms(quiet, *busy)
    for arm in found:
        assert arm.mean("modelled_seconds") == pytest.approx(quiet.summary["modelled_seconds"])
    assert [arm.mean("modelled_slowness") for arm in found] == pytest.approx([1, 2, 3])
    unknown = arms(run(), *busy)
    assert [arm.mean("modelled_slowness") for arm in unknown] == pytest.approx([0.5, 1, 1.5])
    strange = arms(with_waiting("x"), with_waiting(True, "fp16", slower=2.0))
    assert [arm.mean("modelled_slowness") for arm in strange] == pytest.approx([2 / 3, 4 / 3])


def test_steps_that_no_quiet_run_has_are_those_of_busy_ones():
    found = arms(with_waiting(0.0, batches=(32,)), with_waiting(0.4, "topk", slower=2.0, batches=(64,)))
    assert [arm.mean("modelled_slowness") for arm in found] == pytest.approx([1, 1])


def test_a_busy_machine_is_told():
    busy = arms(with_waiting(0.0), with_waiting(0.41, "fp16"))
    assert unequal(busy) == [
        "The machine was busy: processes waited for a core for part of their time (fp16 rank 2 41%), so times are too "
        "long."
    ]
    assert unequal(arms(with_waiting(0.0), with_waiting(0.04, "fp16"))) == []


def test_an_arms_own_codec_stays_its_own():
    quiet, _, heavy = arms(run(), run("bf16"), run("powersgd", slower=1.5, encode=0.5))
    assert heavy.mean("modelled_exposed_seconds") - quiet.mean("modelled_exposed_seconds") == pytest.approx(20 * 0.48)
    assert heavy.mean("modelled_seconds") - quiet.mean("modelled_seconds") == pytest.approx(20 * 0.48)


def test_a_stall_moves_no_curve_and_is_told():
    plain = arms(run(batches=(32, 32, 32)))[0]
    (stalled,) = arms(run(batches=(32, 32, 32), stalled=3, slower=1.0))
    assert column(stalled, "modelled_seconds") == pytest.approx(column(plain, "modelled_seconds"), rel=0.01)
    (told,) = captions.outliers([plain, replace(stalled, label="other")])
    assert "other 1 step, 8 s. Measured time has them" in told
    assert captions.outliers([plain]) == []


def test_curves_do_not_go_back_in_time():
    """The steps of the first epoch took longer than all later ones: what counts is what steps usually took."""
    told = run(batches=(32, 32), steps=10)
    slow = run(batches=(32,), steps=10, slower=5.0)
    first = {**slow.rows[0], "step": 10}
    mixed = replace(told, rows=[first, *told.rows[1:]])
    assert first["modelled_seconds"] > told.rows[1]["modelled_seconds"]
    (arm,) = arms(mixed)
    curve = column(arm, "modelled_seconds")[0]
    assert curve[0] == pytest.approx(curve[1] / 2)


def test_phases_are_compared_by_their_samples():
    """An arm whose batch grows is compared in the steps that it has in common with others."""
    grows = run("topk", batches=(32, 64), slower=3.0)
    found = arms(run(batches=(32, 32)), run("fp16", batches=(32, 32)), grows)
    alone = arms(run("topk", batches=(32, 64)))[0]
    assert found[2].mean("modelled_slowness") == pytest.approx(3)
    assert column(found[2], "modelled_seconds") == pytest.approx(column(alone, "modelled_seconds"))


def different(which: str) -> Run:
    """A run of half the speed that computes something else."""
    other = run("fp16", slower=2.0)
    if which == "overlap":
        return replace(other, summary={**other.summary, "processes": 2, "workers": 2})
    if which == "processor":
        return replace(other, environment={"processor": "y"})
    return replace(other, config={**other.config, which: "other"})


@pytest.mark.parametrize("which", ["precision", "model", "processor", "overlap"])
def test_what_computes_something_else_shares_nothing(which):
    plain, other = run(), different(which)
    for arm, own in zip(arms(plain, other), (plain, other), strict=True):
        assert arm.mean("modelled_seconds") == own.summary["modelled_seconds"] == arm.mean("own_modelled_seconds")


def test_older_runs_keep_what_they_say():
    old = run("fp16", slower=2.0)
    without = ("seconds_by_phase", "outlier_seconds", "outlier_seconds_count")
    rows = [{key: value for key, value in row.items() if key not in without} for row in old.rows]
    old = replace(old, rows=rows, summary={key: value for key, value in old.summary.items() if key not in without})
    found = arms(run(), old)
    assert found[1].runs[0] == old
    assert "Not so fp16 rank 2: run by an older version" in captions.modelled(found)[0]
    assert "speed" not in captions.modelled(arms(old))[0] and captions.outliers(arms(old)) == []


def test_a_model_is_compared_with_its_own_measurement():
    slowed = run("fp16", slower=2.0, processes=2)
    slowed = replace(slowed, config={**slowed.config, "comm": {"overlap": False, "interface": "eth0"}})
    quiet = run(processes=2)
    found = arms(replace(quiet, config={**quiet.config, "comm": {"overlap": False, "interface": "eth0"}}), slowed)
    assert found[1].mean("modelled_seconds") < 0.8 * slowed.summary["modelled_seconds"]
    assert against_model(found).cells[2][-2] == f"{slowed.summary['modelled_seconds']:.3g} s"


def test_a_torn_column_is_a_problem():
    one = run()
    one.rows[0]["seconds_by_phase"][0].pop()
    assert "seconds_by_phase is of the wrong type" in problem(one.config, one.summary, one.rows, True)


def test_looks_within_an_epoch_are_brought_to_the_same_speed():
    """Equal runs, one on a machine that was half as fast: both reach the target at the same look and time."""

    def looked(**changes):
        made = run(**changes)
        looks = [{"accuracy": 0.7, "modelled_seconds": made.rows[0]["modelled_seconds"] / 2, "payload_bytes": 1}]
        return replace(made, rows=[{**made.rows[0], "looks": looks}])

    found = arms(looked(), looked(compressor="fp16", slower=2.0), looked(compressor="bf16"))
    times = [reached(arm, 0.6, "modelled_seconds").seconds for arm in found]
    assert times[1] == pytest.approx(times[0], rel=1e-3)
    assert times[0][0] == pytest.approx(found[0].runs[0].rows[0]["modelled_seconds"] / 2)
