"""Elastic bench runs under launchers that start lost workers again: agents of torchrun, and tasks of Slurm."""

from pathlib import Path
from typing import Any

import pytest

from accordion_bench import train
from accordion_bench.comm.sealed_store import SealedStore
from accordion_bench.processes.placement import Placement
from accordion_bench.processes.watchdog import Watch
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from tests.kit import processes, tiny
from tests.kit.restarting import Agents
from tests.kit.stores import LocalStore

ELASTIC = ("comm=gloo", "comm.timeout=20", "threads=1", "sync.elastic=true", "sync=diloco", "sync.period=4")
EPOCHS = 40


def ended(runs: Path, steps: int, epochs: int = EPOCHS) -> list[dict[str, Any]]:
    """The rows of a run that has ended with all its epochs, and with the bytes of a worker that was always there."""
    folder = RunFolder(tiny.only(runs))
    rows = folder.read_metrics()
    assert folder.done
    assert [row["epoch"] for row in rows] == list(range(epochs))
    assert rows[-1]["step"] == epochs * steps
    assert rows[-1]["payload_bytes"] == epochs * rows[0]["payload_bytes"]
    return rows


@pytest.mark.parametrize(
    ("workers", "rank"), [(2, 0), *(pytest.param(3, rank, marks=pytest.mark.slow) for rank in (0, 2))]
)
def test_a_restarted_worker_joins_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, rank: int
) -> None:
    """Whichever it is; nobody else is restarted."""
    processes.start_forking()
    monkeypatch.setenv("TINY_TROUBLE", f"kill:{rank}:9")
    agents = Agents(tiny.cfg(tmp_path, *ELASTIC, f"workers={workers}", f"epochs={EPOCHS}"), workers)
    assert agents.run() == [0] * workers
    assert agents.begun == [2 if other == rank else 1 for other in range(workers)]
    rows = ended(tmp_path, steps=24 // workers)
    assert {row["members"] for row in rows} <= {workers - 1, workers}
    assert [rows[-1][name] for name in ("members", "joined", "lost")] == [workers, 1, 1]


def test_a_first_process_that_is_restarted_before_the_start_keeps_the_folder(tmp_path: Path) -> None:
    """The others may have read its name."""
    config = RunConfig.from_dict(tiny.cfg(tmp_path, *ELASTIC, "workers=2", "comm.processes=2"))
    where = Placement("gloo", 2, 1, launcher="environment")
    parts, watch = train.validate(config, where), Watch(SealedStore(LocalStore(), 2), 0, 2, 0, 5.0)
    first, again = (train._make_or_resume_folder(config, where, parts, watch, "") for _ in range(2))
    assert first.path == again.path == tiny.only(tmp_path)


@pytest.mark.slow
def test_workers_that_are_all_restarted_continue_from_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with one agent for all, which ends the others when one is lost; rows are those of an undisturbed run."""
    processes.start_forking()
    monkeypatch.setenv("TINY_TROUBLE", "kill:1:21")
    own = "workers=2", "epochs=4", "checkpoint.every=4", "resume_sweep=true"
    agents = Agents(tiny.cfg(tmp_path, *ELASTIC, *own), 2, together=True)
    assert agents.run() == [0, 0]
    assert agents.begun == [2, 2]
    rows = ended(tmp_path, steps=12, epochs=4)
    assert {(row["members"], row["joined"], row["lost"]) for row in rows} == {(2, 0, 0)}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_agents_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """One agent for each worker: it restarts its worker, and the other one continues."""
    marker = tmp_path / "killed"
    monkeypatch.setenv("FAULT", f"kill:{rank}:9:{marker}")
    own = "workers=2", "epochs=40", "dataset.train_size=480", "model._target_=tests.kit.faulty.Net"
    jobs = processes.agents("static", tiny.typed(tmp_path / "runs", *ELASTIC, *own), restarts=2)
    done = processes.outputs(jobs, 250)
    assert [job.returncode for job in done] == [0, 0] and marker.exists(), done
    last = ended(tmp_path / "runs", steps=60)[-1]
    assert (last["joined"], last["lost"]) == (1, 1)
    assert sum("at the end" in job.stdout for job in done) == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_tasks_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """A lost task returns with the same variables; without the first one, which hosts the store, all begin again."""
    marker = tmp_path / "killed"
    monkeypatch.setenv("FAULT", f"kill:{rank}:70:{marker}")
    own = ("epochs=40", "dataset.train_size=480", "model._target_=tests.kit.faulty.Net", "workers=2")
    own = (*own, "checkpoint.every=60", "resume_sweep=true")
    done = processes.outputs(processes.tasks(tiny.typed(tmp_path / "runs", *ELASTIC, *own), tries=3), 250)
    assert [job.returncode for job in done] == [0, 0] and marker.exists(), done
    last = ended(tmp_path / "runs", steps=60)[-1]
    assert (last["joined"], last["lost"]) == ((1, 1) if rank else (0, 0))
    if not rank:
        assert "the store of the run must outlive its workers" in done[1].stderr
        assert "Traceback" not in done[1].stderr


@pytest.mark.slow
def test_a_task_that_does_not_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one comes to the end alone."""
    monkeypatch.setenv("FAULT", "kill:1:9")
    own = "epochs=4", "model._target_=tests.kit.faulty.Net", "workers=2"
    done = processes.outputs(processes.tasks(tiny.typed(tmp_path, *ELASTIC, *own)))
    assert [job.returncode for job in done] == [0, -9]
    last = ended(tmp_path, steps=12, epochs=4)[-1]
    assert [last[name] for name in ("members", "joined", "lost")] == [1, 0, 1]
