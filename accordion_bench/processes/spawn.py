"""Spawn one process per rank on this machine, wait for their end, and report the first error."""

import contextlib
import datetime
import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

from accordion_bench import output
from accordion_bench.comm.sealed_store import SealedStore
from accordion_bench.processes import process_group
from accordion_bench.processes.interrupt import (
    ANSWERED_LATER,
    AT_ONCE,
    WARNINGS,
    Interrupted,
    end_with_parent,
    handling,
)
from accordion_bench.processes.listening import LOOPBACK
from accordion_bench.processes.placement import Placement
from accordion_bench.processes.watchdog import (
    DIED,
    GRACE,
    LOOK,
    ChildRefused,
    Failure,
    RankFailed,
    Watch,
    error_for,
    failure_of,
)

Task = Callable[[Placement, Watch], None]  # must be picklable


@dataclass(frozen=True)
class Ended:
    """Result of spawned processes.

    Args:
        failures: failures reported by the processes, and those of processes that ended without a report.
        signals: signals received by this process in the meantime.
    """

    failures: list[Failure]
    signals: list[int]

    def error(self) -> BaseException | None:
        """Return the error to raise for all of them; None without failures and signals."""
        for failure in self.failures:
            if failure["kind"] == "Interrupted":
                return Interrupted(failure["step"], failure["signum"])
        if self.signals:
            return Interrupted(None, self.signals[0])
        if not self.failures:
            return None
        # killed processes first: they could not report it before the others reported the lost connection
        first = min(
            self.failures, key=lambda failure: (failure["kind"] != DIED, failure["second_hand"], failure["time"])
        )
        return error_for(first, rank=0)


def spawn(task: Task, where: Placement, timeout: float, interface: str | None) -> Ended:
    """Start one process per rank in one process group, and wait for their end. If one fails, the others are ended.

    Args:
        task: function that each process runs with its placement and its `Watch`.
        where: the placement.
        timeout: comm.timeout, seconds.
        interface: network interface of gloo and NCCL; None = as in `process_group.settings`.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="accordion_bench-") as meeting:
        ends = []
        children = []
        # children inherit this, so that one without its own handler yet leaves Ctrl-C to the parent
        with handling(signal.SIG_IGN, ANSWERED_LATER):
            for rank in range(where.processes):
                receive, send = context.Pipe(duplex=False)
                own = replace(where, rank=rank, local_rank=rank)
                arguments = (task, own, Meeting(timeout, interface, f"{meeting}/store"), send)
                process = context.Process(target=child, args=arguments, name=f"rank {rank}", daemon=True)
                process.start()
                send.close()
                children.append(process)
                ends.append(receive)
        received: list[int] = []
        with handling(forwarding(children, received)):
            failures = _wait(children, ends, received)
    return Ended(failures, received)


def _wait(children: list, ends: list[connection.Connection], received: list[int]) -> list[Failure]:
    """Wait for all children. After the first failure, give the others time to report, then kill them."""
    failures: list[Failure] = []
    last_signal = time.monotonic()
    deadline = float("inf")
    ended = False  # whether this process killed the children
    open_ends = list(ends)
    alive = True
    while alive or open_ends:
        alive = any(child.is_alive() for child in children)  # one more round after the last end
        ready = connection.wait(open_ends, timeout=0.2) if open_ends else []
        for end in [end for end in open_ends if end in ready]:
            try:
                failures.append(end.recv())
            except EOFError:
                open_ends.remove(end)
        for rank, child in enumerate(children):
            silent = ends[rank] not in open_ends and not any(failure["rank"] == rank for failure in failures)
            if child.exitcode and silent and not ended:
                text = f"it ended with exit status {child.exitcode} and without a word"
                text += " (killed; out of memory?)" if child.exitcode in (-signal.SIGKILL, -signal.SIGABRT) else ""
                died = {"rank": rank, "kind": DIED, "message": text, "traceback": text}
                failures.append(died | {"time": time.monotonic(), "second_hand": False})
        if failures and deadline == float("inf"):
            grace = 60.0 if failures[0]["kind"] == "Interrupted" else 2.0
            deadline = time.monotonic() + grace
        if time.monotonic() > deadline:
            ended = True
            for child in children:
                child.kill()
        if received and time.monotonic() > last_signal + 1:  # a child may have missed it while starting
            last_signal = time.monotonic()
            _signal(children, received[0])
        if not open_ends:
            for child in children:
                child.join(timeout=0.2)
    return failures


def forwarding(children: list, received: list[int]) -> Callable[[int, Any], None]:
    """Return a handler that forwards signals to children, which save and exit; a second one, if no warning, kills."""
    first = 0.0

    def forward(signum: int, frame: Any) -> None:
        nonlocal first
        if set(received) <= set(WARNINGS):
            first = time.monotonic()
        elif signum not in WARNINGS and time.monotonic() > first + AT_ONCE:
            signum = signal.SIGKILL
        received.append(signum)
        _signal(children, signum)

    return forward


def _signal(children: list, signum: int) -> None:
    for child in children:
        if child.is_alive() and child.pid:
            os.kill(child.pid, signum)


@dataclass(frozen=True)
class Meeting:
    """Rendezvous of spawned processes.

    Args:
        timeout: comm.timeout, seconds.
        interface: network interface of gloo and NCCL; None = as in `process_group.settings`.
        file: path of a shared file store; "" = the parent hosts a TCP store, and the task initialises process groups.
        port: port of the parent's store.
        secret: secret that seals the parent's store.
        host: address of the parent's store.
    """

    timeout: float
    interface: str | None
    file: str = ""
    port: int = 0
    secret: str = ""
    host: str = LOOPBACK

    def store(self, processes: int) -> SealedStore:
        """Connect to the store of this many processes."""
        import torch.distributed as dist

        if self.file:
            return SealedStore(dist.FileStore(self.file, processes), processes)  # in a private folder
        wait = datetime.timedelta(seconds=self.timeout)
        base = dist.TCPStore(self.host, self.port, None, False, wait, wait_for_workers=False)
        return SealedStore(base, processes, self.secret)


def child(task: Task, where: Placement, meeting: Meeting, report: Any) -> None:
    """Entry point of a spawned process: join the process group, run the task, and report a failure to the parent."""
    output.protect()
    end_with_parent()
    try:
        store = meeting.store(where.processes)
        watch = Watch(store, where.rank, where.processes, where.rank, meeting.timeout)  # the parent monitors instead
        with process_group.use_settings(meeting.interface):
            if meeting.file:
                process_group.join(where, store, meeting.timeout)
            if where.backend == "nccl":
                ended = where.rank, meeting.timeout, report
                threading.Thread(target=_end_after_nccl, args=ended, daemon=True).start()
            task(where, watch)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the parent may have ended
            _tell(error, where.rank, meeting.timeout, report)
            report.close()
        # as at a regular exit: end data loader processes, release semaphores
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        os._exit(1)  # a process group with a failed member cannot be destroyed regularly
    process_group.leave()


def _tell(error: BaseException, rank: int, timeout: float, report: Any) -> None:
    failure = failure_of(error, rank, timeout)
    failure |= {"time": time.monotonic(), "second_hand": isinstance(error, ChildRefused | RankFailed)}
    failure |= {"step": getattr(error, "step", 0)}
    report.send(failure | {"signum": getattr(error, "signum", 0)})


def _end_after_nccl(rank: int, timeout: float, report: Any) -> None:
    """End this process after an NCCL error, if the main thread waits for its GPU and can receive no exception."""
    while True:
        time.sleep(LOOK)
        if process_group.trouble():
            time.sleep(GRACE)
            if trouble := process_group.trouble():  # the group still exists
                _tell(RuntimeError(trouble), rank, timeout, report)
                os._exit(1)
