"""Generations of the members of a run, as the store has them that outlives the processes.

arrival-<k>                at the door: the k-th process that has come, and a digest of what it is about to do
same                       what that is, of the first one
came-<n>-<k>               the k-th process that is there to form generation n, and whether it knows the state
generation-<n>             the members of generation n
done-<n>-<t>, verdict-<n>-<t>   how many members of generation n have done the t-th thing, and whether all have
beat-<id>                  a counter that a thread of each process moves on
over                       the run has come to its end
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
SILENCE = 3.0  # seconds without one after which a process counts as gone
PAUSES = 0.002, 0.05  # seconds between two looks into the store: the first, the longest
FAILED = "failed"


@dataclass(frozen=True)
class Terms:
    """Under which processes form generations.

    Args:
        expected: processes that form the first generation.
        least: processes that must be left.
        timeout: seconds for which members wait for each other.
        same: what must be the same in all processes, as JSON has it.
        rank: that a launcher has given this process; those who begin together are ordered by it.
    """

    expected: int
    least: int
    timeout: float
    same: Mapping[str, Any]
    rank: int = 0


class Generation(NamedTuple):
    """A list of members.

    members: (id, whether it knows the state of the run), in the order of their ranks.
    arrivals: how many of those at the door have been looked at.
    founding: it is the first one, or the one before it is gone.
    """

    members: list[tuple[str, bool]]
    arrivals: int = 0
    founding: bool = False

    @property
    def ids(self) -> list[str]:
        """Of the members."""
        return [member for member, _ in self.members]


class Register:
    """Who has come, who is a member, and what all members have done.

    Args:
        store: that all share.
        terms: of this process.

    Attributes:
        me: the id of this process.
        beats: of this process and of those whom it listens to.
    """

    def __init__(self, store: SealedStore, terms: Terms) -> None:
        self.store, self.same = store.under("members"), dict(terms.same)
        self.me = f"{terms.rank:06x}{secrets.token_hex(5)}"
        self.beats = Beats(self.store, self.me)

    # ---- at the door

    def knock(self) -> str:
        """Be at the door; returns in what the run that is there does something else, "" = in nothing."""
        mine = json.loads(json.dumps(self.same))
        theirs = self.store.first("same", json.dumps(mine), _mapping)
        keys = [*theirs, *(key for key in mine if key not in theirs)]
        if (key := next((key for key in keys if theirs.get(key) != mine.get(key)), None)) is not None:
            return f"{key} must be {theirs.get(key)} as in the run that goes on, got {mine.get(key)}"
        self.store.set(f"arrival-{self.store.add('arrivals', 1)}", f"{self.me} {_digest(self.same)}")
        self.beats.start()
        return ""

    def arrivals(self) -> int:
        """How many have come to the door so far."""
        return self.store.add("arrivals", 0)

    def arrived(self, numbers: Iterable[int]) -> list[str]:
        """Those of them who are about to do the same."""
        found = filter(None, (self.store.read(f"arrival-{number}", _arrival) for number in numbers))
        return [member for member, digest in found if digest == _digest(self.same)]

    @property
    def over(self) -> bool:
        """Whether the run has come to its end."""
        return self.store.read("over", str) is not None

    def end(self) -> None:
        """It has."""
        self.store.set("over", self.me)

    # ---- generations

    def come(self, number: int, knows: bool) -> None:
        """Be there to form a generation.

        Args:
            number: of the generation.
            knows: the state of the run.
        """
        turn = self.store.add(f"came-{number}", 1)
        self.store.set(f"came-{number}-{turn}", f"{self.me} {int(knows)}")

    def forming(self, number: int) -> bool:
        """Whether any process is there to form it."""
        return self.store.add(f"came-{number}", 0) > 0

    def here(self, number: int) -> dict[str, bool]:
        """Those who are there to form it, and whether they know the state of the run."""
        turns = range(1, self.store.add(f"came-{number}", 0) + 1)
        found = filter(None, (self.store.read(f"came-{number}-{turn}", _who) for turn in turns))
        return {member: bool(knows) for member, knows in found}

    def generation(self, number: int) -> Generation | None:
        """The members of a generation, once they are known."""
        return self.store.read(f"generation-{number}", _generation)

    def proposed(self, number: int, generation: Generation) -> Generation:
        """The members of a generation: these, unless others have been proposed before."""
        return self.store.first(f"generation-{number}", json.dumps(generation), _generation)

    # ---- what all members do

    def done(self, key: str, members: Sequence[str], done: bool, timeout: float) -> int:
        """How many have come to the door so far, where all members have done it; -1 where not. All get one answer.

        Args:
            key: names what they do.
            members: all of them.
            done: whether this one has done it.
            timeout: seconds for which they are waited for.
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
    """A thread that says that this process is there, and listens to others.

    What others are silent for is counted in looks of the thread, so that a process which was stopped for a while does
    not find that all others are gone.

    Args:
        store: that all share.
        me: the id of this process.
    """

    def __init__(self, store: SealedStore, me: str) -> None:
        self._store, self.me = store, me
        self._heard: dict[str, tuple[int, int]] = {}  # the counter of each, and for how many looks it has stood still
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._own = self._store.clone()
        self._thread.start()

    def stop(self) -> None:
        """Say no more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * BEAT)

    def silent(self, members: Sequence[str]) -> list[str]:
        """Those of some processes that have said nothing for `SILENCE` seconds; from now on they are listened to."""
        for member in members:
            self._heard.setdefault(member, (-1, 0))
        return [member for member in members if member != self.me and self._heard[member][1] > SILENCE / BEAT]

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, as the main thread will find
            while not self._stop.wait(BEAT):
                self._own.add(f"beat-{self.me}", 1)
                for member, (before, looks) in list(self._heard.items()):
                    count = self._own.add(f"beat-{member}", 0)
                    self._heard[member] = (count, looks + 1 if count == before else 0)


# ---- what the store holds


def _generation(text: str) -> Generation:
    members, arrivals, founding = json.loads(text)
    listed = [(_word(member), knows) for member, knows in members]
    if type(arrivals) is not int or not all(isinstance(flag, bool) for flag in (founding, *dict(listed).values())):
        raise ValueError(text)
    return Generation(listed, arrivals, founding)


def _verdict(text: str) -> int:
    """How many have come to the door so far, where all have done it; -1 where not."""
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
    """Sleep at each `next`, a little longer each time."""
    seconds, longest = PAUSES
    while True:
        time.sleep(seconds)
        yield
        seconds = min(1.5 * seconds, longest)
