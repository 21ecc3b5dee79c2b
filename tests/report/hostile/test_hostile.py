"""Run folders from strangers: a result or a sentence for each; honest ones beside them are as if they were alone."""

import csv
import sys
import time

import pytest
from plotly.offline import get_plotlyjs

from accordion_bench.report import read
from accordion_bench.report.__main__ import main as report_main
from accordion_bench.report.render import figures, write
from accordion_bench.report.render.write import group_sound_runs
from accordion_bench.runs.untrusted import TEXT
from tests.report.hostile import corpus
from tests.report.test_report import run_folder

SECONDS = 10  # for one folder, however slow the machine is
PAYLOAD = "from pathlib import Path\n\nPath({file!r}).touch()\n\n\nclass Payload:\n    spelled = {{'mine': 'ran'}}\n"


@pytest.fixture
def payload(tmp_path, monkeypatch):
    """The file that appears when a stranger's code has run; their module could be imported."""
    ran = tmp_path / "hostile_payload_ran"
    (tmp_path / "hostile_payload.py").write_text(PAYLOAD.format(file=str(ran)), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield ran
    sys.modules.pop("hostile_payload", None)


def texts_of(value):
    """Every text in a nested value, keys included."""
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in texts_of(part)]
    if isinstance(value, list):
        return [text for item in value for text in texts_of(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("name", corpus.CORPUS)
def test_a_folder_from_a_stranger_is_a_result_or_a_sentence(name, tmp_path, payload):
    folder = corpus.make(tmp_path / "runs", name)
    start = time.monotonic()
    run = read.read_run(folder)
    said, parts, _, (markdown, latex) = group_sound_runs([run], write.texts)
    assert time.monotonic() - start < SECONDS
    assert not payload.exists()
    for text in [run.name, run.label, run.problem, *texts_of([run.config, run.environment, run.summary])]:
        assert text.isprintable() and len(text) <= TEXT
    assert all(text.isprintable() for text in texts_of(run.rows))
    assert bool(said[0].problem) != bool(parts)
    assert all(line.isprintable() for text in [*markdown, *latex] for line in text.splitlines())
    assert "hunter2" not in "".join(markdown)


def test_there_are_enough_of_them():
    assert len(corpus.CORPUS) >= 40


def report(folder, out, *options):
    """The rows of table.csv by arm and epochs."""
    assert report_main([str(folder), "--out", str(out), *options]) == 0
    with (out / "table.csv").open(encoding="utf-8", newline="") as file:
        return {(row["arm"], row["epochs"]): row for row in csv.DictReader(file)}


def together(tmp_path, capsys, payload):
    """A report of two honest runs, alone and among the whole corpus; what the second has said."""
    runs = tmp_path / "runs"
    run_folder(runs, "none", epochs=4)
    run_folder(runs, "powersgd", epochs=4, accuracy=0.88, payload=100)
    alone = report(runs, tmp_path / "alone")
    assert len(alone) == 2
    for number, name in enumerate(corpus.CORPUS):
        corpus.make(runs, name, number)
    (runs / "sweep.jsonl").write_text('{"overrides": ["\\u001b[2J=1", {}], "error": "a\\nb"}\n' + "[" * 200_000)
    capsys.readouterr()
    among = report(runs, tmp_path / "among")
    out, err = capsys.readouterr()
    for arm, row in alone.items():  # another metric has columns of its own
        assert {column: among[arm][column] for column in row} == row
    assert not payload.exists()
    for file in ("table.md", "README.md", "report.html", "table.tex", "table.csv"):
        text = (tmp_path / "among" / file).read_text(encoding="utf-8").replace(get_plotlyjs(), "")
        assert all(line.isprintable() for line in text.splitlines()), file
        assert "hunter2" not in text
    assert all(line.isprintable() for line in (out + err).splitlines())
    return out


def test_honest_runs_among_all_of_them_have_the_same_numbers(tmp_path, capsys, monkeypatch, payload):
    monkeypatch.setattr(figures, "OF_A_SETTING", ("comparison",))
    out = together(tmp_path, capsys, payload)
    assert "no regular file" in out and "nested deeper than" in out and "more than the" not in out


@pytest.mark.slow
def test_honest_runs_among_all_of_them_with_every_figure(tmp_path, capsys, payload):
    together(tmp_path, capsys, payload)
