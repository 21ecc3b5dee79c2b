"""Keys in the store of an elastic run: arrivals, generations of members, votes and heartbeats.

arrival-<k>                the k-th process that arrived, and a digest of its options
same                       the options of the first process
came-<n>-<k>               the k-th process that takes part in forming generation n, and whether it has the state
generation-<n>             the members of generation n
done-<n>-<t>, verdict-<n>-<t>   the number of members of generation n that completed operation t, and the result
beat-<id>                  a counter that a thread of each process increments
over                       set when the run has ended
"""

import contextlib
import hashlib
import json
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from accordion_bench.comm.sealed_store import SealedStore, whole_number

BEAT = 0.5  # seconds between two heartbeats
SILENCE = 3.0  # seconds without a heartbeat after which a process counts as lost
PAUSES = 0.002, 0.05  # seconds between two reads of the store: the first pause, the longest
FAILED = "failed"


@dataclass(frozen=True)
class Terms:
    """Conditions for forming generations.

    Args:
        expected: number of processes of the first generation.
        least: lower bound of the number of processes.
        timeout: seconds for which members wait for each other.
        same: options that must be equal on all processes, as JSON values.
        rank: rank from the launcher, which orders the processes of the first generation.
        may_found: whether this process may form a first generation, or only enter an existing one.
    """

    expected: int
    least: int
    timeout: float
    same: Mapping[str, Any]
    rank: int = 0
    may_found: bool = True


class Generation(NamedTuple):
    """A list of members."""

    members: list[tuple[str, bool]]  # (id, whether it has the state of the run), in the order of their ranks
    arrivals: int = 0  # number of arrivals that were considered so far
    founding: bool = False  # whether it is the first one, or all members of the previous one are lost

    @property
    def ids(self) -> list[str]:
        """Ids of the members."""
        return [member for member, _ in self.members]


class Register:
    """Access to arrivals, generations and votes in the store that all processes share.

    Attributes:
        me: id of this process.
        beats: heartbeats of this process and of those that it monitors.
    """

    def __init__(self, store: SealedStore, terms: Terms) -> None:
        self.store, self.same = store.under("members"), dict(terms.same)
        self.me = f"{terms.rank:06x}{secrets.token_hex(5)}"
        self.beats = Beats(self.store, self.me)

    # ---- arrivals

    def register_arrival(self) -> str:
        """Register as an arrival. Return a sentence on the first option that differs from the run's, "" = none does."""
        mine = json.loads(json.dumps(self.same))
        theirs = self.store.first("same", json.dumps(mine), _mapping)
        keys = [*theirs, *(key for key in mine if key not in theirs)]
        if (key := next((key for key in keys if theirs.get(key) != mine.get(key)), None)) is not None:
            return f"{key} must be {theirs.get(key)} as in the run that goes on, got {mine.get(key)}"
        self.store.set(f"arrival-{self.store.add('arrivals', 1)}", f"{self.me} {_digest(self.same)}")
        self.beats.start()
        return ""

    def arrivals(self) -> int:
        """Return the number of arrivals so far."""
        return self.store.add("arrivals", 0)

    def arrived(self, numbers: Iterable[int]) -> list[str]:
        """Return the ids of those of some arrivals that have the same options."""
        found = filter(None, (self.store.read(f"arrival-{number}", _arrival) for number in numbers))
        return [member for member, digest in found if digest == _digest(self.same)]

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.store.read("over", str) is not None

    def end(self) -> None:
        """Mark the run as ended."""
        self.store.set("over", self.me)

    # ---- generations

    def come(self, number: int, knows: bool) -> None:
        """Take part in forming a generation; `knows`: whether this process has the state of the run."""
        turn = self.store.add(f"came-{number}", 1)
        self.store.set(f"came-{number}-{turn}", f"{self.me} {int(knows)}")

    def forming(self, number: int) -> bool:
        """Return whether any process takes part in forming it."""
        return self.store.add(f"came-{number}", 0) > 0

    def here(self, number: int) -> dict[str, bool]:
        """Return the ids of those that take part in forming it, and whether each has the state of the run."""
        turns = range(1, self.store.add(f"came-{number}", 0) + 1)
        found = filter(None, (self.store.read(f"came-{number}-{turn}", _who) for turn in turns))
        return {member: bool(knows) for member, knows in found}

    def generation(self, number: int) -> Generation | None:
        """Return a generation; None = it is not formed yet."""
        return self.store.read(f"generation-{number}", _generation)

    def proposed(self, number: int, generation: Generation) -> Generation:
        """Propose the members of a generation; return the first proposal of any process."""
        return self.store.first(f"generation-{number}", json.dumps(generation), _generation)

    # ---- votes

    def done(self, key: str, members: Sequence[str], done: bool, timeout: float) -> int:
        """Vote on an operation. Return the number of arrivals so far if all members completed it, else -1.

        All members get the same result. `done` tells whether this process completed it.
        """
        name, until, waits = f"verdict-{key}", time.monotonic() + timeout, pauses()
        if not done:
            return self.store.first(name, FAILED, _verdict)
        if self.store.add(f"done-{key}", 1) >= len(members):
            return self.store.first(name, str(self.arrivals()), _verdict)
        while (said := self.store.read(name, _verdict)) is None:
            if time.monotonic() > until or self.beats.silent(members):
                return self.store.first(name, FAILED, _verdict)
            next(waits)
        return said


class Beats:
    """Thread that sends heartbeats of this process and monitors those of others.

    Silence is counted in iterations of the thread instead of seconds. So a process that was stopped for a while does
    not conclude that all others are lost.
    """

    def __init__(self, store: SealedStore, me: str) -> None:
        self._store, self.me = store, me
        self._heard: dict[str, tuple[int, int]] = {}  # id -> counter, iterations without a change
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._own = self._store.clone()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * BEAT)

    def silent(self, members: Sequence[str]) -> list[str]:
        """Return those of some processes without a heartbeat for `SILENCE` seconds; start to monitor new ones."""
        for member in members:
            self._heard.setdefault(member, (-1, 0))
        return [member for member in members if member != self.me and self._heard[member][1] > SILENCE / BEAT]

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is lost, as the main thread will notice
            while not self._stop.wait(BEAT):
                self._own.add(f"beat-{self.me}", 1)
                for member, (before, looks) in list(self._heard.items()):
                    count = self._own.add(f"beat-{member}", 0)
                    self._heard[member] = (count, looks + 1 if count == before else 0)


# ---- values in the store


def _generation(text: str) -> Generation:
    members, arrivals, founding = json.loads(text)
    listed = [(_word(member), knows) for member, knows in members]
    if type(arrivals) is not int or not all(isinstance(flag, bool) for flag in (founding, *dict(listed).values())):
        raise ValueError(text)
    return Generation(listed, arrivals, founding)


def _verdict(text: str) -> int:
    """Parse the result of a vote: the number of arrivals so far, or -1 = not all completed the operation."""
    return -1 if text == FAILED else whole_number(text)


def _who(text: str) -> tuple[str, int]:
    member, knows = text.split(" ")
    return _word(member), whole_number(knows)


def _arrival(text: str) -> tuple[str, str]:
    member, digest = text.split(" ")
    return _word(member), _word(digest)


def _word(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{16}", text):
        raise ValueError(text)
    return text


def _mapping(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(text)
    return found


def _digest(same: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]


def pauses() -> Iterator[None]:
    """Sleep at each `next`, for pauses that grow by half up to the longest; see `PAUSES`."""
    seconds, longest = PAUSES
    while True:
        time.sleep(seconds)
        yield
        seconds = min(1.5 * seconds, longest)
