"""Ctrl-C, SIGTERM and numbers that are not finite: a readable folder, what to type next, nobody left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from accordion_bench import __main__ as command
from accordion_bench import train
from accordion_bench.comm import sealed_store
from accordion_bench.comm.sealed_store import SealedStore
from accordion_bench.options import advice
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.processes import interrupt, spawn
from accordion_bench.processes.interrupt import Interrupted, Stopper, handling
from accordion_bench.processes.watchdog import ChildRefused
from accordion_bench.runs import checkpoint
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import composed, tiny
from tests.kit.processes import forked, group_members
from tests.kit.stores import LocalStore

FOREVER = 100_000  # epochs
ENDLESS = (f"epochs={FOREVER}", "schedule=constant")  # so that it may be ended at another epoch
NETWORK = "model._target_=tests.kit.tiny.Net"
TWO = ("comm=gloo", "comm.processes=2")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of spawned processes


def shorten(folder: Path, epochs: int) -> None:
    """Let a run that would never have ended end after so many epochs."""
    saved = RunFolder(folder).read_config()
    RunFolder(folder).write_config({**saved, "epochs": epochs})


def check_stopped(folder: Path, step: int | None = None) -> int:
    """The folder of a run that was interrupted is readable, and holds a checkpoint; returns the step."""
    run = RunFolder(folder)
    assert yaml.safe_load((folder / "config.yaml").read_text())["epochs"] == FOREVER
    summary = run.read_json("summary.json")
    assert summary["stopped_by"] == "Interrupted" and "stopped after step" in summary["reason"]
    assert not run.done
    path = checkpoint.latest(folder)
    assert path is not None and (step is None or path.name == f"step-{step:08d}")
    step = int(path.name.removeprefix("step-"))
    assert [row["epoch"] for row in run.read_metrics()] == list(range((step - 1) // tiny.STEPS))
    assert run.read_json("environment.json")["command"]
    return step


def check_resumes(folder: Path, step: int) -> None:
    """It goes on to its end, which is a bit further."""
    epochs = step // tiny.STEPS + 2
    shorten(folder, epochs)
    typed = [f"resume={folder}", NETWORK, "comm=simulated"]
    train.run(composed.run(folder.parent, *typed), command.typed(typed))
    assert RunFolder(folder).done
    assert [row["epoch"] for row in RunFolder(folder).read_metrics()] == list(range(epochs))


def continuing(folder: Path) -> str:
    """What to type to go on: the tests' network is in no file of ours."""
    return f"python -m accordion_bench resume={folder} {NETWORK}"


def status(monkeypatch, *typed: str) -> int | str | None:
    """Exit status of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["accordion_bench", *typed])
    with pytest.raises(SystemExit) as end:
        command.main()
    return end.value.code


def test_ctrl_c_in_one_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TINY_TROUBLE", f"stop:0:{4 * 20}")
    assert status(monkeypatch, *tiny.typed(tmp_path, *ENDLESS)) == 130
    folder = tiny.only(tmp_path)
    printed = capsys.readouterr()
    resume = continuing(folder)
    assert printed.err == f"stopped after step 20; continue with: {resume}\n"
    check_stopped(folder, 20)
    monkeypatch.delenv("TINY_TROUBLE")
    check_resumes(folder, 20)


def test_ctrl_c_ends_a_multirun(tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_TROUBLE", f"stop:0:{4 * 3}")
    assert status(monkeypatch, "-m", *tiny.typed(tmp_path, *ENDLESS, "seed=0,1,2")) == 130
    tiny.only(tmp_path)


def test_ctrl_c_in_two_processes(tmp_path, monkeypatch, capsys):
    """The signal comes to the parent alone; the children agree on a step."""
    monkeypatch.setenv("TINY_TROUBLE", f"stop:1:{2 * 20}")
    monkeypatch.setenv("TINY_STARTER", str(os.getpid()))  # the parent of what is forked is a server
    with forked():
        assert status(monkeypatch, *tiny.typed(tmp_path, *ENDLESS, *TWO)) == 130
    assert multiprocessing.active_children() == []
    folder = tiny.only(tmp_path)
    printed = capsys.readouterr()
    step = check_stopped(folder)
    resume = continuing(folder)
    assert printed.err == f"stopped after step {step}; continue with: {resume}\n"
    monkeypatch.delenv("TINY_TROUBLE")
    check_resumes(folder, step)


# ---- the command itself


def interrupted(runs: Path, signum: int, whole_group: bool, *overrides: str) -> subprocess.CompletedProcess:
    """Start the command, signal it in its third epoch, wait for its end; nobody of its group may be left."""
    arguments = [*tiny.COMMAND, *tiny.typed(runs, *ENDLESS, *overrides)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(arguments, cwd=conf_dir().parent, start_new_session=True, **pipes)
    try:
        until = time.monotonic() + 60
        while not any(len(file.read_text().splitlines()) > 1 for file in runs.glob("*/metrics.jsonl")):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        (os.killpg if whole_group else os.kill)(process.pid, signum)
        out, err = process.communicate(timeout=30)
        time.sleep(0.2)
        assert group_members(process.pid) == []
    finally:
        if process.poll() is None or group_members(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


@pytest.mark.slow
def test_a_terminals_ctrl_c(tmp_path):
    """SIGINT to the whole process group: parent and children."""
    done = interrupted(tmp_path, signal.SIGINT, True, *TWO)
    assert done.returncode == 130, done.stderr
    step = check_stopped(tiny.only(tmp_path))
    resume = continuing(tiny.only(tmp_path))
    assert done.stderr == f"stopped after step {step}; continue with: {resume}\n"


@pytest.mark.parametrize(
    "signum, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138), (signal.SIGXCPU, 152)]
)
def test_a_launchers_signals_in_one_process(signum, code, tmp_path, monkeypatch, capsys):
    """A terminal that closes, Slurm's and the kernel's warnings save as SIGTERM does, however often they come."""
    train_step = Trainer.train_step

    def signalled(self):
        train_step(self)
        if self.position.step == 15:
            os.kill(os.getpid(), signum)
            self.stopper._noted -= 2 * interrupt.AT_ONCE
            if signum != signal.SIGTERM:
                os.kill(os.getpid(), signum)

    monkeypatch.setattr(Trainer, "train_step", signalled)
    assert status(monkeypatch, *tiny.typed(tmp_path, *ENDLESS)) == code
    step = check_stopped(tiny.only(tmp_path), 15)
    resume = continuing(tiny.only(tmp_path))
    assert capsys.readouterr().err == f"stopped after step {step}; continue with: {resume}\n"


@pytest.mark.parametrize("ignored", [True, False])
def test_nohup(ignored):
    """Deaf to a terminal that closes where nohup has it ignored, in the processes that are started, too."""
    code = (
        "import signal, subprocess, sys\n"
        "from accordion_bench.processes import interrupt\n"
        "with interrupt.handling(signal.SIG_IGN, interrupt.ANSWERED_LATER):\n"
        "    if sys.argv[1:]: print(subprocess.check_output([sys.executable, *sys.argv[1:]], text=True).strip())\n"
        "print(signal.SIGHUP in interrupt.STOP, signal.SIGHUP in interrupt.ANYWHERE)"
    )
    words = ["nohup"] * ignored + [sys.executable, "-c", code, "-c", code]
    done = subprocess.run(words, cwd=conf_dir().parent, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.stdout.split() == [str(not ignored), "True"] * 2, done.stderr


def test_the_parent_passes_warnings_on(monkeypatch):
    """Again and again; only a second signal that is none ends the children at once."""
    now, sent = [0.0], []
    monkeypatch.setattr(spawn.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(spawn, "_signal", lambda children, signum: sent.append(signum))
    forward = spawn.forwarding([], [])
    for signum in (signal.SIGXCPU, signal.SIGXCPU, signal.SIGUSR1, signal.SIGTERM, signal.SIGXCPU, signal.SIGTERM):
        forward(signum, None)
        now[0] += 2 * interrupt.AT_ONCE
    first = [signal.SIGXCPU, signal.SIGXCPU, signal.SIGUSR1, signal.SIGTERM, signal.SIGXCPU]
    assert sent == [*first, signal.SIGKILL]


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize(
    "signum, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)]
)
@pytest.mark.parametrize("overrides", [(), TWO], ids=["one", "two"])
def test_every_signal_everywhere(overrides, signum, status, whole_group, tmp_path):
    done = interrupted(tmp_path, signum, whole_group, *overrides)
    assert done.returncode == status, done.stderr
    step = check_stopped(tiny.only(tmp_path))
    assert "Traceback" not in done.stderr
    check_resumes(tiny.only(tmp_path), step)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.3, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0])
def test_ctrl_c_while_starting(delay, tmp_path):
    """Before there is anything to save it ends at once or after the first steps, and leaves nobody behind."""
    arguments = [*tiny.COMMAND, *tiny.typed(tmp_path, *ENDLESS, *TWO)]
    pipes = {"stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(arguments, cwd=conf_dir().parent, start_new_session=True, **pipes)
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    time.sleep(0.2)
    left = group_members(process.pid)
    if left:
        os.killpg(process.pid, signal.SIGKILL)
    assert left == []
    assert process.returncode in (130, -signal.SIGINT), err


@pytest.mark.slow
def test_the_children_of_a_killed_parent_end(tmp_path):
    arguments = [*tiny.COMMAND, *tiny.typed(tmp_path, *ENDLESS, *TWO)]
    process = subprocess.Popen(arguments, cwd=conf_dir().parent, start_new_session=True)
    while not any(file.read_text() for file in tmp_path.glob("*/metrics.jsonl")):
        time.sleep(0.1)
    process.kill()
    process.wait()
    until = time.monotonic() + 10
    while group_members(process.pid) and time.monotonic() < until:
        time.sleep(0.1)
    assert group_members(process.pid) == []


@pytest.mark.slow
def test_ctrl_c_under_torchrun(tmp_path):
    """torchrun passes the signal on; the run saves and names the command that continues it."""
    arguments = [*tiny.TORCHRUN, *tiny.typed(tmp_path, *ENDLESS, "comm=gloo")]
    pipes = {"stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(arguments, cwd=conf_dir().parent, start_new_session=True, **pipes)
    while not any(file.read_text() for file in tmp_path.glob("*/metrics.jsonl")):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    check_stopped(tiny.only(tmp_path))
    assert "continue with: python -m accordion_bench resume=" in err


# ---- the stopper


@pytest.mark.parametrize("hearer", [0, 1])
def test_all_stop_after_the_same_step(hearer, monkeypatch):
    """Whichever process hears the signal, and although each looks into the store only now and then."""
    now = [0.0]
    monkeypatch.setattr(sealed_store.time, "monotonic", lambda: now[0])
    store = SealedStore(LocalStore(), 3)
    stoppers = [Stopper(store) for _ in range(3)]
    ends: list[int | None] = [None] * 3
    for step in range(1, 2000):
        if step == 50:
            stoppers[hearer].note(signal.SIGTERM, None)
        for rank, stopper in enumerate(stoppers):
            now[0] += 0.001 * (1 + (rank + step) % 3)
            if ends[rank] is None and stopper.due(step):
                ends[rank] = step
    assert ends[0] is not None and ends == [ends[0]] * 3
    assert 50 < ends[0] <= 50 + sealed_store.LOOK / 0.006 + 4
    assert [stopper.signum for stopper in stoppers] == [signal.SIGTERM] * 3


@pytest.mark.parametrize("garbage", [b"", b"TERM", b"9", b"-15", b"1e1", b"\xff\xfe", b"15 " * 500_000])
def test_a_signal_that_is_none(garbage, capsys):
    """The store says that all stop, and not why: as after SIGTERM."""
    raw = LocalStore()
    stopper = Stopper(SealedStore(raw, 1))
    raw.values |= {"signal": garbage, "stop-0": b"last 3"}
    assert stopper.due(3) and stopper.signum == signal.SIGTERM
    assert capsys.readouterr().err.startswith("warning: signal in the store of the run ")


def test_a_second_signal_ends_at_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(interrupt.time, "monotonic", lambda: now[0])
    stopper = Stopper()
    with handling(stopper.note):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same one, delivered twice
        assert stopper.due(1)
        now[0] = 2.0
        with pytest.raises(Interrupted, match="stopped at once"):
            os.kill(os.getpid(), signal.SIGINT)


# ---- numbers that are not finite


def check_not_finite(folder: Path, told: str) -> None:
    run = RunFolder(folder)
    summary = run.read_json("summary.json")
    assert summary["stopped_by"] == "NonFinite" and told in summary["reason"]
    assert not run.done
    assert [row["epoch"] for row in run.read_metrics()] == [0]
    assert told in (folder / "run.log").read_text()


def test_nan_in_one_process(tmp_path, monkeypatch, capsys):
    """The step, the worker's loss and the first parameter; nothing else on stderr."""
    monkeypatch.setenv("TINY_TROUBLE", "nan:0:39")
    assert status(monkeypatch, *tiny.typed(tmp_path)) == 2
    told = capsys.readouterr().err
    start = "step 9 (epoch 1): the loss of worker 2 is nan, and the gradient of stem.weight on worker 2 is not finite; "
    assert told.startswith(f"{start}try a smaller optimizer.lr") and told.count("\n") == 1
    check_not_finite(tiny.only(tmp_path), "step 9 (epoch 1): the loss of worker 2 is nan")


def test_an_infinite_gradient(tmp_path, monkeypatch, capsys):
    """The loss is finite; the step and the first parameter are named."""
    monkeypatch.setenv("TINY_TROUBLE", "gradient:0:39")
    assert status(monkeypatch, *tiny.typed(tmp_path, "compressor=powersgd")) == 2
    told = capsys.readouterr().err
    assert told.startswith("step 9 (epoch 1): the gradient of stem.weight on worker 2 is not finite; try a smaller")
    check_not_finite(tiny.only(tmp_path), "step 9 (epoch 1): the gradient of stem.weight on worker 2 is not finite")


def test_nan_in_two_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_TROUBLE", "nan:1:20")
    with forked(), pytest.raises(ChildRefused) as stopped:
        train.run(composed.run(tmp_path, *TWO))
    told = advice.explain(stopped.value)
    assert told is not None and told.startswith("step 9 (epoch 1): the loss of worker 3 is nan, and the gradient of ")
    assert multiprocessing.active_children() == []
    check_not_finite(tiny.only(tmp_path), "step 9 (epoch 1): the loss of worker 3 is nan")


@pytest.mark.slow
def test_nan_under_torchrun(tmp_path):
    """The leader's folder names the cause, although another rank saw it."""
    environ = {**os.environ, "TINY_TROUBLE": "nan:1:20"}
    arguments = [*tiny.TORCHRUN, *tiny.typed(tmp_path, "comm=gloo")]
    done = subprocess.run(arguments, cwd=conf_dir().parent, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    check_not_finite(tiny.only(tmp_path), "step 9 (epoch 1): the loss of worker 3 is nan")


def test_divergence(tmp_path, monkeypatch, capsys):
    """A learning rate beyond all reason, and a network that answers with infinities."""
    assert status(monkeypatch, *tiny.typed(tmp_path, "optimizer.lr=1e30", "schedule.warmup_epochs=0")) == 2
    told = capsys.readouterr().err
    assert told.startswith("step ") and "not finite" in told and "try a smaller optimizer.lr, now 4e+30" in told
    summary = RunFolder(tiny.only(tmp_path)).read_json("summary.json")
    assert summary["stopped_by"] == "NonFinite"
