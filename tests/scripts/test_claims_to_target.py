"""Time to a target behind links: steps until it was reached x the time of a step there."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from accordion_bench.report.read import Run
from scripts.claims import plan, summary, to_target
from scripts.claims.outcome import Outcome
from tests.scripts.test_claims_summary import line


def run(*values):
    """Two epochs of 20 steps with a look in the middle of each."""
    rows = [
        {"epoch": 0, "step": 20, "p": values[1], "looks": [{"step": 10, "p": values[0]}]},
        {"epoch": 1, "step": 40, "p": values[3], "looks": [{"step": 30, "p": values[2]}]},
    ]
    return Run(Path("r"), {}, {}, {"metric_name": "perplexity", "selected_by": "p"}, rows)


@pytest.fixture
def done():
    return {
        "dense_bf16": {1: run(9.0, 6.0, 5.0, 4.0), 2: run(9.0, 6.0, 5.5, 4.5)},
        "fast": {1: run(4.0, 3.0, 3.0, 3.0), 2: run(6.0, 4.0, 3.0, 3.0)},
        "never": {1: run(9.0, 9.0, 9.0, 9.0), 2: run(9.0, 8.0, 5.0, 4.0)},
    }


STEP = {"link": {"dense_bf16": 2.0, "fast": 0.5}}


def test_steps_are_counted_to_the_first_look_that_reached_it(done):
    found = {arm: to_target.steps_to_target(runs, 5.0) for arm, runs in done.items()}
    assert found == {"dense_bf16": {1: 30, 2: 40}, "fast": {1: 10, 2: 20}, "never": {1: None, 2: 30}}


def test_the_target_is_what_every_seed_has_reached(done):
    assert to_target.reached_by_all(done["dense_bf16"]) == 4.5
    assert to_target.reached_by_all(done["never"]) == 9.0


def test_how_many_times_sooner_is_paired_by_seed():
    assert to_target.sooner({1: 10, 2: 20}, {1: 30, 2: 40}, 0.5, 2.0) == [12.0, 8.0]
    assert to_target.sooner({1: None, 2: 20}, {1: 30, 3: 40}, 0.5, 2.0) == []


def test_the_table(done):
    steps = {arm: to_target.steps_to_target(runs, 5.0) for arm, runs in done.items()}
    head, bf16, fast, never = to_target.cells(steps, STEP, "dense_bf16")
    assert head == ["arm", "reached", "steps", "a step, link", "to the target, link", "sooner than dense_bf16, link"]
    assert bf16[:4] == ["dense_bf16", "2 of 2", "35 ± 64", "2 s"] and bf16[5] == "1.00"
    assert fast == ["fast", "2 of 2", "15 ± 64", "0.5 s", "7.5 ± 32 s", "10.00 ± 25"]
    assert never == ["never", "1 of 2", "30", "–", "–", "–"]


def test_the_time_of_a_step_is_that_of_the_last_run_of_each_seed():
    told = [("a", 1, 60.0), ("a", 1, 30.0), ("a", 2, 50.0)]
    rows = [{**line(arm, seed, 0.9, table="lab"), "steps": 11, "seconds": seconds} for arm, seed, seconds in told]
    assert summary.link_steps(pd.DataFrame(rows), "tried", "lab") == {"a": 4.0}


def test_files_are_written_from_what_counts(done, tmp_path):
    claim = plan.read_plan("links")
    table = replace(
        claim.table("sgd-2"), to_target={"of": "dense_bf16", "baseline": "dense_bf16", "links": {"lab": "1 Gbit/s"}}
    )
    rows = [{**line("dense_bf16", 1, 9.0, table="lab"), "claim": "links", "steps": 11, "seconds": 20.0}]
    outcomes = [
        Outcome(plan.Cell("links", "sgd-2", arm, "count", 0.1, seed, ()), found)
        for arm, by_seed in done.items()
        if arm == "dense_bf16"
        for seed, found in by_seed.items()
    ]
    to_target.write_to_target(claim, table, [], pd.DataFrame(rows), tmp_path)
    assert list(tmp_path.iterdir()) == []
    to_target.write_to_target(claim, table, outcomes, pd.DataFrame(rows), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"to_target.md", "to_target.png", "times.png"}
    told = (tmp_path / "to_target.md").read_text()
    assert "Target: 4.5, validation." in told and "not that of the measured time of a step" in told


def test_the_target_and_the_baseline_may_stand_in_another_table(done, tmp_path, monkeypatch):
    """Of that table these two arms alone are taken."""
    claim = plan.read_plan("links")
    monkeypatch.setattr(to_target, "rates_of", lambda *_: dict.fromkeys(("dense", "dense_bf16", "topk"), 1.0))
    monkeypatch.setattr(to_target, "outcome", lambda cell: Outcome(cell, done["dense_bf16"][1]))
    own = Outcome(plan.Cell("links", "sgd-2-long", "averaging_30", "count", 1.0, 1, ()), done["fast"][1])
    steps = [{**line("averaging_30", 1, 9.0, table="hosts-2-100mbit"), "claim": "links"}]
    to_target.write_to_target(claim, claim.table("sgd-2-long"), [own], pd.DataFrame(steps), tmp_path)
    told = (tmp_path / "to_target.md").read_text()
    arms = [row.split("|")[1].strip() for row in told.splitlines() if row.startswith("| ")][2:]
    assert arms == ["dense", "dense_bf16", "averaging_30"] and "Target: 4, validation." in told


def test_its_links_are_tables_with_a_lab_and_have_its_arms():
    for claim in map(plan.read_plan, plan.names()):
        for table in claim.tables:
            if table.to_target is not None:
                beside = claim.table(table.to_target.get("beside", table.name))
                assert {table.to_target["of"], table.to_target["baseline"]} <= set(beside.arms)
                for link in map(claim.table, table.to_target["links"]):
                    assert link.lab and {*table.arms, table.to_target["baseline"]} <= set(link.arms)
