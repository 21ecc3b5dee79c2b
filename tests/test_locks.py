"""Locks between processes, with and without a file system that has them."""

import errno
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from accordion_bench import locks, train
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs import reuse
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training import launch
from tests.kit import tiny

OWNER = """import sys, time
from filelock import SoftFileLease
lease = SoftFileLease(sys.argv[1], lease_duration=float(sys.argv[2]))
lease.acquire()
print(flush=True)
time.sleep(60)
"""


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def without_locks(request, monkeypatch):
    """A file system that refuses every lock."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(request.param, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    monkeypatch.setattr(locks, "LEASE", 0.6)
    locks.tell.cache_clear()


def killed_owner(path: Path) -> None:
    """The owner file of a process that has been killed."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(path), str(locks.LEASE)], stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline()
    owner.kill()
    owner.wait()


@pytest.mark.sample(3)
def test_without_locks_an_owner_file_keeps_others_out_and_is_told_once(tmp_path, without_locks, capsys):
    lock = tmp_path / "run" / "run.lock"
    lock.parent.mkdir()
    with locks.locked(lock):
        assert (lock.parent / "run.owner").exists()
        with pytest.raises(locks.Taken), locks.locked(lock):
            pass
        time.sleep(2 * locks.LEASE)
        with pytest.raises(locks.Taken), locks.locked(lock):
            pass
    with locks.locked(lock):
        pass
    told = capsys.readouterr().err
    assert told.count("warning") == 1 and f"{tmp_path} is on a file system without locks" in told


def test_without_locks_a_killed_owner_keeps_nobody_out(tmp_path, without_locks):
    lock = tmp_path / "run.lock"
    killed_owner(tmp_path / "run.owner")
    with locks.locked(lock):
        pass


def test_without_locks_an_owner_elsewhere_that_renews_no_more_counts_as_gone(tmp_path, without_locks):
    lock, owner = tmp_path / "run.lock", tmp_path / "run.owner"
    killed_owner(owner)
    import socket

    owner.write_text(owner.read_text().replace(socket.gethostname(), "elsewhere"))
    began = time.monotonic()
    with locks.locked(lock):
        assert time.monotonic() - began >= locks.LEASE


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EIO])
def test_where_nothing_can_be_written_nobody_is_kept_out(number, tmp_path, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(number, "not now")

    monkeypatch.setattr("filelock._unix.UnixFileLock._acquire", refuse)
    with locks.locked(tmp_path / "run.lock"), locks.locked(tmp_path / "run.lock"):
        pass
    assert capsys.readouterr().err == "" and not list(tmp_path.iterdir())


def test_of_two_equal_runs_that_start_at_once_one_trains(tmp_path, monkeypatch):
    trained, told = [], []

    def short(config, where, folder, parts, watch):
        trained.append(folder.path)
        time.sleep(0.5)
        folder.finish({"metric": 0.5})
        return True  # this process reports the result

    monkeypatch.setattr(launch, "run", short)
    monkeypatch.setattr(train, "footer", lambda *_: "")
    cfg = tiny.cfg(tmp_path, "resume_sweep=true")
    barrier = threading.Barrier(3)

    def start(note: dict) -> None:
        barrier.wait()
        told.append(train.run(cfg, {}, note))

    notes: list[dict] = [{} for _ in range(3)]
    runs = [threading.Thread(target=start, args=(note,)) for note in notes]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert trained == tiny.folders(tmp_path) and told == [0.5] * 3
    assert sorted(note["status"] for note in notes) == ["done", "skipped", "skipped"]


def test_a_run_that_another_process_holds_is_refused(tmp_path):
    folder = RunFolder(tmp_path)
    with (
        reuse.hold(folder),
        pytest.raises(ConfigError, match="which another one is running; wait for its end"),
        reuse.hold(folder),
    ):
        pass
