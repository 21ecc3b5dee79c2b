"""Watchdog: end all processes of a run after a failure in one of them, and report the first failure everywhere.

A failing process publishes its traceback in the shared store; only the first is kept. A thread in each process checks
for it, for processes that ended without a report, and for the end of the parent.
"""

import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

from accordion_bench.comm.members import communication_error_text, is_timeout
from accordion_bench.comm.sealed_store import SealedStore, printable
from accordion_bench.options.advice import explain
from accordion_bench.processes import process_group
from accordion_bench.processes.interrupt import is_gone
from accordion_bench.processes.waiting import Neighbours, growing_pauses

LOOK = 1.0  # seconds between two checks of the store, and between two heartbeats
SILENCE = 20.0  # seconds without a heartbeat after which a process counts as lost; long, since machines may be busy
GRACE = 5.0  # seconds for the main thread to notice a failure itself, save, and exit
CAUSE = 2.5  # seconds in which a process that lost a peer waits for the cause
FAILURE = "failure"

REMARKS = ("LeftBehind", "TooFewLeft")  # errors of elastic runs whose messages need no traceback
REFUSALS = ("NonFinite", "ConfigError", "ValueRefused", "ChildRefused")
LOST, TIMED_OUT, DIED = "LostProcess", "TimedOut", "died"
Failure = dict[str, Any]  # rank, kind, message, traceback
T = TypeVar("T")


class ChildRefused(RuntimeError):
    """Another process stopped with a one-sentence error for the user.

    Args:
        sentence: the message; "" if another process of this machine prints it.
        kind: name of the error in the other process.
    """

    def __init__(self, sentence: str, kind: str = "NonFinite") -> None:
        super().__init__(sentence)
        self.kind = kind


class RankFailed(RuntimeError):
    """Another process of the run failed; the text is complete without this process's traceback.

    Args:
        text: rank and traceback of the failed process; "" if another process of this machine prints them.
        kind: name of the error in the failed process.
    """

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


def failure_of(error: BaseException, rank: int, timeout: float) -> Failure:
    """Describe an error for publication.

    Args:
        error: error in the main thread, possibly raised first in another thread.
        rank: rank of the process.
        timeout: comm.timeout, seconds.
    """
    kind, message = getattr(error, "kind", type(error).__name__), str(error)
    if isinstance(error, ChildRefused | RankFailed):
        return {"rank": rank, "kind": kind, "message": message, "traceback": message}
    if lost := communication_error_text(error) or _behind(error):
        timed_out = is_timeout(lost)
        first = " ".join(lost.partition(". This is typically")[0].split())[:300]
        if timed_out:
            message = (
                f"rank {rank} has waited for another process for comm.timeout={timeout:g} s: that one hangs, or its "
                f"link is cut; type comm.timeout={2 * timeout:g} if it is only slow ({first})"
            )
        else:
            message = f"rank {rank} has lost another process, whose own output says why ({first})"
        return {"rank": rank, "kind": TIMED_OUT if timed_out else LOST, "message": message, "traceback": message}
    if (sentence := explain(error)) is not None:
        kind = kind if kind in REFUSALS else "ConfigError"
        return {"rank": rank, "kind": kind, "message": sentence, "traceback": sentence}
    text = "".join(traceback.format_exception(error))
    return {"rank": rank, "kind": kind, "message": message, "traceback": text.rstrip()}


def own_error(error: BaseException, rank: int, timeout: float) -> BaseException:
    """Return the error to raise for an error of this process that other processes of an elastic run do not share.

    The arguments are those of `failure_of`. A loss of other processes is reported without a traceback.
    """
    if isinstance(error, KeyboardInterrupt | ChildRefused | RankFailed):
        return error
    failure = failure_of(error, rank, timeout)
    if failure["kind"] in REMARKS:
        return RankFailed(str(error), failure["kind"])
    return RankFailed(failure["message"], failure["kind"]) if failure["kind"] in (LOST, TIMED_OUT) else error


def _behind(error: BaseException) -> str:
    """Return NCCL's error if it explains this one: after it, tensors have undefined values, which may be non-finite."""
    trouble = process_group.trouble()
    return trouble if trouble == process_group.TIMED_OUT or type(error).__name__ == "NonFinite" else ""


def first_failure(store: SealedStore, mine: Failure) -> Failure:
    """Publish a failure, and return the first one published, which ended the run.

    Args:
        store: store of the run.
        mine: failure of this process. If it only lost a peer, it waits up to `CAUSE` seconds for the peer's failure.
    """
    try:
        until = time.monotonic() + (CAUSE if mine["kind"] == LOST else 0)
        while time.monotonic() < until and store.read(FAILURE, read_failure) is None:
            time.sleep(0.1)
        return store.first(FAILURE, json.dumps(mine), read_failure)
    except RuntimeError:  # the store has ended as well
        return mine


def read_failure(text: str) -> Failure:
    """Parse a published failure.

    Raises:
        ValueError: the text is no failure.
    """
    told = json.loads(text)
    rank, words = told["rank"], [told[name] for name in ("kind", "message", "traceback")]
    if type(rank) is not int or rank < 0 or not all(isinstance(word, str) for word in words):
        raise ValueError(text)
    kind, message, trace = map(printable, words)
    return {"rank": rank, "kind": kind, "message": message, "traceback": trace}


def error_for(failure: Failure, rank: int, aloud: bool = True) -> RuntimeError:
    """Return the error to raise for another process's failure.

    Args:
        failure: the first failure.
        rank: rank of this process; rank 0 and the failed rank have the full message.
        aloud: whether another process has a short message; false = none.
    """
    kind, text = failure["kind"], failure["message"]
    refused = kind in REFUSALS
    if rank in (0, failure["rank"]):
        text = text if refused else f"rank {failure['rank']} failed:\n{failure['traceback']}"
    else:
        text = f"rank {rank} has stopped, because rank {failure['rank']} did: {text}" if aloud else ""
    return ChildRefused(text, kind) if refused else RankFailed(text, kind)


class Watch:
    """Context manager with a thread that monitors this process and the others.

    Args:
        store: store of this run, shared by all processes.
        rank: rank of this process.
        processes: number of processes.
        local_rank: rank of this process on its machine; local rank 0 prints messages.
        timeout: comm.timeout, seconds.
        hosts_store: whether the store ends with this process.

    Attributes:
        last_words: function called with the error before the thread ends the process.
        shares_errors: whether an error of this process ends the others.
        joins: whether this process joins an elastic run that the others continue.
        over: whether the run had ended when this process was restarted.
    """

    shares_errors = True
    joins = over = False

    def __init__(
        self, store: SealedStore, rank: int, processes: int, local_rank: int, timeout: float, hosts_store: bool = False
    ) -> None:
        self.store, self.rank, self.processes, self.timeout = store, rank, processes, timeout
        self.last_words: Callable[[BaseException], None] = lambda error: None
        self._own = store.clone()  # separate connection, which the main thread cannot block
        self._aloud, self._hosts_store = local_rank == 0, hosts_store
        self._parent = parent_to_obey(os.environ)
        self._left = threading.Event()
        self._beats = 0
        self._heard: dict[int, tuple[str | None, float]] = {}
        self._neighbours = Neighbours(store, rank)
        self._counted_out = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._neighbours.come()
        self._beat()
        self._neighbours.settled()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join(GRACE)
        with contextlib.suppress(RuntimeError):  # the store may have ended
            self.store.set(f"left-{self.rank}", "yes")
            self._count_out(self.store)
            if self._hosts_store:
                self._wait_for_readers(self.processes)

    def first_error(self, error: BaseException) -> BaseException:
        """Publish this process's failure, and return the error to raise: another process's if that failed first."""
        if isinstance(error, KeyboardInterrupt | ChildRefused | RankFailed):
            return error
        failure = first_failure(self.store, failure_of(error, self.rank, self.timeout))
        if failure["rank"] != self.rank:
            return error_for(failure, self.rank, self._aloud and failure["message"] != str(error))
        lost = failure["kind"] in (LOST, TIMED_OUT)
        return RankFailed(failure["message"], failure["kind"]) if lost else error

    def get(self, key: str, meaning: Callable[[str], T] = str) -> T:  # type: ignore[assignment]
        """Wait for a value in the store, for at most `timeout` seconds; interrupted by Ctrl-C and failures of others.

        Args:
            key: key of the value.
            meaning: parses the text; raises ValueError if it is invalid.

        Raises:
            ChildRefused, RankFailed: another process failed in the meantime.
            RuntimeError: the value was not set within the timeout.
        """
        return self._wait(lambda: self.store.read(key, meaning), key)

    def wait_for_all(self, name: str) -> None:
        """Barrier: wait until every process has called this, for at most `timeout` seconds. Raises as `get` does.

        Args:
            name: unique name of the barrier.
        """
        self.store.add(name, 1)
        self._wait(lambda: self.store.add(name, 0) >= self.processes or None, name)

    def _wait(self, look: Callable[[], T | None], key: str) -> T:
        until, pauses = time.monotonic() + self.timeout, growing_pauses()
        while (found := look()) is None:
            failure = self.store.read(FAILURE, read_failure)
            if failure is not None:
                raise error_for(failure, self.rank, self._aloud)
            if time.monotonic() > until:
                raise RuntimeError(f"[c10d] wait timeout after {self.timeout:g} s, key: {key}")
            next(pauses)
        return found

    def _run(self) -> None:
        while not self._left.wait(LOOK):
            try:
                self._beat()
                failure = self._look()
            except RuntimeError as error:
                message = f"the store of the run, at rank 0 or its launcher, is gone ({str(error).splitlines()[0]})"
                failure = {"rank": 0, "kind": LOST, "message": message, "traceback": message}
            if failure is not None:
                return self._end(failure)

    def _beat(self) -> None:
        if self._neighbours.speaks:
            self._beats += 1
            self._own.set(f"beat-{self.rank}", str(self._beats))

    def _look(self) -> Failure | None:
        """Return the first failure, as published or as found here; None without a failure."""
        failure = self._own.read(FAILURE, read_failure)
        if failure is not None:
            return failure
        if trouble := process_group.trouble():  # the main thread may wait for its GPU and get no exception
            return first_failure(self._own, failure_of(RuntimeError(trouble), self.rank, self.timeout))
        text = "its launcher is gone"
        gone = self.rank if self._orphaned() else None
        if gone is None and self._neighbours.look(self._own):
            gone, text = self._ended_here(), "it ended without a word (killed; out of memory?)"
            if gone is None:
                text = f"nothing has been heard of it for {SILENCE:g} s: its machine, or the link to it, is gone"
                gone = self._silent()
        if gone is None:
            return None
        mine = {"rank": gone, "kind": DIED, "message": text, "traceback": text}
        return self._own.first(FAILURE, json.dumps(mine), read_failure)

    def _orphaned(self) -> bool:
        return self._parent is not None and is_gone(self._parent)

    def _ended_here(self) -> int | None:
        """Return the rank of a process of this machine that ended without leaving the run; None = none."""
        return next((rank for rank in self._neighbours.gone() if not self._has_left(rank)), None)

    def _silent(self) -> int | None:
        """Return the rank of a monitored process without a heartbeat for `SILENCE` seconds; None = none."""
        now, ranks = time.monotonic(), self._neighbours.heard
        for rank, beat in zip(ranks, self._own.read_all([f"beat-{r}" for r in ranks], str) or [], strict=False):
            before, when = self._heard.get(rank, (None, now))
            self._heard[rank] = (beat, now if beat != before else when)
            if now - self._heard[rank][1] > SILENCE and not self._has_left(rank):
                return rank
        return None

    def _has_left(self, rank: int) -> bool:
        return self._own.read(f"left-{rank}", str) is not None

    def _end(self, failure: Failure) -> None:
        """Wait `GRACE` seconds for the main thread to exit, then end the process, since that thread may be blocked."""
        with contextlib.suppress(RuntimeError):
            self._count_out(self._own)
        if self._left.wait(0 if self._orphaned() else GRACE):
            return
        error = error_for(failure, self.rank, self._aloud or failure["rank"] == self.rank)
        try:
            self.last_words(error)
            if str(error):
                print(error, file=sys.stderr, flush=True)
            for child in multiprocessing.active_children():  # data loaders
                child.kill()
        finally:
            os._exit(2 if isinstance(error, ChildRefused) else 1)

    def _count_out(self, store: SealedStore) -> None:
        if self._counted_out.acquire(blocking=False):
            store.add("out", 1)

    def _wait_for_readers(self, processes: int) -> None:
        """Wait until the others have left or have read the failure, since the store ends with this process."""
        until, pauses = time.monotonic() + LOOK + CAUSE, growing_pauses()
        while self.store.add("out", 0) < processes and time.monotonic() < until:
            next(pauses)

    def leave_elastic(self, members: int) -> None:
        """Leave an elastic run that has ended; if this process hosts the store, wait until all members have left.

        Args:
            members: number of members at the end.
        """
        self._count_out(self.store)
        if self._hosts_store:
            self._wait_for_readers(members)


def parent_to_obey(environ: Mapping[str, str]) -> int | None:
    """Return the launcher's process number, at whose end this process ends too; None if the parent may be a shell."""
    launchers = {"TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK"}
    return os.getppid() if launchers & environ.keys() else None
