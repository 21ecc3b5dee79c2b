"""Elastic runs under torchrun, Slurm or OpenMPI: find the run of a restarted process, and end lost processes.

A launcher may restart one worker or all workers, and the store may outlive them. A restarted worker joins the run if
another member is alive. If no member is alive, the restarted workers begin a new attempt, with a separate part of the
store.
"""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from accordion_bench.comm.generations import BEAT, SILENCE, Generation, Register, Terms
from accordion_bench.comm.sealed_store import SealedStore, whole_number
from accordion_bench.processes.interrupt import is_gone
from accordion_bench.processes.waiting import process_space
from accordion_bench.processes.watchdog import FAILURE, GRACE, LOOK, parent_to_obey, read_failure

NEW, RUNNING, OVER, LOST = "new", "running", "over", "lost"
AFTER = 10.0  # seconds for a process to end after the first one has finished
NEIGHBOUR = 2.0  # seconds after `GRACE` until a left-behind process is killed by others of its machine


def find_attempt(store: SealedStore, environ: Mapping[str, str] = os.environ) -> tuple[SealedStore, str]:
    """Return the store of the newest attempt at a run, and its state: `NEW`, `RUNNING` or `OVER`.

    Args:
        store: store of the run.
        environ: environment of this process. If torchrun has restarted it, an attempt that failed before it had members
            is not the newest one.
    """
    restarted = environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    for number in itertools.count():
        own = store.under(f"attempt-{number}") if number else store
        state = _state(own)
        failed = restarted and state == NEW and own.read(FAILURE, read_failure) is not None
        if state != LOST and not failed:
            return own, state
    raise AssertionError


def _state(store: SealedStore) -> str:
    register = Register(store, Terms(1, 1, 0.0, {}))
    if register.over:
        return OVER
    if not (members := _newest(register).ids):
        return NEW
    heard, until = _beats(register, members), time.monotonic() + SILENCE + BEAT
    while time.monotonic() < until:
        time.sleep(BEAT / 2)
        if _beats(register, members) != heard:
            return RUNNING
    return OVER if register.over else LOST


def _newest(register: Register) -> Generation:
    """Return the newest generation; empty if there is none."""
    number, found = 0, Generation([])
    while (later := register.generation(number + 1)) is not None:
        number, found = number + 1, later
    return found


def _beats(register: Register, members: Sequence[str]) -> list[int]:
    return [register.store.add(f"beat-{member}", 0) for member in members]


class Guard:
    """Context manager with a thread that ends this process if it does not end by itself when it should.

    The process ends at once if its launcher is gone. It ends `GRACE` seconds after the other members have continued
    without it or the store is lost, and `AFTER` seconds after the run has ended. A process that is suspended cannot do
    this. Therefore each member kills processes of its machine that the others have continued without.

    Args:
        store: store of the run.
        me: id of this process in the register of members.
    """

    def __init__(self, store: SealedStore, me: str) -> None:
        self._store, self.me = store.clone(), me
        self._parent = parent_to_obey(os.environ)
        self._number = 0  # of the newest known generation
        self._members: list[str] = []
        self._excluded: dict[str, float] = {}  # id -> time at which it was found to be excluded
        self._due, self._why = float("inf"), ""
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)

    def __enter__(self) -> "Guard":
        self._register = Register(self._store, Terms(1, 1, 0.0, {}))
        if space := process_space():
            self._store.set(f"process-{self.me}", f"{space} {os.getpid()} {_started(os.getpid())}")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join(GRACE)

    def _run(self) -> None:
        while not self._left.wait(LOOK):
            if self._parent is not None and is_gone(self._parent):
                os._exit(1)
            try:
                self._look()
            except RuntimeError:
                self._end_within(GRACE, "the store of the run is gone")
            if time.monotonic() > self._due and not self._left.is_set():
                print(f"this worker has ended itself, because {self._why}", file=sys.stderr, flush=True)
                os._exit(1)

    def _look(self) -> None:
        while (later := self._register.generation(self._number + 1)) is not None:
            lost = {member: time.monotonic() for member in self._members if member not in later.ids}
            self._excluded |= lost
            self._number, self._members = self._number + 1, later.ids
        if self.me in self._excluded:
            self._end_within(GRACE, "the others continue without it, and it has not noticed")
        elif self._register.over:
            self._end_within(AFTER, f"the run has been over for {AFTER:g} s")
        for member, since in list(self._excluded.items()):
            if member != self.me and time.monotonic() > since + GRACE + NEIGHBOUR:
                del self._excluded[member]
                self._kill(member)

    def _end_within(self, seconds: float, why: str) -> None:
        if self._due == float("inf"):
            self._due, self._why = time.monotonic() + seconds, why

    def _kill(self, member: str) -> None:
        """Kill the process of a former member if it is on this machine; its launcher may then restart it."""
        found = self._store.read(f"process-{member}", _process)
        if found is None or found[0] != process_space():
            return
        _, pid, started = found
        if _started(pid) == started:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it has ended, or belongs to another user
                return
            print(f"process {pid} is killed, because the others continue without it", file=sys.stderr, flush=True)


def _started(pid: int) -> int:
    """Return the start time of a live process in clock ticks, which no later process of the same number has; -1 = none.

    A process that has ended but is not awaited yet counts as none.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if stat[0] in "ZX" else int(stat[19])


def _process(text: str) -> tuple[str, int, int]:
    space, pid, started = text.split(" ")
    return space, whole_number(pid), whole_number(started)
