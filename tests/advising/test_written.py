"""Text, CSV and JSON of advice: one set of numbers."""

import csv
import io
import json
from dataclasses import replace

import pytest

from accordion_bench.advising import text
from accordion_bench.advising.advice import Interval
from accordion_bench.options.checks import ConfigError
from tests.advising import made_up


@pytest.fixture
def advice():
    return replace(made_up.advice(1e9), verdict=("At 1 Gbit/s compress.",), doubts=("it is made up",))


def test_json_holds_the_rows_of_the_csv(advice):
    rows = list(csv.DictReader(io.StringIO(text.as_csv(advice))))
    told = json.loads(text.as_json(advice, {"torch": "2"}))
    assert [{key: str(value) for key, value in row.items()} for row in told["rows"]] == rows
    assert told["timed_with"] == {"torch": "2"} and told["workers"] == 16
    assert told["by_bandwidth"]["steps"]["dense"] == list(advice.by_bandwidth.steps["dense"])


def test_the_table_has_the_numbers_of_the_csv_rounded(advice):
    lines = text.table(advice, text.columns_of(advice)).splitlines()[1:]
    rows = list(csv.DictReader(io.StringIO(text.as_csv(advice))))
    for line, row in zip(lines, rows, strict=True):
        step = Interval(*(float(row[key]) for key in ("step", "step_low", "step_high")))
        assert text.unit_of(advice).interval(step) in line
        assert text.times(Interval(*(float(row[f"over_bf16{end}"]) for end in ("", "_low", "_high")))) in line


def test_rows_stand_by_step_time_and_all_lines_are_told(advice):
    said = text.text(advice)
    at = [said.index(f"\n{text.SPOKEN.get(row.method, row.method)} ") for row in advice.rows]
    assert at == sorted(at)
    assert said.startswith("At 1 Gbit/s compress.\n")
    assert "Left out: ATOMO rank 4: it needs matrices, and the model has none." in said
    assert "Beware: it is made up." in said


@pytest.mark.parametrize("width", [120, 80, 60, 40])
def test_a_terminal_s_table_fits(width, advice):
    """Of at most six columns those that fit; the answer stays first, and commands on one line."""
    said = text.short_text(advice, width)
    table = said.split("\n\n")[1].splitlines()
    assert max(map(len, table)) <= max(width, 50) and len(table) == 1 + len(advice.rows)
    assert 3 <= len([name for name in table[0].split("  ") if name.strip()]) <= 6
    assert said.startswith("At 1 Gbit/s compress.\n")
    assert all(len(line) <= width or line.startswith("  ") for line in said.splitlines() if line not in table)


def test_few_columns_hold_what_the_whole_table_does(advice):
    few, whole = text.few_columns(advice), text.columns_of(advice)
    assert len(few) == 6 and len(whole) > len(few)
    for row in advice.rows:
        cells = {column.name: column.cell(row) for column in whole}
        shared = [column for column in few if column.name in cells and "step" not in column.name]
        assert len(shared) >= 2 and all(column.cell(row) == cells[column.name] for column in shared)
        (ratio,) = [column.cell(row) for column in few if column.name == "x bf16"]
        assert ratio == cells["x dense bf16"]


def test_accuracies_are_told_where_some_are_known(advice):
    told = replace(advice, rows=tuple(replace(row, accuracy="-0.5 points") for row in advice.rows))
    assert (
        "accuracy against dense" in text.short_text(told, 200) and "accuracy" not in text.short_text(advice, 90)[:600]
    )


def test_what_is_estimated_has_no_interval(advice):
    """Nobody knows how far it may be off: an interval of no width would say that it is exact."""
    row = replace(advice.rows[0], step=Interval(0.1, 0.1, 0.1), over_bf16=Interval(2.0, 2.0, 2.0))
    first = text.table(replace(advice, rows=(row,)), text.columns_of(advice)).splitlines()[1]
    assert "100  " in first and "2.00  " in first and "2.00 to 2.00" not in first


def test_break_even_in_words():
    assert [text.break_even(bits) for bits in (0.0, 1.27e9, float("inf"))] == ["never", "below 1.3 Gbit/s", "always"]


@pytest.mark.parametrize(("value", "shown"), [(1234.5, "1230"), (12.345, "12.3"), (0.0012345, "0.00123"), (0.0, "0")])
def test_three_digits_without_exponent(value, shown):
    assert text.digits(value) == shown


def test_a_folder_with_advice_in_it_is_refused_with_another(advice, tmp_path):
    out = tmp_path / "advice"
    text.refuse_taken(out)
    text.write(advice, out, {}, text.text(advice))
    with pytest.raises(ConfigError) as refused:
        text.refuse_taken(out)
    assert str(refused.value).endswith(f"type --out={out}-2") and "\n" not in str(refused.value)
    assert sorted(file.name for file in out.iterdir()) == ["advice.csv", "advice.json", "advice.txt"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--out must be a folder that can be made"):
        text.refuse_taken(tmp_path / "file" / "advice")
