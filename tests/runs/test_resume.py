"""A run that was stopped at any step and resumed equals the run that was not, bit for bit."""

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accordion_bench import train
from accordion_bench.comm import on_device
from accordion_bench.processes import placement
from accordion_bench.processes.interrupt import Interrupted
from accordion_bench.report.compare import times
from accordion_bench.report.read import read_run
from accordion_bench.report.serve import is_running
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import checkpoint, saving
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training import launch
from accordion_bench.training.trainer import Trainer
from tests.kit import composed, tiny
from tests.kit.processes import forked

STEPS = 4 * tiny.STEPS
ARMS = {
    "powersgd accordion": [
        "compressor=powersgd",
        "compressor.min_compression_rate=0",
        "adaptive=accordion",
        "adaptive.accordion.eta=0.2",
        "adaptive.accordion.interval=1",
        "adaptive.accordion.min_hold=0",
        "schedule.milestones=[3]",
    ],
    "topk": ["compressor=topk", "compressor.density=0.05", "optimizer.nesterov=true", "schedule=cosine"],
    "topk of the model": ["compressor=topk", "compressor.scope=model", "bn=recompute", "optimizer=adamw"],
    "dist-EF": ["compressor=distefblocksgd", "schedule.warmup_epochs=2", "schedule.milestones=[3]"],
    "alq in its window": [
        "compressor=qsgd",
        "compressor.bits=3",
        "adaptive=alq",
        "adaptive.alq.update_at=[0,7,14]",
        "adaptive.alq.stat_samples=4",
    ],
    "muon": ["optimizer=muon", "compressor=powersgd"],
    "ef21 accordion": [
        "compressor=powersgd",
        "compressor.min_compression_rate=0",
        "compressor.error_feedback=ef21",
        "optimizer.momentum=0",
        "adaptive=accordion",
        "adaptive.accordion.eta=0.2",
        "adaptive.accordion.interval=1",
        "adaptive.accordion.min_hold=0",
    ],
    "loco": ["compressor=qsgd", "compressor.error_feedback=loco", "compressor.residual_reset=5"],
    "eight bits": ["compressor=topk", "compressor.residual_bits=8", "compressor.start_step=3"],
    "acpsgd": ["compressor=acpsgd", "compressor.min_compression_rate=0"],
    "dion": ["compressor=dion", "compressor.rank=3", "optimizer=adamw", "optimizer.lr=0.002"],
    "dgc": ["compressor=dgc", "compressor.density=0.01", "compressor.warmup_epochs=2"],
    "demo": ["compressor=demo", "optimizer.momentum=0", "optimizer.lr=0.002"],
    "1-bit Adam": ["compressor=onebitadam", "optimizer=adamw", "optimizer.lr=0.002", "compressor.freeze_step=6"],
    "powersgd aggregate": ["compressor=powersgd", "compressor.residual=aggregate", "compressor.start_step=3"],
}


@pytest.fixture(autouse=True)
def same_surroundings(monkeypatch):
    torch.manual_seed(0)  # the global generator's state is saved, too, although no run draws from it
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of spawned processes


def start(runs: Path, *overrides: str) -> dict:
    """A configuration whose last step leaves a checkpoint."""
    return composed.run(runs, f"checkpoint.every={STEPS}", *overrides)


@contextlib.contextmanager
def stopping_after(steps: int):
    """Ctrl-C, but so fast that nothing is saved: only `checkpoint.every` has left something."""
    original = Trainer.train_step

    def train_step(self: Trainer) -> None:
        if self.position.step == steps:
            raise KeyboardInterrupt
        original(self)

    Trainer.train_step = train_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer.train_step = original  # type: ignore[method-assign]


def stop(cfg: dict, steps: int, every: int) -> Path:
    """The folder of a run that was stopped after so many steps, with checkpoints."""
    with stopping_after(steps), pytest.raises(KeyboardInterrupt):
        train.run({**cfg, "checkpoint": tiny.saving(every)})
    return tiny.only(Path(cfg["paths"]["runs"]))


def finished_and_stopped(new_folder: Callable[[str], Path], *overrides: str) -> dict[str, tuple[dict, Path]]:
    """Configuration and folder of a run that ended, and of one that was stopped after eight steps."""
    found = {}
    for name in ("finished", "stopped"):
        cfg = composed.run(new_folder(name), *overrides)
        if name == "stopped":
            folder = stop(cfg, 8, every=6)
        else:
            train.run({**cfg, "checkpoint": tiny.saving(None)})
            folder = tiny.only(Path(cfg["paths"]["runs"]))
        found[name] = cfg, folder
    return found


def resume(folder: Path, cfg: dict, **moved) -> None:
    train.run({**cfg, "resume": str(folder), **moved}, dict.fromkeys(["checkpoint.every", *moved]))


def without_times(value):
    """A nested value without what a clock has measured."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if "seconds" not in str(k)}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def state(folder: Path) -> dict:
    """Everything in the newest checkpoint, and every metrics row; without times."""
    path = checkpoint.latest(folder)
    assert path is not None
    files = {file.name: torch.load(file, weights_only=True) for file in path.glob("*.pt")}
    del files["shared.pt"]["clock"]
    files, rows = without_times(files), without_times(RunFolder(folder).read_metrics())
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    return {"files": files, "rows": rows}


def differences(a, b, where: str = "") -> list[str]:
    """Where two nested states differ in any bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = [] if a.keys() == b.keys() else [f"{where}: {sorted(a.keys() ^ b.keys())}"]
        return found + [d for key in a.keys() & b.keys() for d in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}/{i}")]
    same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    return [] if same else [where]


@pytest.mark.sample(5)
@pytest.mark.parametrize("arm", ARMS)
def test_in_one_process(arm, straight, tmp_path):
    """Stopped in the first epoch, at its end, in mid-run and before the last step: a bit that one of the four
    continuations changes is another one at the end, too."""
    cfg = start(tmp_path, *ARMS[arm])
    folder = stop(cfg, 1, every=1)
    for stop_at in (6, 13, 23):
        with stopping_after(stop_at), pytest.raises(KeyboardInterrupt):
            resume(folder, {**cfg, "checkpoint": tiny.saving(stop_at)})
        assert checkpoint.latest(folder) == folder / "checkpoint" / f"step-{stop_at:08d}"
    resume(folder, cfg)
    assert differences(state(folder), straight(arm)) == []


def test_a_run_that_goes_on_is_stopped_no_more(tmp_path, monkeypatch):
    """The page that follows runs shows it as running."""
    cfg, seen, begin = start(tmp_path, "epochs=2"), [], Trainer.begin_epoch
    folder = stop(cfg, tiny.STEPS + 1, every=1)
    assert RunFolder(folder).read_json("summary.json")["stopped_by"] == "KeyboardInterrupt"
    monkeypatch.setattr(Trainer, "begin_epoch", lambda self: (seen.append(is_running(read_run(folder))), begin(self)))
    resume(folder, cfg)
    assert seen == [True]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Arm -> state of the run that was never stopped."""
    kept: dict[str, dict] = {}

    def of(arm: str) -> dict:
        if arm not in kept:
            runs = tmp_path_factory.mktemp("straight")
            train.run(start(runs, *ARMS[arm]))
            kept[arm] = state(tiny.only(runs))
        return kept[arm]

    return of


def test_the_comparison_compares_something(straight):
    """Else the tests above would pass on empty states."""
    got = straight("powersgd accordion")
    shared, worker = got["files"]["shared.pt"], got["files"]["worker-3.pt"]
    names = [name for name, _ in tiny.Net(3, 10).named_parameters()]
    assert list(shared["parameters"]) == list(shared["optimizer"]) == names
    assert shared["optimizer"]["stem.weight"]["momentum_buffer"].abs().sum() > 0
    assert set(shared["exchange_states"]["gradient"]) == {"stem.weight", "a.weight", "b.weight", "head.weight"}
    assert all(entry["q"].abs().sum() > 0 for entry in shared["exchange_states"]["gradient"].values())
    assert worker["exchange_states"]["gradient"]["a.weight"]["residual_W"].abs().sum() > 0
    assert worker["buffers"]["norm.running_mean"].abs().sum() > 0
    others = got["files"]["worker-0.pt"]["buffers"]
    assert not torch.equal(worker["buffers"]["norm.running_mean"], others["norm.running_mean"])
    assert shared["policies"]["accordion"]["saved"] and shared["policies"]["accordion"]["last_drop"] == 3
    assert "norm_of_sum_local" in got["files"]["worker-0.pt"]["signals"]
    assert len({tuple(row["plan"]["levels"].values()) for row in got["rows"]}) > 1
    assert shared["ledger"]["payload"] > 0 and shared["step"] == STEPS
    assert set(got["files"]) == {"shared.pt", "worker-0.pt", "worker-1.pt", "worker-2.pt", "worker-3.pt"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("statistic", ["mean", "update"])
def test_mid_epoch_sums_of_every_statistic(statistic, tmp_path):
    arm = [*ARMS["powersgd accordion"], f"adaptive.accordion.statistic={statistic}"]
    train.run(start(tmp_path / "straight", *arm))
    cfg = start(tmp_path / "stopped", *arm)
    folder = stop(cfg, 10, every=4)
    resume(folder, cfg)
    assert differences(state(folder), state(tiny.only(tmp_path / "straight"))) == []


def test_looks_within_an_epoch(tmp_path):
    """Stopped between two looks and between a look and the checkpoint before it: each is made and kept once."""
    arm = [*ARMS["topk"], "target=1.0", "target_every=0.3"]
    train.run(start(tmp_path / "straight", *arm))
    cfg = start(tmp_path / "stopped", *arm)
    folder = stop(cfg, 11, every=3)
    resume(folder, cfg)
    expected = state(tiny.only(tmp_path / "straight"))
    assert differences(state(folder), expected) == []
    assert [[look["step"] for look in row["looks"]] for row in expected["rows"][:2]] == [[2, 4, 5], [8, 10, 11]]


def test_stopped_twice_between_checkpoints(straight, tmp_path):
    """Steps after the last checkpoint are taken again; the rows of their epochs are written once."""
    cfg = start(tmp_path, *ARMS["topk"])
    folder = stop(cfg, 13, every=5)
    with stopping_after(20), pytest.raises(KeyboardInterrupt):
        resume(folder, {**cfg, "checkpoint": tiny.saving(8)})
    left = sorted(path.name for path in (folder / "checkpoint").iterdir())
    assert left == ["step-00000010", "step-00000016"]
    resume(folder, cfg)
    assert differences(state(folder), straight("topk")) == []


def test_ctrl_c_saves_at_that_step(straight, tmp_path, monkeypatch):
    cfg = start(tmp_path, *ARMS["topk"])
    monkeypatch.setenv("TINY_TROUBLE", f"stop:0:{4 * 9 + 2}")
    with pytest.raises(Interrupted, match="stopped after step 10; continue with: python -m accordion_bench resume="):
        train.run(cfg)
    monkeypatch.delenv("TINY_TROUBLE")
    folder = tiny.only(tmp_path)
    assert checkpoint.latest(folder) == folder / "checkpoint" / "step-00000010"
    resume(folder, cfg)
    assert differences(state(folder), straight("topk")) == []


def test_without_a_checkpoint_it_starts_anew(straight, tmp_path):
    cfg = start(tmp_path, *ARMS["topk"])
    folder = stop(cfg, 8, every=0)
    assert checkpoint.latest(folder) is None
    assert len(RunFolder(folder).read_metrics()) == 1
    resume(folder, cfg)
    assert differences(state(folder), straight("topk")) == []


def test_a_crash_while_saving_leaves_the_last_whole_checkpoint(straight, tmp_path, monkeypatch):
    cfg = start(tmp_path, *ARMS["topk"])
    replace = os.replace

    def crash(source, target):
        if Path(target).name == "step-00000014":
            raise OSError("power cut")
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="power cut"):
        train.run({**cfg, "checkpoint": tiny.saving(7)})
    monkeypatch.undo()
    folder = tiny.only(tmp_path)
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == ["step-00000007", "step-00000014.part"]
    assert checkpoint.latest(folder) == folder / "checkpoint" / "step-00000007"
    resume(folder, cfg)
    assert [path.name for path in (folder / "checkpoint").iterdir()] == [f"step-{STEPS:08d}"]
    assert differences(state(folder), straight("topk")) == []


# ---- two processes


def _in_each_process(rank: int, store_file: str, cfgs: dict[str, dict], folders: dict[str, list[Path]]) -> None:
    """For each arm the straight run, the stopped one and its continuation; then the two that change their placement."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(store_file, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    where = placement.Placement("gloo", 2, 2, rank, rank, "environment")

    def stopped(cfg: dict, folder: Path) -> None:
        with stopping_after(13), contextlib.suppress(KeyboardInterrupt):
            launch.train(RunConfig.from_dict({**cfg, "checkpoint": tiny.saving(5)}), where, RunFolder(folder))
        dist.barrier()

    for arm, cfg in cfgs.items():
        straight, resumed = folders[arm]
        launch.train(RunConfig.from_dict(cfg), where, RunFolder(straight))
        stopped(cfg, resumed)
        launch.train(RunConfig.from_dict({**cfg, "resume": str(resumed)}), where, RunFolder(resumed))
    cfg = cfgs["powersgd accordion"]
    there = folders["one to two"]
    launch.train(RunConfig.from_dict({**cfg, "resume": str(there)}), where, RunFolder(there))
    stopped(cfg, folders["two to one"])
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Arm -> (straight folder, resumed folder), all in 2 x 2; and the folders of two runs that were moved."""
    root = tmp_path_factory.mktemp("two")
    update = "adaptive.accordion.statistic=update"
    cfgs = {"powersgd accordion": start(root, *ARMS["powersgd accordion"], update), "topk": start(root, *ARMS["topk"])}
    folders: dict = {}
    for arm, cfg in cfgs.items():
        folders[arm] = [RunFolder.create(str(root), name, cfg).path for name in ("straight", "stopped")]
    cfg = cfgs["powersgd accordion"]
    folders["one to two"] = stop({**cfg, "paths": {"data": "data", "runs": str(root / "moved")}}, 13, every=5)
    folders["two to one"] = RunFolder.create(str(root), "two-to-one", cfg).path
    arguments = (str(root / "store"), cfgs, folders)
    with forked():
        context = multiprocessing.get_context("spawn")
        children = [context.Process(target=_in_each_process, args=(rank, *arguments), daemon=True) for rank in (0, 1)]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=120)
    assert [child.exitcode for child in children] == [0, 0]
    return folders


@pytest.mark.parametrize("arm", ["powersgd accordion", "topk"])
def test_in_two_processes(arm, two_processes):
    straight, resumed = two_processes[arm]
    assert differences(state(resumed), state(straight)) == []


def far(a, b, where: str = "") -> list[str]:
    """Where two states differ by more than the order of summation; integers and decisions must be equal."""
    if isinstance(a, dict) and a.keys() == b.keys():
        return [d for key in a for d in far(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in far(x, y, f"{where}/{i}")]
    if isinstance(a, torch.Tensor):
        same = float((a - b).double().norm()) <= 0.01 * float(b.double().norm())
    else:
        same = a == pytest.approx(b, rel=1e-3) if isinstance(a, float) else a == b
    return [] if same else [where]


@pytest.mark.parametrize("story", ["one to two", "two to one"])
def test_in_another_placement(story, two_processes):
    """Stopped in mid-epoch in 1 x 4 and resumed in 2 x 2, and the other way round."""
    folder = two_processes[story]
    if story == "two to one":
        resume(folder, RunFolder(folder).read_config())
    moved, straight = state(folder), state(two_processes["powersgd accordion"][0])
    for name in ("rng", "signals", "loss_sum", "unread_loss", "recent"):  # a process's sums lie with its first worker
        for file in (*moved["files"].values(), *straight["files"].values()):
            file.pop(name, None)
    assert far(moved, straight) == []


def test_the_folder_tells_of_every_machine(tmp_path, monkeypatch):
    cfg = start(tmp_path, "compressor=topk")
    folder = RunFolder(stop(cfg, 8, every=6))
    first = folder.read_json("environment.json")

    def run(*_: object) -> None:
        raise ValueError("it trains no more")

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(on_device, "processor_name", lambda: "another")
    for _ in range(2):
        with pytest.raises(ValueError, match="no more"):
            train.run({**cfg, "resume": str(folder.path)}, {"resume"})
    now = folder.read_json("environment.json")
    assert [changes["processor"] for changes in now["resumed"]] == ["another"] * 2
    assert {key: now[key] for key in first} == first
    assert times.machine(read_run(folder.path)).count("cores, then another, ") == 1


def test_a_sweep_goes_on_with_the_threads_of_the_run(tmp_path, monkeypatch):
    cfg = start(tmp_path, "compressor=topk")
    folder = RunFolder(stop(cfg, 8, every=6))
    newest = checkpoint.latest(folder.path)
    begun = saving.read_manifest(newest)
    (newest / saving.FILE).write_text(replace(begun, computed={"threads": 3}).text())

    def run(config: RunConfig, where: placement.Placement, *_: object) -> None:
        raise ValueError(where.threads)

    monkeypatch.setattr(launch, "run", run)
    for typed, threads in (({}, 3), ({"threads": 2}, 2)):
        with pytest.raises(ValueError, match=f"^{threads}$"):
            train.run({**cfg, **typed, "resume_sweep": True}, typed)
