"""Run folders of version 0.1 load in the report, resume, and are skipped by sweeps (`tests/fixtures/runs_0_1`).

What a resumed run gives is compared with what the code of that version gave: bytes and plans everywhere, all the rest
to the last digit on the machine of the record and within a tolerance elsewhere, for the reasons in `tests/golden`.
"""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from accordion_bench.__main__ import main
from accordion_bench.report import load_metrics
from accordion_bench.report.__main__ import main as report
from scripts import golden

OLD = Path(__file__).parents[1] / "fixtures" / "runs_0_1"
RESUMED = json.loads((OLD / "resumed.json").read_text())


@pytest.fixture(autouse=True)
def one_thread():
    with golden.one_thread():
        yield


def copy(name: str, runs: Path) -> Path:
    """A copy of an old run folder under `runs`; tests leave the old ones as they are."""
    return Path(shutil.copytree(OLD / name, runs / name))


def resumed(name: str, runs: Path) -> dict:
    """What a copy of a stopped run gives when it is resumed to its end."""
    folder = copy(name, runs)
    golden.command([f"resume={folder}", "checkpoint.every=150"])
    return golden.result(folder)


def test_reports_load_and_print_a_finished_run(tmp_path, capsys):
    folder = copy("finished", tmp_path)
    rows = load_metrics([str(folder)])
    metrics = [json.loads(line) for line in (OLD / "finished" / "metrics.jsonl").read_text().splitlines()]
    for column in ("perplexity", "payload_bytes", "wire_bytes", "test_loss"):
        assert list(rows[column]) == [row[column] for row in metrics]
    assert report([str(folder), "--out", str(tmp_path / "report"), "--formats", "md"]) == 0
    (printed,) = [line for line in capsys.readouterr().out.splitlines() if "37.3" in line]
    assert "PowerSGD" in printed and "Accordion" in printed


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RESUMED["runs"])
def test_a_stopped_run_resumes(name, tmp_path):
    record, new = RESUMED["runs"][name], resumed(name, tmp_path)
    assert golden.everywhere(record, new) == []
    if RESUMED["machine"] == golden.machine():
        assert golden.exactly(record, new) == []


def test_a_sweep_skips_a_finished_run(tmp_path, monkeypatch, capsys):
    """Of two seeds one is there already: its folder stays as it is, and the other one is trained."""
    folder = copy("finished", tmp_path)
    command = shlex.split(json.loads((folder / "environment.json").read_text())["command"])
    assert command[:3] == ["python", "-m", "accordion_bench"]
    typed = [item for item in command[3:] if not item.startswith("paths.runs=")]
    sweep = ["-m", *typed, f"paths.runs={tmp_path}", "resume_sweep=true", "seed=0,1"]
    monkeypatch.setattr(sys, "argv", ["accordion_bench", *sweep])
    main()
    assert f"done already: {folder}" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["skipped", "done"]
    assert lines[0]["folder"] == str(folder)
    assert lines[0]["metric"] == json.loads((OLD / "finished" / "summary.json").read_text())["metric"]
    untouched = [path.name for path in (OLD / "finished").iterdir() if path.name != "run.log"]
    assert all((folder / name).read_bytes() == (OLD / "finished" / name).read_bytes() for name in untouched)
