"""A checkpoint beside training holds the state of one step, that after which it was begun, and keeps all guarantees."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accordion_bench import train
from accordion_bench.comm.collectives import Comm
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs import checkpoint, weights
from accordion_bench.runs.background import Background, HostCopy
from accordion_bench.runs.checkpoint import Owners
from accordion_bench.runs.folder import RunFolder
from accordion_bench.runs.saving import Manifest, Saving, Trained
from tests.kit import tiny
from tests.kit.processes import in_two
from tests.runs.test_checkpoint import full_disk, names, owners
from tests.runs.test_resume import ARMS, differences, resume, start, state, stopping_after


def begin(run: Path, step: int, writer: Background, of: Owners | None = None) -> Path:
    trained = Trained(step // 6, step, step % 6, 6)
    return checkpoint.save(Saving(run, Manifest(trained, {"seed": 0}, {}), 2), writer.comm, of or owners(step), writer)


@contextlib.contextmanager
def held() -> Iterator[threading.Event]:
    """No file of weights is begun before the event."""
    go, original = threading.Event(), weights.write

    def write(path: Path, content: dict) -> weights.Written:
        assert go.wait(60)
        return original(path, content)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weights, "write", write)
        try:
            yield go
        finally:
            go.set()


class Moving:
    """State of all that the next step overwrites in place."""

    def __init__(self) -> None:
        self.x, self.seen = torch.zeros(3, 4).t(), {"steps": [0], "pair": (torch.zeros(2), 1.5)}

    def step(self) -> None:
        self.x += 1
        self.seen["steps"].append(1)
        self.seen["pair"][0].add_(1)

    def state_dict(self) -> dict:
        return {"x": self.x, "seen": self.seen}

    def load_state_dict(self, state: dict) -> None:
        self.x, self.seen = state["x"], state["seen"]


def test_what_is_written_is_the_state_of_one_step(tmp_path):
    """Training overwrites it in place meanwhile; the folder has its name once all is on the disk."""
    moving, writer = Moving(), Background(Comm(2))
    with held() as go:
        path = begin(tmp_path, 6, writer, Owners([moving], []))
        for _ in range(3):
            moving.step()
        writer.look()
        assert not path.exists() and names(tmp_path) == ["step-00000006.part"]
        assert checkpoint.latest(tmp_path) is None  # a process that is killed here leaves none, as with every other
        go.set()
        writer.finish()
    assert names(tmp_path) == ["step-00000006"]
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "shared.pt", "worker-0.pt", "worker-1.pt"]
    fresh = Moving()
    assert checkpoint.load_newest(tmp_path, Comm(2), Owners([fresh], [])) == (path, [])
    assert torch.equal(fresh.x, torch.zeros(4, 3)) and fresh.seen["steps"] == [0]
    assert torch.equal(fresh.seen["pair"][0], torch.zeros(2)) and fresh.seen["pair"][1] == 1.5


def test_the_next_one_waits_for_the_last(tmp_path):
    writer = Background(Comm(2))
    with held() as go:
        begin(tmp_path, 6, writer)
        threading.Timer(0.2, go.set).start()
        begin(tmp_path, 12, writer)
        assert "step-00000006" in names(tmp_path)
        begin(tmp_path, 18, writer)
        writer.finish()
    assert names(tmp_path) == ["step-00000012", "step-00000018"]


def test_memory_is_kept_from_one_copy_to_the_next():
    """Of tensors whose shape stays; layouts are kept, and what is no tensor is copied, too."""
    copied, x = HostCopy(), torch.arange(6.0).view(2, 3).t()
    first = copied({"x": x, "list": [x[0], "text"]})
    assert torch.equal(first["x"], x) and first["x"].stride() == x.stride() and first["list"][1] == "text"
    where = first["x"].data_ptr()
    x += 1
    assert not torch.equal(first["x"], x)
    second = copied({"x": x, "list": [x[0]]})
    assert second["x"].data_ptr() == where and torch.equal(second["x"], x)
    assert copied({"x": x.double()})["x"].dtype == torch.float64


def test_a_full_disk_is_told_at_the_next_meeting(tmp_path):
    """The checkpoint before it is whole; what was half written is gone."""
    writer = Background(Comm(2))
    begin(tmp_path, 6, writer)
    writer.finish()
    with full_disk(after=1):
        begin(tmp_path, 12, writer)
        deadline = time.monotonic() + 30
        with pytest.raises(ConfigError, match="No space left on device"):
            while time.monotonic() < deadline:
                writer.look()
                time.sleep(0.01)
    assert names(tmp_path) == ["step-00000006"]
    begin(tmp_path, 18, writer)
    writer.finish()
    assert names(tmp_path) == ["step-00000006", "step-00000018"]


def test_another_error_of_writing_is_raised_as_it_is(tmp_path, monkeypatch):
    def write(path: Path, content: dict) -> weights.Written:
        raise KeyError("of the program")

    monkeypatch.setattr(weights, "write", write)
    writer = Background(Comm(2))
    begin(tmp_path, 6, writer)
    with pytest.raises(KeyError, match="of the program"):
        writer.finish()
    assert names(tmp_path) == []


def test_an_error_of_training_lets_it_end(tmp_path):
    writer = Background(Comm(2))
    with held() as go:
        begin(tmp_path, 6, writer)
        threading.Timer(0.2, go.set).start()
        writer.close()
    assert names(tmp_path) == ["step-00000006"]


def _in_each_process(rank: int, folder: str) -> None:
    """A checkpoint becomes whole without the main threads; one that fails in one process fails in both."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    comm, run = Comm(1, 2, rank), Path(folder, "run")
    writer = Background(comm)
    path = begin(run, 6, writer)
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "shared.pt", "worker-0.pt", "worker-1.pt"]
    writer.finish()
    with full_disk(after=0) if rank == 1 else contextlib.nullcontext():
        begin(run, 12, writer)
        with pytest.raises(ConfigError, match="No space"):
            writer.finish()
    comm.barrier()
    assert names(run) == ["step-00000006"]
    fresh = owners()
    assert checkpoint.load_newest(run, comm, fresh)[1] == [] and fresh.of_all[0].number == 6
    comm.barrier()
    dist.destroy_process_group()


def test_two_processes(tmp_path):
    in_two(_in_each_process, str(tmp_path))


@pytest.mark.parametrize("arm", ["topk", "powersgd accordion", "1-bit Adam"])
def test_a_resumed_run_equals_the_straight_one(arm, tmp_path):
    """Bit for bit, from a checkpoint that was written while training went on."""
    train.run(start(tmp_path / "straight", *ARMS[arm]))
    cfg = start(tmp_path / "stopped", *ARMS[arm])
    with stopping_after(16), pytest.raises(KeyboardInterrupt):
        train.run({**cfg, "checkpoint": tiny.saving(7, background=True)})
    folder = tiny.only(tmp_path / "stopped")
    assert names(folder) == ["step-00000007", "step-00000014"]
    resume(folder, cfg)
    assert RunFolder(folder).done
    assert differences(state(folder), state(tiny.only(tmp_path / "straight"))) == []
