"""Checkpoints survive what happens to files, disks and processes; what cannot be mended is one sentence."""

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accordion_bench import train
from accordion_bench.comm import sealed_store
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.sealed_store import SealedStore
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes.interrupt import Stopper
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import checkpoint, saving, weights
from accordion_bench.runs.checkpoint import GlobalGenerator, Owners
from accordion_bench.runs.folder import RunFolder
from accordion_bench.runs.saving import BlockingWriter, Manifest, Saving, Trained, remove_older
from accordion_bench.training.trainer import Trainer
from tests.kit import composed, tiny
from tests.kit.processes import in_two
from tests.runs.test_resume import ARMS, STEPS, differences, resume, start, state, stop


class Common:
    """State of all workers: one number."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def state_dict(self) -> dict:
        return {"number": self.number, "tensor": torch.full((50,), float(self.number))}

    def load_state_dict(self, state: dict) -> None:
        self.number = state["number"]


class Own:
    """State of each worker: its name and the number."""

    def __init__(self, common: Common) -> None:
        self.common, self.loaded = common, {}

    def worker_state(self, row: int) -> dict:
        return {"row": f"{row} of {self.common.number}"}

    def load_worker_state(self, row: int, state: dict) -> None:
        self.loaded[row] = state["row"]


def owners(number: int = 0) -> Owners:
    common = Common(number)
    return Owners([common], [Own(common)])


def save(run: Path, step: int, comm: Comm | None = None, keep: int = 2) -> Path:
    trained = Trained(step // 6, step, step % 6, 6)
    comm = comm or Comm(2)
    return checkpoint.save(
        Saving(run, Manifest(trained, {"seed": 0}, {}), keep), comm, owners(step), BlockingWriter(comm)
    )


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoint").iterdir())


# ---- files


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "truncated": (truncate, "worker-1.pt has [0-9,]+ of [0-9,]+ bytes"),
    "empty": (lambda file: file.write_bytes(b""), "worker-1.pt has 0 of [0-9,]+ bytes"),
    "missing": (Path.unlink, "worker-1.pt is missing"),
    "a flipped bit": (flip, "worker-1.pt is not as it was written"),
    "no manifest's file": (lambda file: truncate(file.parent / saving.FILE), "manifest.json cannot be read"),
    "no manifest": (lambda file: (file.parent / saving.FILE).unlink(), "manifest.json is missing"),
    "a strange manifest": (
        lambda file: (file.parent / saving.FILE).write_text("[1]"),
        "manifest.json cannot be read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_gives_way_to_the_one_before(damage, tmp_path):
    hurt, told = DAMAGES[damage]
    for step in (6, 12):
        save(tmp_path, step)
    hurt(tmp_path / "checkpoint" / "step-00000012" / "worker-1.pt")
    fresh = owners()
    path, problems = checkpoint.load_newest(tmp_path, Comm(2), fresh)
    assert path == tmp_path / "checkpoint" / "step-00000006"
    (problem,) = problems
    assert re.fullmatch(f"step-00000012 is damaged: {told}", problem)
    assert fresh.of_all[0].number == 6 and fresh.of_each[0].loaded == {0: "0 of 6", 1: "1 of 6"}
    save(tmp_path, 8)  # the damaged one is of a future that is no more
    assert names(tmp_path) == ["step-00000006", "step-00000008"]


def test_where_none_can_be_read_nothing_starts_again_by_itself(tmp_path):
    save(tmp_path, 6)
    (tmp_path / "checkpoint" / "step-00000006" / "shared.pt").unlink()
    told = "where step-00000006 is damaged: shared.pt is missing; type rm -r .*/checkpoint to start it again"
    with pytest.raises(ConfigError, match=told):
        checkpoint.load_newest(tmp_path, Comm(2), owners())


def test_strange_names_are_no_checkpoints(tmp_path):
    assert checkpoint.load_newest(tmp_path, Comm(2), owners()) == (None, [])
    save(tmp_path, 6)
    (tmp_path / "checkpoint" / "step-last").mkdir()
    (tmp_path / "checkpoint" / "step-00000099").write_text("a file")
    (tmp_path / "checkpoint" / "step-00000098.part").mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint" / "step-00000006"


def test_so_many_stay(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, keep=3)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]
    remove_older(tmp_path, 1, 5)
    assert names(tmp_path) == ["step-00000005"]


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """Each file of a checkpoint, then the names in its folder, the rename, the names in the folder above."""
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    done, replace = [], os.replace

    def synchronised(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", synchronised)
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(f"-> {Path(b).name}"), replace(a, b)))
    save(tmp_path, 6)
    files = ["worker-0.pt", "worker-1.pt", "shared.pt", "metrics.jsonl", "manifest.json.part", "-> manifest.json"]
    assert done == [*files, "step-00000006.part", "step-00000006.part", "-> step-00000006", "checkpoint", tmp_path.name]


# ---- a full disk


@contextlib.contextmanager
def full_disk(after: int):
    """The disk takes so many more files of checkpoints, and half of the next one."""
    taken = 0
    write = weights.Counted.write

    def written(self, data: bytes) -> int:
        if taken >= after and self.size > 500:
            self.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise self.error
        return write(self, data)

    original = weights.write

    def counted(path: Path, content: dict):
        nonlocal taken
        found = original(path, content)
        taken += 1
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(weights.Counted, "write", written)
        patched.setattr(weights, "write", counted)
        yield


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(tmp_path):
    """Bit for bit: the old checkpoint is whole, and what was half written is gone."""
    train.run(start(tmp_path / "straight", *ARMS["topk"]))
    cfg = start(tmp_path / "stopped", *ARMS["topk"])
    told = "that the run can write to, got: No space left on device .*; fix that, and type resume=.* to continue"
    with full_disk(after=5 + 3), pytest.raises(ConfigError, match=told):
        train.run({**cfg, "checkpoint": tiny.saving(7)})
    folder = tiny.only(tmp_path / "stopped")
    assert names(folder) == ["step-00000007"]
    assert "No space left" in RunFolder(folder).read_json("summary.json")["reason"]
    resume(folder, cfg)
    assert differences(state(folder), state(tiny.only(tmp_path / "straight"))) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts file systems")
def test_a_disk_that_is_really_full(tmp_path, capsys):
    """Half a megabyte: metrics, checkpoints and logs until nothing fits."""
    runs = tmp_path / "small"
    runs.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", runs], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount file systems")
    try:
        cfg = start(runs, "compressor=topk")
        with pytest.raises(ConfigError, match="got: No space left on device"):
            train.run({**cfg, "checkpoint": tiny.saving(2, keep=50)})
        assert "Logging error" not in capsys.readouterr().err
        folder = tiny.only(runs)
        whole = names(folder)
        assert whole and checkpoint.latest(folder) == folder / "checkpoint" / whole[-1]
        shutil.rmtree(folder / "checkpoint" / whole[0])
        train.run({**cfg, "resume": str(folder), "checkpoint": tiny.saving(0)}, {"checkpoint.every": None})
        assert RunFolder(folder).done
    finally:
        subprocess.run(["umount", runs], check=True)


# ---- processes


def _in_each_process(rank: int, folder: str) -> None:
    """Both agree on the same older checkpoint, on a full disk, on when to save; each gets its own generator back."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    comm, run = Comm(1, 2, rank), Path(folder, "run")
    for step in (6, 12):
        save(run, step, comm)
    if rank == 1:
        truncate(run / "checkpoint" / "step-00000012" / "worker-1.pt")
    comm.barrier()
    fresh = owners()
    path, problems = checkpoint.load_newest(run, comm, fresh)
    assert path is not None and path.name == "step-00000006" and fresh.of_all[0].number == 6
    assert len(problems) == 1 and "worker-1.pt has" in problems[0]

    with full_disk(after=0) if rank == 1 else contextlib.nullcontext(), pytest.raises(ConfigError, match="No space"):
        save(run, 18, comm)
    comm.barrier()
    assert names(run) == ["step-00000006", "step-00000012"]
    comm.barrier()  # or the other one has begun the next one

    torch.manual_seed(100 + rank)
    mine = Owners([], [GlobalGenerator(comm.device)])
    checkpoint.save(Saving(run, Manifest(Trained(4, 24, 0, 6), {}, {}), 2), comm, mine, BlockingWriter(comm))
    expected = torch.rand(3)
    torch.rand(7 + rank)
    checkpoint.load(run / "checkpoint" / "step-00000024", comm, mine)
    assert torch.equal(torch.rand(3), expected)
    dist.destroy_process_group()


def test_two_processes_agree(tmp_path):
    in_two(_in_each_process, str(tmp_path))


def _saving_by_the_clock(rank: int, folder: str, cfgs: dict[str, dict]) -> None:
    """Train as often as the clock likes, in two processes with a store."""
    torch.set_num_threads(1)
    sealed_store.LOOK = 0.01
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for name, cfg in cfgs.items():
        comm = Comm(2, 2, rank)
        stopper = Stopper(SealedStore(dist.PrefixStore(name, store), 2))
        saved: list[int] = []

        class Noting(Trainer):
            def save(self) -> Path | None:
                saved.append(self.position.step)  # noqa: B023
                return super().save()

        Noting(RunConfig.from_dict(cfg), comm, RunFolder(Path(folder, name)), stopper).fit()
        Path(folder, name, f"saved-{rank}").write_text(json.dumps(saved))
        comm.barrier()
    dist.destroy_process_group()


def test_the_clock_changes_nothing_but_when_it_is_saved(tmp_path):
    """Local steps, so that processes are apart: both save after the same steps, and end with the same bits."""
    local = ["sync=local_sgd", "sync.period=5", "compressor=topk", "epochs=6"]
    cfg = start(tmp_path, *local)
    cfgs = {"straight": {**cfg, "checkpoint": tiny.saving(6 * tiny.STEPS)}}
    cfgs["clocked"] = {**cfg, "checkpoint": tiny.saving(None, minutes=1e-6)}
    for name in cfgs:
        (tmp_path / name).mkdir()
    in_two(_saving_by_the_clock, str(tmp_path), cfgs)
    first, second = ((tmp_path / "clocked" / f"saved-{rank}").read_text() for rank in (0, 1))
    assert first == second and len(json.loads(first)) > 1
    last = f"checkpoint/step-{6 * tiny.STEPS:08d}"
    a, b = (
        {file.name: torch.load(file, weights_only=True) for file in (tmp_path / name / last).glob("*.pt")}
        for name in cfgs
    )
    for found in (a, b):
        del found["shared.pt"]["clock"]
        for file in found:
            found[file].pop("waiting_seconds", None)
    assert differences(a, b) == []


# ---- a run


def test_a_plain_run_leaves_its_end_and_its_weights(tmp_path):
    """One documented line loads them, and they are those that were evaluated."""
    cfg = composed.run(tmp_path, "compressor=topk", "sync=local_sgd", "sync.period=4")
    train.run({**cfg, "checkpoint": tiny.saving(None, best=True)})
    folder = tiny.only(tmp_path)
    assert names(folder) == [f"step-{STEPS:08d}"]
    summary = RunFolder(folder).read_json("summary.json")
    for file, metric in (("weights.pt", summary["metric"]), ("best.pt", summary["best_metric"])):
        model = tiny.Net(3, 10)
        model.load_state_dict(torch.load(folder / file))
        dataset = composed.parts_of({**cfg, "workers": 4}).dataset.load("data", 0, torch.device("cpu"))
        hits = total = 0
        model.eval()
        for x, y in dataset.test_batches([torch.arange(dataset.test_size)]):
            hits += int((model(x).argmax(1) == y).sum())
            total += len(y)
        assert hits / total == pytest.approx(metric)


def test_a_run_without_a_checkpoint_says_that_it_starts_again(tmp_path, capsys):
    cfg = start(tmp_path, *ARMS["topk"])
    folder = stop(cfg, 8, every=0)
    capsys.readouterr()
    resume(folder, cfg)
    assert f"{folder}: it has no checkpoint, and starts again\n" in capsys.readouterr().out
    assert RunFolder(folder).done


def test_a_damaged_one_is_told_and_the_run_is_the_same(tmp_path, capsys):
    train.run(start(tmp_path / "straight", *ARMS["topk"]))
    cfg = start(tmp_path / "stopped", *ARMS["topk"])
    folder = stop(cfg, 16, every=7)
    truncate(folder / "checkpoint" / "step-00000014" / "worker-3.pt")
    capsys.readouterr()
    resume(folder, cfg)
    printed = capsys.readouterr()
    assert printed.err.startswith("warning: step-00000014 is damaged: worker-3.pt has ")
    assert printed.err.endswith("; an older one is used\n") and printed.err.count("\n") == 1
    assert f"{folder}: going on after step 7\n" in printed.out
    assert differences(state(folder), state(tiny.only(tmp_path / "straight"))) == []
