"""The summary of a claim: means, paired differences, controls and times behind links, from records alone."""

import math

import pandas as pd
import pytest

from accordion_bench.report.render import looks_of
from accordion_bench.runs.metrics import metric
from scripts.claims import plan, summary

JUDGED = {"metric_name": "bits_per_byte", "selected_by": "valid_bits_per_byte"}


def line(arm, seed, value, table="one", phase="count", status="done", **more):
    """One line of records.csv."""
    spent = {"wire_bytes": 1e6, "rounds": 10, "steps": 100, "seconds": 20.0, "modelled_seconds": 30.0}
    key = {"claim": "tried", "table": table, "phase": phase, "arm": arm, "rate": 0.1, "seed": seed, "status": status}
    return {**key, **JUDGED, "metric": value, "test_at_best": value + 0.1, **spent, **more}


RECORDS = pd.DataFrame(
    [
        *(line("dense", seed, 2.0 + 0.1 * seed) for seed in (1, 2, 3)),
        *(line("diloco", seed, 2.5 + 0.1 * seed + 0.01 * (seed == 2)) for seed in (3, 1, 2)),
        *(line("diloco_one_worker", seed, 2.4 + 0.1 * seed, wire_bytes=0.0) for seed in (1, 2, 3)),
        line("diloco", 1, 1.0, rate=0.3),
        *(line("lost", seed, math.nan, status="diverged") for seed in (1, 2, 3)),
        line("dense", 100, 9.0, phase="tune"),
        line("dense", 1, 9.0, table="links", steps=11, seconds=5.0),
    ]
)
ARMS = ("dense", "bf16", "diloco", "diloco_one_worker", "lost")
TABLE = {"arms": {arm: [] for arm in ARMS}, "rates": [0.1], "seeds": [1, 2, 3]}
CHOSEN = dict.fromkeys(RECORDS.arm, 0.1)  # of a run at 0.3 nothing counts


@pytest.fixture
def rows():
    table = plan._table("one", {**TABLE, "links": "links", "against": ["dense", "lost"]}, [])
    return summary.summary(RECORDS, "tried", table, CHOSEN).set_index("arm")


def test_means_are_of_what_counts(rows):
    assert rows.loc["dense", "metric"] == pytest.approx(2.2) and rows.loc["dense", "test"] == pytest.approx(2.3)
    assert list(rows.n) == [3, 3, 3, 0] and rows.loc["lost", "diverged"] == 3


def test_arms_stand_in_the_order_of_the_plan_not_of_their_means():
    table = plan._table("one", {**TABLE, "arms": {arm: [] for arm in reversed(ARMS)}}, [])
    found = list(summary.summary(RECORDS, "tried", table, CHOSEN).arm)
    assert found == ["lost", "diloco_one_worker", "diloco", "dense"]


def test_differences_are_paired_by_seed(rows):
    gaps = [0.5, 0.51, 0.5]
    mean = sum(gaps) / 3
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / 2)
    assert rows.loc["diloco", "dense_gap"] == pytest.approx(mean)
    assert rows.loc["diloco", "dense_gap_half"] == pytest.approx(4.302653 * deviation / math.sqrt(3), rel=1e-6)
    assert rows.loc["diloco", "dense_shown"] and rows.loc["diloco", "control_gap"] == pytest.approx(mean - 0.4)
    assert math.isnan(rows.loc["dense", "dense_gap"])


def test_time_behind_links_is_steps_times_the_measured_step(rows):
    assert rows.loc["dense", "link_seconds"] == pytest.approx(50.0) and math.isnan(rows.loc["diloco", "link_seconds"])


def test_the_table_says_what_is_not_shown_and_what_diverged(rows):
    near = pd.DataFrame([*(line("dense", s, 2.0) for s in (1, 2)), line("bf16", 1, 2.1), line("bf16", 2, 1.8)])
    chosen = {"dense": 0.1, "bf16": 0.1}
    near_rows = summary.summary(near, "tried", plan._table("one", TABLE, []), chosen)
    (head, second, first) = summary.cells(near_rows, metric("bits_per_byte"), ["dense"])
    assert "not shown" in first[5] and second[5] == "–" and head[-1] == "rounds"  # nothing ran behind links
    whole = summary.cells(rows.reset_index(), metric("bits_per_byte"), ["dense", "lost"])
    assert "modelled time" not in whole[0]  # of runs that share a machine
    assert whole[-1][:3] == ["lost", "0", "diverged"] and whole[2][-1] == "–"
    assert whole[0][5:7] == ["minus dense", "minus one worker"]  # to an arm that diverged there is no difference


def test_shares_are_told_in_points():
    seen = pd.DataFrame([line("dense", s, 0.9, metric_name="accuracy") for s in (1, 2)])
    rows = summary.summary(seen, "tried", plan._table("one", TABLE, []), {"dense": 0.1})
    assert summary.cells(rows, metric("accuracy"), ["dense"])[1][3] == "90.00 ± 0.00"


def test_the_figure_has_every_arm_that_sends(rows, tmp_path):
    looks = dict(zip(rows.index, looks_of([(arm, arm, arm == "dense") for arm in rows.index]), strict=True))
    summary.draw(rows.reset_index(), metric("bits_per_byte"), looks, tmp_path / "summary.png")
    assert (tmp_path / "summary.png").stat().st_size > 5000


def test_of_a_seed_that_ran_again_the_last_run_counts():
    runs = pd.DataFrame([line("dense", 1, 9.0), line("dense", 2, 3.0), line("dense", 1, 2.0)])
    rows = summary.summary(runs, "tried", plan._table("one", TABLE, []), {"dense": 0.1})
    assert list(rows.n) == [2] and rows.metric[0] == pytest.approx(2.5)
