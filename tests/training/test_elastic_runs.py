"""Bench runs whose workers come and go: without a loss they are as they were, with one they end, and rows say so."""

from pathlib import Path
from typing import Any

import pytest

from accordion_bench import train
from accordion_bench.processes.placement import place
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from tests.kit import tiny
from tests.kit.processes import forked

FOUR = ("comm=gloo", "comm.processes=4", "workers=4", "comm.timeout=20", "threads=1")
ELASTIC = ("sync.elastic=true", "sync.min_workers=2")
TIMES = ("seconds", "steps_per", "outlier")


def run(folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows and the summary of a run of four processes."""
    with forked():
        train.run(tiny.cfg(folder, *FOUR, *overrides))
    found = RunFolder(tiny.only(folder))
    return found.read_metrics(), found.read_json("summary.json")


def counted(row: dict[str, Any]) -> dict[str, Any]:
    kept = ("step", "train_loss", "test_loss", "payload_bytes", "wire_bytes", "dense_bytes", "rounds", "eval_bytes")
    return {name: row[name] for name in kept}


@pytest.mark.parametrize(
    "scheme",
    [
        ("sync=diloco", "sync.period=4"),
        ("sync=streaming_diloco", "sync.period=4", "sync.delay=1"),
        ("sync=gossip",),
        ("sync=every_step", "compressor=topk", "compressor.error_feedback=true"),
    ],
)
def test_without_a_loss_it_is_the_run_as_it_was(tmp_path: Path, scheme: tuple[str, ...]) -> None:
    """Losses and bytes are equal to the bit, epoch by epoch."""
    rows, _ = run(tmp_path / "fixed", *scheme)
    elastic, _ = run(tmp_path / "elastic", *scheme, *ELASTIC)
    assert [counted(row) for row in elastic] == [counted(row) for row in rows]
    assert {(row["members"], row["joined"], row["lost"]) for row in elastic} == {(4, 0, 0)}


@pytest.mark.parametrize(
    ("rank", "scheme"),
    [
        (0, "sync=diloco"),
        (2, "sync=diloco"),
        pytest.param(2, "sync=every_step", marks=pytest.mark.slow),
        pytest.param(0, "sync=gossip", marks=pytest.mark.slow),
    ],
)
def test_a_killed_worker_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, rank: int, scheme: str
) -> None:
    """The run ends with all its epochs, whoever was the first process; each epoch has a row."""
    monkeypatch.setenv("TINY_TROUBLE", f"kill:{rank}:8")
    own = {"sync=diloco": ["sync.period=3"], "sync=gossip": ["sync.final=false"]}.get(scheme, [])
    rows, summary = run(tmp_path, scheme, *own, "epochs=8", *ELASTIC)
    assert [row["epoch"] for row in rows] == list(range(8))
    assert rows[-1]["lost"] >= 1 and rows[-1]["members"] >= 3
    assert summary["steps"] == 8 * tiny.STEPS
    assert rows[-1]["payload_bytes"] == rows[0]["payload_bytes"] * 8  # of one worker
    said = capfd.readouterr().err
    assert f"worker {rank} is lost (died: SIGKILL); another one is started" in said
    assert "reports will leave the run out" not in said  # times go on where another process writes the rows


@pytest.mark.parametrize("scheme", [("sync=diloco", "sync.period=3"), ("sync=gossip",)])
def test_a_run_goes_on_with_another_number_of_workers(tmp_path: Path, scheme: tuple[str, ...]) -> None:
    """From the consensus, or one worker's parameters, without residuals: bytes of one worker and rows are kept."""
    same = (*scheme, "schedule=constant", "checkpoint.every=12", *ELASTIC)
    first, _ = run(tmp_path, "epochs=2", *same)
    folder = tiny.only(tmp_path)
    with forked():
        typed = ("epochs=4", "workers=3", "comm=gloo", "comm.processes=3")
        cfg = tiny.cfg(tmp_path, *FOUR, *same, f"resume={folder}", *typed)
        train.run(cfg, {"epochs": 4, "workers": 3, "comm": "gloo", "comm.processes": 3, "resume": str(folder)})
    rows = RunFolder(folder).read_metrics()
    assert rows[0] == first[0] and [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert rows[1]["train_loss"] == pytest.approx(first[1]["train_loss"], rel=0.1)
    assert [row["step"] for row in rows] == [6, 12, 20, 28]  # 96 samples in batches of 4 make 8 steps of 3 workers
    assert rows[-1]["members"] == 3


def test_the_header_says_when_gradients_leave(tmp_path):
    """After the backward pass: an exchange that is repeated begins with all gradients."""
    config = RunConfig.from_dict(tiny.cfg(tmp_path, *FOUR, *ELASTIC))
    said = train.describe_exchange(config, place(config), train.validate(config, place(config)))
    assert (
        said
        == "; gradients are exchanged after the backward pass: sync.elastic may repeat an exchange with all gradients"
    )
