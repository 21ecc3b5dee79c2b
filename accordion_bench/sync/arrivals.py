"""Who has come to which averaging: what processes tell each other in a store, so that all of them agree."""

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

SOONEST, SELDOM, SHARE = 0.002, 0.2, 0.1  # seconds between two looks into the store: a share of what has been waited

T = TypeVar("T")


class Store(Protocol):
    """Texts by key, shared by all processes."""

    def read(self, key: str, meaning: Callable[[str], T]) -> T | None:
        """A value; None where there is none."""

    def replace(self, key: str, before: str, value: str, meaning: Callable[[str], T]) -> T | None:
        """Write a value where `before` stands, "" for nothing; returns what stands there now. Atomic."""


class Arrival(NamedTuple):
    """A process that has come to an averaging.

    rank: of the process.
    current: whether it has what came of the last averaging.
    samples: of each of its workers since it last took part.
    lr: the inner learning rate at the start of its round.
    step, epoch: optimizer steps and epochs that are over there.
    """

    rank: int
    current: bool
    samples: int
    lr: float
    step: int
    epoch: float


class Averaging(NamedTuple):
    """An averaging: closed where no more process can come, and which have come; closed without any = it is off."""

    closed: bool = False
    who: tuple[Arrival, ...] = ()


class Arrivals:
    """Comes to averagings, one after another, and to meetings of all.

    All that is known of an averaging is one text in the store, which is replaced in one atomic operation: no process
    comes to a closed one, and all read the same names. A waiting process may close it: when all have come; or when the
    quorum is full and the grace is over; or when all who are not here wait in a meeting, so that no other will come.
    A quorum needs a process that was in the last averaging, or no process would know its result. Who finds an averaging
    closed is late for it, comes to the next open one, and waits there.

    Args:
        store: of all processes.
        rank: of this process.
        processes: how many there are.
        needed: processes that are a quorum.
        grace: seconds that others are waited for when the quorum is full.
        timeout: seconds after which waiting is given up.

    Attributes:
        number: of the next averaging.
        current: whether this process has what came of the last one.
    """

    def __init__(self, store: Store, rank: int, processes: int, needed: int, grace: float, timeout: float) -> None:
        self.store, self.rank, self.processes = store, rank, processes
        self.needed, self.grace, self.timeout = needed, grace, timeout
        self.number = self._meetings = 0
        self.current = True

    def come(self, samples: int, lr: float, step: int, epoch: float) -> list[Arrival]:
        """Come to the next averaging that is open, and wait until it is closed.

        Args:
            samples, lr, step, epoch: see `Arrival`.

        Returns:
            who takes part, by rank; none where it is off.

        Raises:
            RuntimeError: too few have come in time.
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
        """Tell that this process waits for all others, and comes to no averaging until they have met."""
        key = f"meeting-{self._meetings}"
        found: list[int] = []
        while self.rank not in found:
            before = json.dumps(found) if found else ""
            found = _there(self.store.replace(key, before, json.dumps([*found, self.rank]), _numbers))
        self._meetings += 1

    def _pass(self, closed: Averaging) -> None:
        """This process was late for an averaging."""
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
    """What the store holds.

    Raises:
        RuntimeError: that counts for nothing, so that processes would not agree.
    """
    if found is None:
        raise RuntimeError("what processes have told each other of an averaging is lost in the store of the run")
    return found


def _text(averaging: Averaging) -> str:
    return json.dumps([averaging.closed, averaging.who])


def _averaging(text: str) -> Averaging:
    """What `_text` has said.

    Raises:
        ValueError: it is no such thing.
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
