"""The curve of a claim: arms across tables, baselines of one table as level lines."""

import pandas as pd
import pytest

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
def points(claim):
    runs = [
        *(read(("dense", s, 0.9), table="few") for s in (1, 2)),
        *(read(("coarse", s, 0.8 + 0.01 * s), table="few") for s in (1, 2)),
        *(read(("coarse", s, 0.7), table="many") for s in (1, 2)),
        read(("coarse", 3, 0.1), table="many", rate=0.3),
        read(("coarse", 1, 0.1), table="other"),
    ]
    return curve.curve(pd.DataFrame(runs), claim)


def test_a_point_for_each_arm_and_table_of_what_counts(points):
    found = {(row["arm"], row["at"]): row["metric"] for row in points.to_dict("records")}
    assert found == pytest.approx({("dense", 4): 0.9, ("coarse", 4): 0.815, ("coarse", 8): 0.7})
    assert set(points.n) == {2}


def test_the_table_has_a_column_for_each_place(points):
    head, dense, coarse = curve.cells(points, JUDGED, "workers")
    assert head == ["accuracy, test; workers", "4", "8"]
    assert dense == ["dense", "90.00 ± 0.00", "–"] and coarse[0] == "coarse" and coarse[2] == "70.00 ± 0.00"


def test_the_figure_is_drawn(points, claim, tmp_path):
    curve.draw(points, JUDGED, "workers", summary.looks_of_claim(claim), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000


def test_where_nothing_is_done_nothing_is_written(claim, tmp_path):
    curve.write_curve(claim, pd.DataFrame([read(("dense", 1, 0.9), table="other")]), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_place_of_a_curve_is_a_table():
    plans = [found for found in map(plan.read_plan, plan.names()) if found.curve is not None]
    assert plans and all(found.table(name) for found in plans for name in found.curve["at"])
