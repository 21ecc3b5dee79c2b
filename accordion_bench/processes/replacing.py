"""Launcher of elastic runs on one machine: start the worker processes, and replace those that are lost."""

import multiprocessing
import secrets
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from typing import Any

from accordion_bench.comm.generations import Register, Terms
from accordion_bench.comm.sealed_store import SealedStore
from accordion_bench.processes.interrupt import ANSWERED_LATER, handling
from accordion_bench.processes.listening import LOOPBACK, listen
from accordion_bench.processes.placement import Placement
from accordion_bench.processes.spawn import Ended, Meeting, Task, child, forwarding
from accordion_bench.processes.watchdog import DIED, Failure

LOOK = 0.2  # seconds between two checks of the processes
AFTER = 10.0  # seconds for the other processes to end after the first one has finished
SHORT = 10.0  # seconds of membership after which a process counts as having worked
MOST = 5  # number of successive losses without having worked, after which no process is replaced


@dataclass
class _Child:
    """Started process, with a number that is unique in the run."""

    number: int
    process: Any
    end: connection.Connection
    told: list[Failure] = field(default_factory=list)
    entered: float | None = None  # time at which it became a member


class Replaced:
    """Launcher that starts one process per rank and replaces lost ones; it hosts the store of their rendezvous.

    A process is replaced if it dies without reporting an error, is left behind by the others, or is interrupted alone.
    No process is replaced after `MOST` successive ones were lost before they worked, for example for lack of memory. If
    a process fails with an error of its own, or too few are left, all processes end.

    Args:
        task: function that each process runs with its placement and its `Watch`.
        where: the placement.
        timeout: comm.timeout, seconds.
        interface: as for `spawn`.

    Class attributes:
        host: address of the store; the loopback, unless the processes are in several network namespaces.
    """

    host = LOOPBACK

    def __init__(self, task: Task, where: Placement, timeout: float, interface: str | None) -> None:
        import torch.distributed as dist

        secret = secrets.token_hex(16)
        listener = listen(self.host, 0, sealed=True)
        port = listener.getsockname()[1]
        base = dist.TCPStore(self.host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
        self.task, self.where = task, where
        self.meeting = Meeting(timeout, interface, port=port, secret=secret, host=self.host)
        store = SealedStore(base, where.processes, secret)
        self.register = Register(store, Terms(where.processes, 1, timeout, {}))
        self.children: list[_Child] = []
        self.processes: list[Any] = []  # receivers of forwarded signals
        self.generation = self.in_a_row = 0
        self.members: set[int] = set()

    def run(self) -> Ended:
        """Start the processes, and wait for the end of all."""
        received: list[int] = []
        with handling(signal.SIG_IGN, ANSWERED_LATER):
            for rank in range(self.where.processes):
                self._start(rank)
        with handling(forwarding(self.processes, received)):
            failures = self._wait(received)
        return Ended(failures, received)

    def _start(self, number: int) -> None:
        receive, send = multiprocessing.Pipe(duplex=False)
        where = replace(self.where, rank=number, local_rank=number)
        arguments = self.task, where, self.meeting, send
        start = multiprocessing.get_context("spawn").Process
        process = start(target=child, args=arguments, name=f"worker {number}", daemon=True)
        process.start()
        send.close()
        self.started = number + 1
        self.children.append(_Child(number, process, receive))
        self.processes.append(process)

    def _wait(self, received: list[int]) -> list[Failure]:
        """Wait for the end of all processes; an error that is fatal for the run ends them."""
        failures: list[Failure] = []
        until = float("inf")
        while self.children:
            time.sleep(LOOK)
            self._kill_left_behind()
            for one in self.children:
                self._hear(one)
            for one in [one for one in self.children if not one.process.is_alive()]:
                self._hear(one)
                self.children.remove(one)
                self.processes.remove(one.process)
                fatal = [f for f in one.told if f["kind"] not in ("LeftBehind", "Interrupted") or received]
                if fatal:
                    failures += fatal
                    until = min(until, time.monotonic() + (60.0 if received else 2.0))
                elif one.process.exitcode == 0:
                    until = min(until, time.monotonic() + AFTER)
                elif until == float("inf") and not received and not self.register.over:
                    self._replace(one)
                    if not self.children:
                        text = f"all workers are lost, the last one ({_why(one)}) like those before it"
                        died = {"rank": one.number, "kind": DIED, "message": text, "traceback": text}
                        failures.append(died | {"time": time.monotonic(), "second_hand": False})
            if time.monotonic() > until:
                for process in self.processes:
                    process.kill()
        return failures

    def _replace(self, one: _Child) -> None:
        worked = one.entered is not None and time.monotonic() > one.entered + SHORT
        self.in_a_row = 0 if worked else self.in_a_row + 1
        then = "another one is started" if self.in_a_row < MOST else "no other one is started"
        if self.in_a_row == MOST:
            then += f" after {MOST} in a row that were lost before they worked for {SHORT:g} s"
        print(f"warning: worker {one.number} is lost ({_why(one)}); {then}", file=sys.stderr, flush=True)
        if self.in_a_row < MOST:
            with handling(signal.SIG_IGN, ANSWERED_LATER):
                self._start(self.started)

    def _hear(self, one: _Child) -> None:
        while not one.end.closed and one.end.poll():
            try:
                one.told.append(one.end.recv())
            except EOFError:
                one.end.close()

    def _kill_left_behind(self) -> None:
        """Kill former members of the group, which hang or will find that the others continued without them."""
        while (found := self.register.generation(self.generation + 1)) is not None:
            self.generation += 1
            self.members = {int(member[:6], 16) for member in found.ids}
        for one in self.children:
            if one.number in self.members:
                one.entered = one.entered or time.monotonic()
            elif one.entered is not None:
                one.process.kill()


def _why(one: _Child) -> str:
    if one.told:
        return str(one.told[-1]["message"]).partition(";")[0]
    status = one.process.exitcode
    return f"{DIED}: {signal.Signals(-status).name}" if status and status < 0 else f"exit status {status}"
