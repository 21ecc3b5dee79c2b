"""Processes of tests: those of launchers, and forked ones where the start is not tested.

A spawned process imports torch, which takes two seconds. A process that is forked from the test's process cannot
compute gradients, because autograd has already run there. Therefore a server that has imported everything forks them.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from accordion_bench.options.conf_dir import conf_dir
from tests.kit import tiny

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    [
        "accordion_bench.train",
        "accordion_bench.training.trainer",
        "accordion_bench.attaching.api",
        "tests.kit.composed",
        "tests.kit.local",
        "tests.kit.by_hand",
        "pytest",
        "torch._dynamo",  # imported by the first optimizer of a process, which takes seconds
        "tests.kit.warm",
    ]
)


def _within(environ: dict[str, str], target: Callable, args: tuple) -> None:
    os.environ.clear()
    os.environ.update(environ)
    target(*args)


class _Forked:
    """Substitute for a multiprocessing context; children get the current environment instead of the server's."""

    Pipe = staticmethod(multiprocessing.Pipe)

    def Process(self, target: Callable, args: tuple = (), **options: Any) -> Any:
        return _server.Process(target=_within, args=(dict(os.environ), target, args), **options)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Replace spawned processes by forked ones within the context."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(multiprocessing, "get_context", lambda kind: _Forked())
        yield


def in_two(target: Callable, *args: Any) -> None:
    """Call `target(rank, *args)` in two processes, which must both succeed."""
    together(2, target, *args)


def together(processes: int, target: Callable, *args: Any, seconds: float = 120) -> None:
    """Call `target(rank, *args)` in several processes, which must all succeed."""
    with forked():
        context = multiprocessing.get_context("spawn")
        children = [context.Process(target=target, args=(rank, *args)) for rank in range(processes)]
        for child in children:
            child.start()
        for child in children:
            child.join(seconds)
            if child.is_alive():
                child.kill()
    assert [child.exitcode for child in children] == [0] * processes


def killed(seconds: float, target: Callable, *args: Any) -> bool:
    """Call `target(*args)` in a process, kill it after `seconds`, and return whether it was still running."""
    with forked():
        child = multiprocessing.get_context("spawn").Process(target=_hushed, args=(target, *args))
        child.start()
    child.join(seconds)
    child.kill()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def start_forking() -> None:
    """Start the forking server unless it is running, for tests that measure the time of a process."""
    assert not killed(60, os.getpid)


def _hushed(target: Callable, *args: Any) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        target(*args)


# ---- processes of launchers, each in its own process group


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def started(arguments: Sequence[str], environ: dict[str, str]) -> subprocess.Popen:
    """Start a process with pipes, in the checkout."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(arguments, cwd=conf_dir().parent, env=environ, start_new_session=True, **pipes)  # type: ignore


def tasks(
    typed: Sequence[str], of_rank: Sequence[Sequence[str]] = ((), ()), job: str = "1", tries: int = 1
) -> list[subprocess.Popen]:
    """Start the run's command as by srun, with one process for each entry of `of_rank`, which overrides its keys.

    With several tries, each task is a shell that starts the command again until it succeeds or is refused.
    """
    loop = f'for try in $(seq {tries}); do "$@" && exit; [ $? = 2 ] && exit 2; done; exit 1'  # as in docs/machines.md
    again = ["bash", "-c", loop, "task"] if tries > 1 else []
    port = str(free_port())
    jobs = []
    for rank, own in enumerate(of_rank):
        environ = {
            "SLURM_JOB_ID": job,
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(len(of_rank)),
            "SLURM_STEP_TASKS_PER_NODE": str(len(of_rank)),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        merged = {item.partition("=")[0]: item for item in (*typed, *own)}
        jobs.append(started([*again, *tiny.COMMAND, *merged.values()], {**os.environ, **environ}))
    return jobs


def agents(kind: str, typed: Sequence[str], restarts: int = 0) -> list[subprocess.Popen]:
    """Start the run's command under torchrun as on two machines: `static`, or `elastic` with the c10d rendezvous.

    Each agent restarts its worker up to `restarts` times.
    """
    port = free_port()
    options = [["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)] for node in (0, 1)]
    if kind == "elastic":
        options = [["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"]] * 2
    torchrun = [tiny.COMMAND[0], "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--max-restarts", str(restarts)]
    return [started([*torchrun, *own, *tiny.COMMAND[1:], *typed], dict(os.environ)) for own in options]


def outputs(jobs: Sequence[subprocess.Popen], seconds: float = 120) -> list[subprocess.CompletedProcess]:
    """Wait for all jobs, and kill them in any case; raise if a process of their groups outlives them."""
    ended = []
    try:
        for job in jobs:
            out, err = job.communicate(timeout=seconds)
            ended.append(subprocess.CompletedProcess(job.args, job.returncode, out, err))
        time.sleep(0.2)
        left = [member for job in jobs for member in group_members(job.pid)]
        assert left == [], f"left behind: {left}"
    finally:
        for job in jobs:
            if group_members(job.pid):
                os.killpg(job.pid, signal.SIGKILL)
    return ended


def group_members(group: int) -> list[int]:
    """Return the running processes of a process group."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            members.append(int(stat.parent.name))
    return members
