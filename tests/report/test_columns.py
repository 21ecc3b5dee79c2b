"""Columns are declared once: each key stands once, and each place shows columns that have a heading there."""

import pandas as pd
import pytest

from accordion_bench.report.compare.columns import OFTEN, PLACES, Column, columns, shown, tidy
from accordion_bench.report.compare.grouping import settings
from accordion_bench.runs.metrics import LOSSES, METRICS
from tests.kit.figures import everything


@pytest.mark.parametrize("metric", [*METRICS, *LOSSES])
def test_each_key_stands_once_and_each_place_has_headings(metric):
    keys = [column.key for column in columns(metric)]
    assert len(set(keys)) == len(keys)
    table = pd.DataFrame([{**dict.fromkeys(keys), "metric": metric, "selected_by": metric}])
    for place in PLACES:
        found = shown(table, place)
        assert all(column.key in keys and column.headed(place) for column in found.values())
    assert set(OFTEN) <= shown(table, "page").keys()


def test_a_table_has_every_column_in_its_order():
    (arms,) = settings(everything())
    assert list(tidy(arms)) == [column.key for column in columns("accuracy")]


@pytest.mark.parametrize(
    "numbers, unit, text", [([5.0, 2e6, 3e9], "MB", "2.00"), ([], "B", "2000000"), ([7], "B", "2000000")]
)
def test_the_unit_is_that_of_the_middle_number(numbers, unit, text):
    column = Column("bytes", unit="B", show=lambda value: f"{value:.2f}", scales={"GB": 1e9, "MB": 1e6})
    scaled = column.scaled([*numbers, float("nan")])
    assert scaled.unit == unit and scaled.show(2e6).startswith(text)
