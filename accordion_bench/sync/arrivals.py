"""Agreement on the processes that take part in each averaging with a quorum, through a shared store."""

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

SOONEST, SELDOM, SHARE = (
    0.002,
    0.2,
    0.1,
)  # seconds between two reads of the store: bounds, and fraction of the time waited

T = TypeVar("T")


class Store(Protocol):
    """Key-value store of strings, shared by all processes."""

    def read(self, key: str, meaning: Callable[[str], T]) -> T | None:
        """Return a value; None = there is none."""

    def replace(self, key: str, before: str, value: str, meaning: Callable[[str], T]) -> T | None:
        """Atomically replace `before` ("" = no value) by a value; return the current one."""


class Arrival(NamedTuple):
    """A process that has arrived at an averaging.

    rank: rank of the process.
    current: whether it has the result of the last averaging.
    samples: number of samples of each of its workers since it last took part.
    lr: inner learning rate at the start of its round.
    step, epoch: optimizer steps and epochs completed on this process.
    """

    rank: int
    current: bool
    samples: int
    lr: float
    step: int
    epoch: float


class Averaging(NamedTuple):
    """State of an averaging: whether it is closed to further processes, and the arrivals; none = it is cancelled."""

    closed: bool = False
    who: tuple[Arrival, ...] = ()


class Arrivals:
    """Registers a process at averagings, one after another, and at meetings of all processes.

    The state of an averaging is one value in the store, which is replaced atomically. So no process arrives at a closed
    averaging, and all processes read the same arrivals. A waiting process closes it when all have arrived, when the
    quorum is complete and the grace period is over, or when all others wait in a meeting, so that none will arrive. A
    quorum needs a process that took part in the last averaging, because the others lack its result. A process that
    finds an averaging closed is late for it; it arrives at the next open one and waits there.

    Args:
        store: store of all processes.
        rank: rank of this process.
        processes: number of processes.
        needed: number of processes of a quorum.
        grace: seconds to wait for other processes once the quorum is complete.
        timeout: seconds after which waiting fails.

    Attributes:
        number: number of the next averaging.
        current: whether this process has the result of the last averaging.
    """

    def __init__(self, store: Store, rank: int, processes: int, needed: int, grace: float, timeout: float) -> None:
        self.store, self.rank, self.processes = store, rank, processes
        self.needed, self.grace, self.timeout = needed, grace, timeout
        self.number = self._meetings = 0
        self.current = True

    def come(self, samples: int, lr: float, step: int, epoch: float) -> list[Arrival]:
        """Arrive at the next open averaging, and wait until it is closed.

        Args:
            samples, lr, step, epoch: see `Arrival`.

        Returns:
            the processes that take part, by rank; [] = it is cancelled.

        Raises:
            RuntimeError: too few processes arrived within the timeout.
        """
        found = Averaging()
        while self.rank not in _ranks(found):
            mine = Arrival(self.rank, self.current, samples, lr, step, epoch)
            found = self._replaced(found, Averaging(False, (*found.who, mine)))
            if found.closed:
                self._pass(found)
                found = Averaging()
        found = self._closed(found)
        self.number += 1
        return sorted(found.who)

    def meet(self) -> None:
        """Announce that this process waits for all others, and arrives at no averaging until all have met."""
        key = f"meeting-{self._meetings}"
        found: list[int] = []
        while self.rank not in found:
            before = json.dumps(found) if found else ""
            found = _there(self.store.replace(key, before, json.dumps([*found, self.rank]), _numbers))
        self._meetings += 1

    def _pass(self, closed: Averaging) -> None:
        """Note that this process was late for an averaging."""
        self.number += 1
        self.current = self.current and not closed.who

    def _closed(self, found: Averaging) -> Averaging:
        """Wait until the averaging is closed, or close it."""
        began, full_since = time.monotonic(), None
        while not found.closed:
            now = time.monotonic()
            full = len(found.who) >= self.needed and any(arrival.current for arrival in found.who)
            full_since = (full_since or now) if full else None
            everybody = len(found.who) == self.processes
            if everybody or (full_since and now - full_since >= self.grace) or self._nobody_else_comes(found):
                found = self._replaced(found, Averaging(True, found.who if full else ()))
                continue
            if now - began > self.timeout:
                raise RuntimeError(
                    f"an averaging has waited {self.timeout:g} s for {self.needed} of {self.processes} processes, and "
                    f"only {sorted(_ranks(found))} have come"
                )
            pause = min(max(SOONEST, SHARE * (now - began)), SELDOM)
            time.sleep(min(pause, full_since + self.grace - now) if full_since else pause)
            found = _there(self.store.read(self._key, _averaging))
        return found

    def _nobody_else_comes(self, found: Averaging) -> bool:
        meeting = self.store.read(f"meeting-{self._meetings}", _numbers) or []
        return len(_ranks(found) | set(meeting)) == self.processes

    @property
    def _key(self) -> str:
        return f"averaging-{self.number}"

    def _replaced(self, before: Averaging, after: Averaging) -> Averaging:
        text = _text(before) if before.who else ""
        return _there(self.store.replace(self._key, text, _text(after), _averaging))


def _ranks(averaging: Averaging) -> set[int]:
    return {arrival.rank for arrival in averaging.who}


def _there(found: T | None) -> T:
    """Return a value from the store.

    Raises:
        RuntimeError: the value is invalid, so that processes would not agree.
    """
    if found is None:
        raise RuntimeError("what processes have told each other of an averaging is lost in the store of the run")
    return found


def _text(averaging: Averaging) -> str:
    return json.dumps([averaging.closed, averaging.who])


def _averaging(text: str) -> Averaging:
    """Parse the result of `_text`.

    Raises:
        ValueError: the text is invalid.
    """
    closed, who = json.loads(text)
    kinds: tuple[Any, ...] = int, bool, int, (int, float), int, (int, float)
    good = type(closed) is bool and all(
        len(one) == len(kinds) and all(isinstance(word, kind) for word, kind in zip(one, kinds, strict=True))
        for one in who
    )
    if not good:
        raise ValueError(text)
    return Averaging(closed, tuple(Arrival(*one) for one in who))


def _numbers(text: str) -> list[int]:
    found: Any = json.loads(text)
    if type(found) is not list or any(type(number) is not int for number in found):
        raise ValueError(text)
    return found
