"""The curve of a claim: arms across tables, baselines of one table as level lines."""

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accordion_bench.report.compare.intervals import difference, half_width
from accordion_bench.report.render import looks_of
from accordion_bench.runs.metrics import metric
from scripts.claims import curve, plan, summary
from tests.scripts.test_claims_summary import line

JUDGED = metric("accuracy")


def read(name, metric_name="accuracy", **told):
    return line(*name, metric_name=metric_name, **told)


@pytest.fixture
def claim():
    """Two tables of one rate: a baseline in the first alone."""
    both = {"rates": [0.1], "seeds": [1, 2], "always": []}
    tables = [
        plan._table("few", {**both, "arms": {"dense": [], "coarse": []}}, []),
        plan._table("many", {**both, "arms": {"coarse": []}}, []),
    ]
    return plan.Plan("tried", tables, {"of": "workers", "at": {"few": 4, "many": 8}})


@pytest.fixture
def runs(claim):
    found = [
        *(read(("dense", s, 0.9), table="few") for s in (1, 2)),
        *(read(("coarse", s, 0.8 + 0.01 * s), table="few") for s in (1, 2)),
        *(read(("coarse", s, 0.7 + 0.02 * s), table="many") for s in (2, 1)),
        read(("coarse", 3, 0.1), table="many", rate=0.3),
        read(("coarse", 1, 0.1), table="other"),
    ]
    return curve.counted_runs(pd.DataFrame(found), claim)


def test_a_point_for_each_arm_and_table_of_what_counts(runs):
    points = curve.curve(runs)
    found = {(row["arm"], row["at"]): row["metric"] for row in points.to_dict("records")}
    assert found == pytest.approx({("dense", 4): 0.9, ("coarse", 4): 0.815, ("coarse", 8): 0.73})
    assert set(points.n) == {2}


def test_the_table_has_a_column_for_each_place_and_one_for_the_change(runs):
    told = curve.cells(curve.curve(runs), curve.changes(runs, "dense"), JUDGED, "workers")
    head, dense, coarse = told
    assert head == ["accuracy, test; workers", "4", "8", "8 minus 4"]
    assert dense == ["dense", "90.00 ± 0.00", "–", "–"]
    assert coarse[0] == "coarse" and coarse[2].startswith("73.00 ± ") and coarse[3].startswith("-8.50 ± ")


def test_one_place_alone_has_no_change(runs):
    few = runs[runs["at"] == 4]
    assert curve.cells(curve.curve(few), curve.changes(few, "dense"), JUDGED, "workers")[0][1:] == ["4"]


def test_a_change_is_paired_by_seed_and_told_beyond_the_baselines():
    """Of the seeds that both places have; a baseline that falls itself takes its fall off."""
    values = {
        ("dense", 4): {1: 0.9, 2: 0.8},
        ("dense", 8): {1: 0.89, 2: 0.78},
        ("coarse", 4): {1: 0.8, 2: 0.7, 3: 0.1},
        ("coarse", 8): {2: 0.6, 1: 0.72},
    }
    runs = [
        {"arm": arm, "at": at, "seed": seed, "metric": value}
        for (arm, at), by_seed in values.items()
        for seed, value in by_seed.items()
    ]
    runs = pd.DataFrame(runs)
    found = curve.changes(runs, "dense")
    whole, beyond = (found[column]["coarse"] for column in ("8 minus 4", "beyond that of dense"))
    assert whole == difference([0.72, 0.6], [0.8, 0.7], ((1, 2), (1, 2)))
    assert (whole.gap, beyond.gap) == pytest.approx((-0.09, -0.075))
    assert beyond.half == pytest.approx(half_width([-0.07, -0.08]))
    assert found["8 minus 4"]["dense"].gap == pytest.approx(-0.015)
    head, dense, _ = curve.cells(curve.curve(runs), found, JUDGED, "workers")
    assert head[3:] == ["8 minus 4", "beyond that of dense"] and dense[4] == "–"


def test_the_figure_is_drawn(runs, claim, tmp_path):
    curve.draw(curve.curve(runs), JUDGED, claim.curve, summary.looks_of_claim(claim), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_level_lines_are_of_the_arms_that_the_plan_names(runs, claim, tmp_path, monkeypatch):
    """Another arm of one place is a point there."""
    level, points = [], []
    monkeypatch.setattr(Axes, "axhline", lambda *args, label, **how: level.append(label))
    monkeypatch.setattr(Axes, "errorbar", lambda self, x, *args, label, **how: points.append((label, x)))
    told = {**claim.curve, "level": ["dense"]}
    alone = pd.concat([runs, runs[runs.arm == "dense"].assign(arm="late", at=8)])
    monkeypatch.setattr(Figure, "legend", lambda *args, **how: None)
    looks = {**summary.looks_of_claim(claim), "late": looks_of([("late", "late", False)])[0]}
    curve.draw(curve.curve(alone), JUDGED, told, looks, tmp_path / "curve.png")
    assert level == ["dense"] and points == [("coarse", [4, 8]), ("late", [8])]


def test_where_nothing_is_done_nothing_is_written(claim, tmp_path):
    curve.write_curve(claim, pd.DataFrame([read(("dense", 1, 0.9), table="other")]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_place_alone_has_no_curve(claim, tmp_path):
    few = [read(("dense", 1, 0.9), table="few"), read(("coarse", 1, 0.8), table="few")]
    curve.write_curve(claim, pd.DataFrame(few), tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_place_of_a_curve_is_a_table():
    plans = [found for found in map(plan.read_plan, plan.names()) if found.curve is not None]
    assert plans and all(found.table(name) for found in plans for name in found.curve["at"])
