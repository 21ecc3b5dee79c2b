"""Runs from Python: tables, figures, and the notebook that shows them."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest

import accordion_bench as ab
from accordion_bench.report import read
from accordion_bench.report.compare.columns import tidy
from accordion_bench.report.render import figures, write
from tests.report.test_report import grouped, no_figures, run_folder  # noqa: F401

NOTEBOOK = Path(ab.__file__).parents[1] / "docs" / "report.ipynb"


@pytest.fixture
def runs(tmp_path):
    """Two arms of two seeds."""
    for seed in (0, 1):
        run_folder(tmp_path / "runs", seed=seed, accuracy=0.9 + seed / 100)
        run_folder(tmp_path / "runs", "powersgd", seed=seed, accuracy=0.89 + seed / 90, payload=100)
    return tmp_path / "runs"


def test_a_function_stays_one_whatever_is_imported():
    """The package of its name is imported before it, and takes its place no more."""
    from accordion_bench.report.compare import verdicts

    assert callable(ab.report.compare) and verdicts.answers and ab.report.__all__ == sorted(ab.report.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ab.report.nothing


@pytest.mark.parametrize("given", [str, Path, lambda path: [path], lambda path: read.read_runs([path])])
def test_runs_are_paths_or_what_was_read(runs, given):
    found = ab.report.compare(given(runs))
    assert found["arm"].tolist() == ["dense", "PowerSGD rank 2"]
    assert set(found["setting"]) == {"resnet8 on digits, 4 workers x 32 samples, 4 epochs"}
    pd.testing.assert_frame_equal(found.drop(columns="setting"), tidy(grouped(runs)))


def test_one_path_is_no_list_of_letters(runs):
    assert len(ab.report.load_metrics(str(runs))) == 16 and len(ab.report.load_runs(runs)) == 4


def test_it_is_what_the_report_writes(runs, tmp_path, no_figures):  # noqa: F811
    write.write(read.read_runs([runs]), tmp_path / "out", formats=["csv"])
    found = ab.report.compare(runs).drop(columns="setting")
    assert (tmp_path / "out" / "table.csv").read_text() == found.to_csv(index=False)


def test_of_nothing_there_is_an_empty_table(tmp_path):
    assert ab.report.compare(tmp_path).empty
    with pytest.raises(ValueError, match="of which one has finished, got none"):
        ab.report.figure(tmp_path)


def test_figures_by_their_names(runs):
    assert ab.report.figure(runs, "accuracy_epoch").axes
    with pytest.raises(ValueError, match=r"kind must be one of accuracy_bytes, .* type kind=accuracy_bytes"):
        ab.report.figure(runs, "acuracy_bytes")
    with pytest.raises(ValueError, match="kind must be a figure for which these runs have the numbers, got norms"):
        ab.report.figure(runs, "norms")


def test_of_several_settings_one_is_named(runs):
    run_folder(runs, epochs=5)
    names = list(dict.fromkeys(ab.report.compare(runs)["setting"]))
    assert len(names) == 2
    with pytest.raises(ValueError, match=r"setting must be one of the 2 of compare\(\), got null"):
        ab.report.figure(runs, "accuracy_epoch")
    assert ab.report.figure(runs, "accuracy_epoch", names[1]).axes
    with pytest.raises(ValueError, match=r"setting must be one of .*, got another; type setting=resnet8 on digits"):
        ab.report.figure(runs, "accuracy_epoch", "another")


def test_every_kind_is_drawn_or_refused_in_a_sentence(runs):
    for kind in figures.NAMES:
        try:
            assert ab.report.figure(runs, kind).axes
        except ValueError as refused:
            assert f"got {kind}" in str(refused)


def executed(notebook: Path, **changed: str) -> dict:
    """The names of a notebook's cells, run without Jupyter one after another; what a cell ends with is computed, too.

    Args:
        notebook: that holds no outputs.
        changed: assignments that are made otherwise, such as a shorter run.
    """
    names: dict = {}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            source = "".join(cell["source"])
            for name, value in changed.items():
                source = re.sub(rf"^{name} = .*$", f"{name} = {value}", source, flags=re.M)
            exec(source, names)  # what stands in our own file
    return names


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = executed(NOTEBOOK)
    assert (tmp_path / "accuracy_bytes.png").stat().st_size > 1000
    assert names["table"]["n"].tolist() == [3, 3, 3]
    assert names["table"]["difference_shown"].tolist()[1:] == ["yes", "no"]
    assert "kind must be a figure for which these runs have the numbers, got norms" in capsys.readouterr().out


def test_the_tour_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = executed(NOTEBOOK.with_name("tour.ipynb"), EPOCHS="3")
    assert names["table"]["arm"].tolist()[0] == "dense" and len(names["table"]) == 3
    assert (names["table"]["payload_times_less"].to_numpy()[1:] > 5).all()
    assert names["losses"][-1] < 0.9 * names["losses"][0]
    said = capsys.readouterr().out
    assert "\ncompressor=powersgd, " in said and "200 steps" in said
