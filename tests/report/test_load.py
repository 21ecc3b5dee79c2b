"""Rows by column are the rows that were read, in a fraction of the memory."""

import json
import math
import tracemalloc
from concurrent.futures.process import BrokenProcessPool

import pytest

from accordion_bench.report import parallel as processes
from accordion_bench.report import read
from accordion_bench.report.parallel import each
from accordion_bench.report.read.metrics_rows import MetricsRows
from tests.report.test_report import accordion, run_folder

STRANGE = [
    {"epoch": 0, "a": 1.5, "b": None, "plan": {"levels": {"x": 2}}, "big": 2**70, "text": "é"},
    {"epoch": 1, "a": 2.0, "c": [1, [2.5, None]], "flag": True, "big": 1},
    {"a": math.inf, "epoch": 2, "plan": None, "mixed": 1},
    {"epoch": -(2**62), "mixed": 2.0, "plan": {}},
]


def test_rows_are_those_that_were_read():
    rows = MetricsRows.of(STRANGE)
    assert len(rows) == 4 and rows == STRANGE and list(rows) == STRANGE
    for row, wanted in zip(rows, STRANGE, strict=True):
        assert list(row) == list(wanted) and len(row) == len(wanted)
        for name in ("epoch", "a", "b", "c", "plan", "flag", "big", "mixed", "nowhere"):
            assert row.get(name, "none") == wanted.get(name, "none") and (name in row) == (name in wanted)
            assert type(row.get(name)) is type(wanted.get(name))
    with pytest.raises(KeyError):
        rows[0]["c"]
    with pytest.raises(IndexError):
        rows[4]
    assert rows[-1] == STRANGE[-1] and rows[1:] == STRANGE[1:] and rows != STRANGE[:3]
    assert MetricsRows.of(rows) is rows and not MetricsRows.of([])


def test_a_column_is_replaced_where_rows_have_it():
    replaced = MetricsRows.of(STRANGE).replaced(a=[9.0, 8.0, 7.0, 6.0])
    assert [row.get("a") for row in replaced] == [9.0, 8.0, 7.0, None]
    assert [row["epoch"] for row in replaced] == [row["epoch"] for row in STRANGE]


def test_rows_of_a_run_are_those_of_its_file(tmp_path):
    path = run_folder(tmp_path, "powersgd", adaptive=accordion(), epochs=9)
    expected = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert read.read_run(path).rows == expected


def test_they_take_a_fifth_of_the_memory():
    bucket = [[4, 2.0, 0.4, [[0.4, 0.1, 0.2, 1e6, 6.0, {"all_reduce": [1e6, 6.0]}]] * 4, 0.1]]
    lines = [json.dumps({**{f"c{i}": i + e / 7 for i in range(40)}, "buckets": bucket}) for e in range(300)]

    def taken(make):
        tracemalloc.start()
        kept = make()
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size, kept

    plain, _ = taken(lambda: list(map(json.loads, lines)))
    small, _ = taken(lambda: MetricsRows.of(list(map(json.loads, lines))))
    assert small < plain / 5


def test_many_items_are_worked_on_in_processes_in_their_order(monkeypatch):
    items = list(range(-processes.MANY, processes.MANY))
    assert each(abs, items, "testing") == list(map(abs, items))

    def killed(*args):
        raise BrokenProcessPool("killed")

    monkeypatch.setattr(processes, "ProcessPoolExecutor", killed)
    assert each(abs, items, "testing") == list(map(abs, items))
