"""Windows of strong compression: their cost, and what the policy did in them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from accordion_bench.report.read import Run
from accordion_bench.runs.metrics import metric
from scripts.claims import windows
from scripts.claims.outcome import Outcome
from scripts.claims.plan import Cell, names, read_plan

TOLD = {"of": "accordion", "whole": "weak", "at": {"late": [2, 4], "early": [0, 2]}}
ACCORDION = {"weak": 4, "strong": 1, "eta": 0.5, "_target_": "accordion_bench.adaptive.accordion.Accordion"}
NORMS = [8.0, 4.0, 5.0, 5.0]  # of an epoch: changes of 0.5, 0.25 and 0


def run(arm, accuracy, levels=(4, 4, 4, 4)):
    rows = [
        {"epoch": epoch, "lr": 0.1, "norms": {"a": norm, "bias": 1.0}, "plan": {"levels": {"a": level}}}
        for epoch, (norm, level) in enumerate(zip(NORMS, levels, strict=True))
    ]
    choices = {"adaptive": "accordion" if arm == "accordion" else "none", "compressor": "powersgd"}
    config = {"adaptive": {"accordion": ACCORDION} if arm == "accordion" else {}, "choices": choices}
    config["compressor"] = {"_target_": "accordion_bench.compressors.powersgd.PowerSGD", "rank": 4}
    return Run(Path(arm), config, {}, {"metric": accuracy, "metric_name": "accuracy"}, rows)


@pytest.fixture
def done():
    return {
        "accordion": {1: run("accordion", 0.8, (4, 4, 1, 4)), 2: run("accordion", 0.8, (4, 4, 1, 1))},
        "weak": {1: run("weak", 0.9), 2: run("weak", 0.8)},
        "early": {1: run("early", 0.7), 2: run("early", 0.62), 3: run("early", 0.1)},
    }


def test_each_window_has_its_cost_and_what_was_decided(done):
    early, late = windows.windows(TOLD, done)
    assert (early.first, early.end, early.seeds, early.called_critical) == (0, 2, 2, 1.0)
    assert early.cost.gap == pytest.approx(-0.19) and early.cost.how == "paired by seed"
    assert (late.first, late.end, late.seeds, late.called_critical) == (2, 4, 0, 0.25) and late.cost is None


def test_changes_are_of_layers_that_have_a_level_and_from_the_epoch_before(done):
    found = windows.changes(list(done["accordion"].values()))
    np.testing.assert_allclose(found, np.array([[[0.5, 0.25, 0.0]]] * 2))
    early, late = windows.windows(TOLD, done)
    assert early.change == 0.5 and late.change == 0.125


def test_the_table_says_what_is_not_shown(done):
    head, early, late = windows.cells(windows.windows(TOLD, done), metric("accuracy"))
    assert head[0] == "strong in epochs"
    assert early == ["0 to 1", "100 %", "0.50", "-19.00 ± 12.71", "2"]
    assert late == ["2 to 3", "25 %", "0.12", "–", "0"]


def test_files_are_written_from_what_counts(done, tmp_path):
    told = {"accordion": "accordion", "weak": "weak", "early": "strong_0_3"}
    outcomes = [
        Outcome(Cell("critical", "tried", told[arm], "count", 0.1, seed, ()), found)
        for arm, by_seed in done.items()
        for seed, found in by_seed.items()
    ]
    tuned = Outcome(Cell("critical", "tried", "accordion", "tune", 0.1, 100, ()), done["weak"][1])
    table = replace(read_plan("critical").table("vgg19"), windows={**TOLD, "at": {"strong_0_3": [0, 2]}})
    windows.write_windows(table, [tuned], tmp_path)
    assert list(tmp_path.iterdir()) == []
    windows.write_windows(table, [tuned, *outcomes], tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"windows.md", "windows.png"}
    assert "| -19.00 ± 12.71 |" in (tmp_path / "windows.md").read_text()


def test_the_figure_is_drawn(done, tmp_path):
    policy = list(done["accordion"].values())
    windows.draw(windows.windows(TOLD, done), policy, metric("accuracy"), tmp_path / "windows.png")
    assert (tmp_path / "windows.png").stat().st_size > 5000


def test_every_arm_of_windows_is_in_its_table():
    tables = [table for name in names() for table in read_plan(name).tables if table.windows is not None]
    assert tables
    for table in tables:
        assert {table.windows["of"], table.windows["whole"], *table.windows["at"]} <= set(table.arms)
