"""A report on a terminal: the answer, and a table that fits; all columns are in the files."""

import sys

import pytest

from accordion_bench import output
from accordion_bench.report.__main__ import main
from accordion_bench.report.compare import grouping
from accordion_bench.report.compare.columns import tidy
from accordion_bench.report.compare.grouping import settings
from accordion_bench.report.compare.verdicts import answers
from accordion_bench.report.render.tables import brief, few_columns, fitting
from tests.kit.figures import arms_of, everything, node, run
from tests.report.test_report import run_folder

WIDE = 200


def scheduled(critical, seed=0):
    made = run("powersgd", adaptive="schedule", seed=seed, cost=0.1)
    made.config["adaptive"] = {"schedule": node("adaptive", "schedule", critical=critical)}
    return made


@pytest.mark.parametrize("width", [40, 60, 80, 120, WIDE])
@pytest.mark.parametrize("metric", ["accuracy", "perplexity"])
def test_no_line_is_longer_than_the_terminal(width, metric):
    parts = settings(everything(metric))
    text = brief(
        parts, {"Unfinished, in no mean": ["a run whose name is quite long: it was stopped in epoch 3"]}, width
    )
    assert max(map(len, text.splitlines())) <= width
    assert "|" not in text and "\\" not in text and "**" not in text


def test_six_columns_at_most_and_the_metric_first():
    table = tidy(settings(everything())[0])
    names = [column.headed("terminal") for column in few_columns(table).values()]
    assert names == ["accuracy", "minus dense", "sent per worker", "time", "n"]
    assert fitting(table, WIDE).splitlines()[0].split("  ")[0] == "arm"
    assert fitting(table, 40).splitlines()[0].split() == ["arm", "accuracy"]


def test_dense_is_first_and_then_who_sends_the_most():
    for arms in settings(everything()[::-1]):
        sent = [arm.mean("wire_bytes") for arm in arms]
        assert arms[0].dense and sent[1:] == sorted(sent[1:], reverse=True)


def test_what_is_not_shown_is_in_brackets():
    arms = settings(arms_of(*(run(seed=s) for s in range(3)), *(run("topk", seed=s, end=0.899) for s in range(3))))[0]
    text = brief([arms], {}, WIDE)
    assert "(-0." in text and "(in brackets: no difference shown)" in text
    assert "brackets" not in brief([arms], {}, 30)  # that column did not fit


def test_spans_of_epochs_are_a_short_label():
    arms = arms_of(run(), scheduled([[0, 3], [5, 6]]), scheduled([[1, 4]]))
    assert [arm.label.partition(", ")[2] for arm in arms] == ["", "critical=0-3,5-6", "critical=1-4"]
    assert grouping._short([[0, 3, 4], [3, 6, 1], [6, None, 4]]) == "0-3:4,3-6:1,6-:4"


def test_arms_of_one_seed_are_counted_and_not_listed():
    several = [made for seed in range(3) for made in (run(seed=seed), run("topk", seed=seed, end=0.6))]
    alone = [scheduled([[first, first + 2]]) for first in range(4)]
    (arms,) = settings(arms_of(*several, *alone))
    assert answers(arms)[-1] == "4 arms have one seed, so no interval."


def test_a_terminal_is_told_in_short_and_the_files_have_all(tmp_path, monkeypatch, capsys):
    run_folder(tmp_path / "runs", "none")
    run_folder(tmp_path / "runs", "topk", payload=300)
    typed = [str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--formats", "md"]
    monkeypatch.setattr(output, "columns", lambda: 70)
    assert main(typed) == 0
    piped = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(typed) == 0
    told = capsys.readouterr().out
    assert "| arm" in piped and "| arm" in (tmp_path / "out" / "table.md").read_text()
    assert "|" not in told and "arm" in told and f"tables and figures: {tmp_path / 'out'}" in told.splitlines()
