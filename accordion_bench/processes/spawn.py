"""Spawned processes: one per rank on this machine; they end together, and the first error is told."""

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

Task = Callable[[Placement, Watch], None]  # can be pickled


@dataclass(frozen=True)
class Ended:
    """How spawned processes have ended.

    Args:
        failures: what they have published of their errors, and what was found here of those that could not.
        signals: that this process has been sent meanwhile.
    """

    failures: list[Failure]
    signals: list[int]

    def error(self) -> BaseException | None:
        """The error to raise for all of them; None where nothing happened."""
        for failure in self.failures:
            if failure["kind"] == "Interrupted":
                return Interrupted(failure["step"], failure["signum"])
        if self.signals:
            return Interrupted(None, self.signals[0])
        if not self.failures:
            return None
        # a process that was killed could not say so: the others' complaints about it came before we noticed
        first = min(
            self.failures, key=lambda failure: (failure["kind"] != DIED, failure["second_hand"], failure["time"])
        )
        return error_for(first, rank=0)


def spawn(task: Task, where: Placement, timeout: float, interface: str | None) -> Ended:
    """Start one process per rank, each a member of one process group, and wait; when one fails the others are ended.

    Args:
        task: what each runs; gets its own place, and the watch over the run.
        where: the placement.
        timeout: comm.timeout, seconds.
        interface: network interface for gloo and NCCL; None: what they choose.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="accordion_bench-") as meeting:
        ends = []
        children = []
        # inherited: a child that does not listen yet leaves Ctrl-C to its parent
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
    """Wait for all children; after the first failure give the others a moment to report, then end them."""
    failures: list[Failure] = []
    last_signal = time.monotonic()
    deadline = float("inf")
    ended = False  # by us
    open_ends = list(ends)
    alive = True
    while alive or open_ends:
        alive = any(child.is_alive() for child in children)  # one last round after the last one has ended
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
        if received and time.monotonic() > last_signal + 1:  # a child that was still starting has not heard it
            last_signal = time.monotonic()
            _signal(children, received[0])
        if not open_ends:
            for child in children:
                child.join(timeout=0.2)
    return failures


def forwarding(children: list, received: list[int]) -> Callable[[int, Any], None]:
    """Passes a signal on to the children, which finish a step and save; a second one ends them, if it is no warning."""
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
    """Where spawned processes meet.

    Args:
        timeout: comm.timeout, seconds.
        interface: network interface for gloo and NCCL; None: what they choose.
        file: of a store that they share; "" = their parent hosts it, and they join a process group by themselves.
        port: of the parent's store.
        secret: by which it is sealed.
        host: its address.
    """

    timeout: float
    interface: str | None
    file: str = ""
    port: int = 0
    secret: str = ""
    host: str = LOOPBACK

    def store(self, processes: int) -> SealedStore:
        """The store, of so many processes."""
        import torch.distributed as dist

        if self.file:
            return SealedStore(dist.FileStore(self.file, processes), processes)  # read by them alone
        wait = datetime.timedelta(seconds=self.timeout)
        base = dist.TCPStore(self.host, self.port, None, False, wait, wait_for_workers=False)
        return SealedStore(base, processes, self.secret)


def child(task: Task, where: Placement, meeting: Meeting, report: Any) -> None:
    """What a spawned process runs."""
    output.protect()
    end_with_parent()
    try:
        store = meeting.store(where.processes)
        watch = Watch(store, where.rank, where.processes, where.rank, meeting.timeout)  # the parent does the watching
        with process_group.use_settings(meeting.interface):
            if meeting.file:
                process_group.join(where, store, meeting.timeout)
            if where.backend == "nccl":
                ended = where.rank, meeting.timeout, report
                threading.Thread(target=_end_after_nccl, args=ended, daemon=True).start()
            task(where, watch)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the parent is gone, too
            _tell(error, where.rank, meeting.timeout, report)
            report.close()
        # as at a polite exit: end the readers of data, return their semaphores
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        os._exit(1)  # a process group with a failed member cannot be left politely
    process_group.leave()


def _tell(error: BaseException, rank: int, timeout: float, report: Any) -> None:
    """Tell the parent how this process ends."""
    failure = failure_of(error, rank, timeout)
    failure |= {"time": time.monotonic(), "second_hand": isinstance(error, ChildRefused | RankFailed)}
    failure |= {"step": getattr(error, "step", 0)}
    report.send(failure | {"signum": getattr(error, "signum", 0)})


def _end_after_nccl(rank: int, timeout: float, report: Any) -> None:
    """End this process where NCCL has given up and the main thread waits for its GPU, where no exception comes."""
    while True:
        time.sleep(LOOK)
        if process_group.trouble():
            time.sleep(GRACE)
            if trouble := process_group.trouble():  # it has not left the group
                _tell(RuntimeError(trouble), rank, timeout, report)
                os._exit(1)
