"""Claims: what a plan asks for, which rate is chosen, what is recorded, and that an archive gives runs again."""

import csv
import io
import json
import os
import shlex
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from accordion_bench.config.compose import compose
from accordion_bench.config.validate import validate
from accordion_bench.processes.placement import place
from accordion_bench.report.read import Run
from accordion_bench.run_config import RunConfig
from scripts.claims import __main__ as program
from scripts.claims import archive, launch, plan, records, same_bytes, tables
from scripts.claims.kept import keep_shown
from scripts.claims.launch import command
from scripts.claims.outcome import Outcome, best_rates, outcome
from scripts.packed import read_packed
from tests.report.test_report import run_folder

TABLE = {
    "always": ["model=resnet8"],
    "arms": {"dense": [], "topk": ["compressor=topk"]},
    "rates": [0.1, 0.2],
    "tune_seed": 7,
    "tuning": ["epochs=2"],
    "seeds": [1, 2, 3],
}


def planned(**told):
    """A claim of one table."""
    return plan.Plan("tried", [plan._table("one", {**TABLE, **told}, TABLE["always"])])


def ran(root, cell, accuracy, **summary):
    """A finished run in a cell's folder, with other numbers at its end."""
    spent = {key: summary[f"{key}_bytes"] for key in ("payload", "wire") if f"{key}_bytes" in summary}
    path = run_folder(root / cell.folder, seed=cell.seed, accuracy=accuracy, **spent)
    file = path / "summary.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **summary}))
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


TABLES = [(claim, table.name) for claim in plan.names() for table in plan.read_plan(claim).tables]


@pytest.mark.sample(7)
@pytest.mark.parametrize(("claim", "name"), TABLES)
def test_every_table_can_run(claim, name):
    """Each arm is a configuration that is not refused."""
    whole = plan.read_plan(claim)
    table = whole.table(name)
    cells = whole.tune_cells(table) + whole.count_cells(table, {arm: table.grid(arm)[0] for arm in table.arms})
    assert {cell.arm for cell in cells} == set(table.arms)
    schedules = table.same_bytes or {"arms": {}}
    for arm in schedules["arms"]:
        typed = [*schedules["overrides"], "adaptive.schedule.critical=[[0,2],[3,4]]"]
        cells.append(whole.cell(table, arm, "count", table.rates[0], 1, typed))
    for cell in {(cell.arm, cell.phase): cell for cell in cells}.values():
        hosts = ["comm=gloo", f"comm.processes={cell.lab[cell.lab.index('--hosts') + 1]}"] if cell.lab else []
        config = RunConfig.from_dict(compose([*cell.overrides, *hosts, "hydra.mode=RUN"]))
        assert config.optimizer["lr"] == cell.rate and config.seed == cell.seed
        chosen_by = config.dataset.get("validation") or config.dataset.get("metric_split", "test")
        assert chosen_by != "test", "choices are by the validation split"
        validate(config, place(config))


def test_tuning_is_short_and_on_a_seed_of_its_own():
    cells = planned().tune_cells(planned().tables[0])
    assert [(cell.arm, cell.rate) for cell in cells] == [(a, r) for a in ("dense", "topk") for r in (0.1, 0.2)]
    assert {cell.seed for cell in cells} == {7} and all("epochs=2" in cell.overrides for cell in cells)


def test_an_arm_or_a_tuning_run_replaces_what_its_table_says():
    table = planned(overrides=["epochs=9", "batch_size=8"]).tables[0]
    tuned = planned().cell(table, "dense", "tune", 0.1, 7, ["epochs=2"])
    assert tuned.overrides == ("model=resnet8", "batch_size=8", "epochs=2", "optimizer.lr=0.1", "seed=7")


def test_what_counts_takes_the_chosen_rate_every_arm_once_before_the_second_seed():
    cells = planned().count_cells(planned().tables[0], {"dense": 0.1, "topk": 0.2})
    assert [(cell.arm, cell.rate, cell.seed) for cell in cells[:3]] == [
        ("dense", 0.1, 1),
        ("topk", 0.2, 1),
        ("dense", 0.1, 2),
    ]
    assert len(cells) == 6 and not any("epochs=2" in cell.overrides for cell in cells)
    assert len({cell.folder for cell in cells}) == 6


def test_an_arm_without_a_rate_waits():
    assert {cell.arm for cell in planned().count_cells(planned().tables[0], {"topk": 0.2})} == {"topk"}


@pytest.mark.parametrize("told", [{"rates": [0.1]}, {"rates_from": "other"}])
def test_one_rate_or_another_tables_needs_no_tuning(told):
    assert planned(**told).tune_cells(planned(**told).tables[0]) == []


def test_the_best_of_the_validation_split_is_chosen(here):
    claim = planned()
    for cell, accuracy in zip(claim.tune_cells(claim.tables[0]), (0.8, 0.7, 0.6, 0.9), strict=True):
        ran(here, cell, accuracy)
    found = [outcome(cell) for cell in claim.tune_cells(claim.tables[0])]
    assert best_rates(found) == {"dense": 0.1, "topk": 0.2}


def test_less_is_better_for_perplexity():
    claim = planned()
    found = [
        Outcome(cell, Run(Path("run"), summary={"metric_name": "perplexity", "metric": value}))
        for cell, value in zip(claim.tune_cells(claim.tables[0]), (90.0, 80.0, 70.0, 75.0), strict=True)
    ]
    assert best_rates(found) == {"dense": 0.2, "topk": 0.1}


def test_a_rate_that_diverged_is_not_chosen_and_one_that_is_missing_is_waited_for(here):
    claim = planned()
    cells = claim.tune_cells(claim.tables[0])
    (ran(here, cells[0], 0.99, stopped_by="NonFinite") / "done").unlink()
    for cell in cells[1:3]:
        ran(here, cell, 0.5)
    assert outcome(cells[0]).status == "diverged" and outcome(cells[3]).status == "not started"
    assert best_rates(map(outcome, cells)) == {"dense": 0.2}


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_run_whose_last_metric_is_no_number_has_diverged(here, value):
    claim = planned()
    cells = claim.tune_cells(claim.tables[0])
    ran(here, cells[0], 0.9, metric=value)
    for cell in cells[1:]:
        ran(here, cell, 0.5)
    assert outcome(cells[0]).status == "diverged" and outcome(cells[0]).ended
    assert best_rates(map(outcome, cells)) == {"dense": 0.2, "topk": 0.1}


def test_a_run_is_recorded_once_with_the_command_that_makes_it_again(here):
    cell = planned().count_cells(planned().tables[0], {"dense": 0.1})[0]
    ran(here, cell, 0.9)
    for _ in range(2):
        records.record(outcome(cell))
    (row,) = csv.DictReader(io.StringIO(read_packed(records.FILE)))
    assert row["status"] == "done" and float(row["metric"]) == 0.9 and row["run_hash"] == outcome(cell).hash
    assert shlex.split(row["command"]) == ["python", *command(cell)]
    assert "model=resnet8" in row["command"] and "seed=1" in row["command"]


@pytest.mark.parametrize("rows", [None, b""])
def test_every_run_that_diverged_before_its_first_row_is_recorded_once(here, rows):
    cells = planned().count_cells(planned().tables[0], {"dense": 0.1})
    for cell in cells:
        path = ran(here, cell, 0.9, stopped_by="NonFinite")
        (path / "done").unlink()
        (path / "metrics.jsonl").unlink()
        if rows is not None:
            (path / "metrics.jsonl").write_bytes(rows)
    for cell in [*cells, *cells]:
        records.record(outcome(cell))
    lines = csv.DictReader(io.StringIO(read_packed(records.FILE)))
    assert [(row["status"], row["seed"]) for row in lines] == [("diverged", s) for s in "123"]


def test_what_has_not_ended_is_not_recorded(here):
    cell = planned().count_cells(planned().tables[0], {"dense": 0.1})[0]
    records.record(outcome(cell))
    (ran(here, cell, 0.9) / "done").unlink()
    records.record(outcome(cell))
    assert not records.FILE.exists()


SPENT = {"wire_bytes": 100, "rounds": 4, "steps": 40, "seconds": 2.0}
OF_ACCORDION = {"of": "mixed", "between": ["weak", "strong"], "overrides": ["adaptive=schedule"]}
THREE = {"weak": [], "strong": [], "mixed": []}


@pytest.fixture
def with_schedules():
    """A claim with two schedules that have the bytes of an arm."""
    arms = {"first": "start", "drawn": "random"}
    return planned(arms=THREE, seeds=[1, 2], rates=[0.1], same_bytes={**OF_ACCORDION, "arms": arms})


def test_schedules_wait_for_the_three_runs_of_their_seed_and_have_the_bytes_of_one(here, with_schedules):
    table = with_schedules.tables[0]
    rates = dict.fromkeys(THREE, 0.1)
    payloads = {"weak": 400, "strong": 100, "mixed": 250}
    assert same_bytes.same_bytes_cells(with_schedules, table, rates) == []
    for cell in with_schedules.count_cells(table, rates):
        if cell.seed == 2:
            ran(here, cell, 0.9, payload_bytes=payloads[cell.arm], epochs=4)
    first, drawn = same_bytes.same_bytes_cells(with_schedules, table, rates)
    assert (first.arm, first.seed, first.rate) == ("first", 2, 0.1)
    assert "adaptive.schedule.critical=[[0,2]]" in first.overrides and "adaptive=schedule" in first.overrides
    assert drawn.overrides != first.overrides and drawn.seed == 2


def test_chosen_epochs_are_as_many_as_the_bytes_ask_for():
    assert same_bytes.chosen_epochs("start", 3, 10, seed=1) == [0, 1, 2]
    drawn = [same_bytes.chosen_epochs("random", 3, 10, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and all(len(set(epochs)) == 3 for epochs in drawn)
    assert same_bytes.ranges([0, 1, 4, 6, 7]) == [[0, 2], [4, 5], [6, 8]] and same_bytes.ranges([]) == []


def test_schedules_have_the_rate_of_the_arm_whose_bytes_they_have(with_schedules):
    chosen = with_schedules.tables[0].all_rates({"weak": 0.3, "mixed": 0.2})
    assert chosen == {"weak": 0.3, "mixed": 0.2, "first": 0.2, "drawn": 0.2}
    assert planned().tables[0].all_rates({"dense": 0.1}) == {"dense": 0.1}


def test_an_archive_gives_the_runs_again(here):
    cell = planned().count_cells(planned().tables[0], {"dense": 0.1})[0]
    path = ran(here, cell, 0.9)
    environment = path / "environment.json"
    environment.write_text(json.dumps({"command": "/somebody/bin/python -m accordion_bench seed=1", "commit": "abc"}))
    (path / "checkpoint").mkdir()
    (path / "checkpoint" / "big.pt").write_bytes(b"0" * 1000)
    archive.pack("tried")
    path.rename(here / "before")
    assert outcome(cell).status == "not started"
    archive.unpack("tried")
    again = outcome(cell)
    assert again.status == "done" and not (again.run.path / "checkpoint").exists()
    assert again.run.environment == {"command": "python -m accordion_bench seed=1", "commit": "abc"}
    assert again.run.rows == [json.loads(line) for line in (here / "before" / "metrics.jsonl").open()]


def test_an_archive_that_is_stopped_while_it_is_written_stays_as_it_was(here, monkeypatch):
    for cell in planned().count_cells(planned().tables[0], {"dense": 0.1}):
        ran(here, cell, 0.9)
    archive.pack("tried")
    before = archive.archive_of("tried").read_bytes()

    def stopped(*_):
        raise SystemExit(143)

    monkeypatch.setattr(archive, "_add", stopped)
    with pytest.raises(SystemExit):
        archive.pack("tried")
    assert archive.archive_of("tried").read_bytes() == before


def test_a_run_behind_links_is_started_by_netlab():
    claim = planned(lab=["--hosts", "2"], rates=[0.1])
    (cell, *_) = claim.count_cells(claim.tables[0], {"dense": 0.1})
    assert command(cell)[:5] == ["-m", "accordion_bench.netlab", "--hosts", "2", "--"]
    assert command(cell)[-1] == "hydra.mode=RUN"


def test_a_run_that_says_very_much_comes_to_its_end(here, monkeypatch, capsys):
    """More than a pipe holds."""
    cell = planned(rates=[0.1]).count_cells(planned().tables[0], {"dense": 0.1})[0]
    monkeypatch.setattr(
        launch, "command", lambda _: ["-c", "import sys; sys.stderr.write('much\\n' * 100_000 + 'last')"]
    )
    launch.run([cell], "data", launch.Budget(1, time.monotonic() + 100), lambda _: None)
    assert capsys.readouterr().out == f"{cell.name}: not started: last\n"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_call_where_it_waits_for_its_runs(signum):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    program.stop_on_signals()
    try:
        with pytest.raises(SystemExit) as stopped:
            os.kill(os.getpid(), signum)
        assert stopped.value.code == 128 + signum
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_table_that_no_plan_has_is_a_sentence():
    with pytest.raises(SystemExit, match="TABLE of tried must be one of one, got two"):
        planned().table("two")


def test_no_run_at_a_time_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["scripts.claims", "signs", "--jobs", "0"])
    with pytest.raises(SystemExit, match="--jobs must be a number of at least 1, got 0"):
        program.main()


def test_no_such_claim():
    with pytest.raises(SystemExit, match=r"CLAIM must be one of .*gpt.*, got nothing"):
        plan.read_plan("nothing")


def test_a_table_of_runs_that_are_done_gets_its_report_its_rates_and_its_summary(here):
    claim = planned(rates=[0.1])
    for cell in claim.count_cells(claim.tables[0], dict.fromkeys(TABLE["arms"], 0.1)):
        ran(
            here,
            cell,
            0.9 + 0.01 * cell.seed + 0.001 * (cell.arm == "topk"),
            selected_by="accuracy",
            test_at_best=0.9,
            **SPENT,
        )
    old = here / "results/claims/tried/one/comparison-of-a-setting-that-is-no-more.png"
    old.parent.mkdir(parents=True)
    old.touch()
    program.finish(claim, claim.tables)
    assert not old.exists()
    assert {"README.md", "rates.md", "summary.md", "summary.csv", "summary.png"} <= {
        file.name for file in (here / "results/claims/tried/one").iterdir()
    }
    assert len(read_packed(records.FILE).splitlines()) == 7
    assert (here / "results/claims/tried/runs.tar.xz").is_file()


def test_the_pictures_that_the_claims_page_shows_stay_with_few_colours_and_all_others_go(here):
    claim = planned(rates=[0.1])
    for cell in claim.count_cells(claim.tables[0], dict.fromkeys(TABLE["arms"], 0.1)):
        accuracy = 0.9 + 0.01 * cell.seed + 0.001 * (cell.arm == "topk")
        ran(here, cell, accuracy, selected_by="accuracy", test_at_best=0.9, **SPENT)
    page = here / "results/claims/tried/README.md"
    page.parent.mkdir(parents=True)
    page.write_text("# Claim\n\n![summary](one/summary.png)\n")
    program.finish(claim, claim.tables)
    program.finish(claim, claim.tables, here / "all")
    drawn, kept = here / "all/one", page.parent / "one"
    assert [file.name for file in kept.glob("*.png")] == ["summary.png"]
    assert {"summary.png", "comparison.png", "table.md"} <= {file.name for file in drawn.iterdir()}
    assert not (kept / "table.md").exists()
    report, whole = (folder / "README.md" for folder in (kept, drawn))
    assert "![comparison](comparison.png)" in whole.read_text() and "](comparison.png)" not in report.read_text()
    left = [line for line in whole.read_text().splitlines() if not line.startswith("![")]
    assert list(filter(None, report.read_text().splitlines())) == list(filter(None, left))
    few, many = (Image.open(folder / "summary.png") for folder in (kept, drawn))
    assert few.mode == "P" and few.size == many.size
    difference = np.abs(np.asarray(few.convert("RGB"), float) - np.asarray(many.convert("RGB"), float))
    assert difference.mean() < 0.5
    before = (kept / "summary.png").read_bytes()
    keep_shown(page.parent)
    assert (kept / "summary.png").read_bytes() == before


def test_an_arm_with_a_grid_of_its_own_stands_in_the_table_of_rates(here):
    table = planned(own_rates={"topk": [0.2]}).tables[0]
    tables.write_rates(table, [], {}, here / "rates.md")
    rows = [line for line in (here / "rates.md").read_text().splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1 and "0.2: not run" in rows[-1]


def test_one_arm_alone_has_no_figure_of_its_summary(here):
    claim = planned(rates=[0.1], arms={"topk": TABLE["arms"]["topk"]})
    for cell in claim.count_cells(claim.tables[0], {"topk": 0.1}):
        ran(here, cell, 0.9, selected_by="accuracy", test_at_best=0.9, **SPENT)
    program.finish(claim, claim.tables)
    written = {file.name for file in (here / "results/claims/tried/one").iterdir()}
    assert {"README.md", "summary.md", "summary.csv"} <= written and "summary.png" not in written


def test_steps_behind_links_have_no_summary(here):
    """Their few steps are for times alone."""
    claim = planned(rates=[0.1], lab=["--hosts", "2"])
    for cell in claim.count_cells(claim.tables[0], dict.fromkeys(TABLE["arms"], 0.1)):
        ran(here, cell, 0.9, selected_by="accuracy", test_at_best=0.9, **SPENT)
    program.finish(claim, claim.tables)
    written = {file.name for file in (here / "results/claims/tried/one").iterdir()}
    assert "README.md" in written and not any(name.startswith("summary") for name in written)
