"""Averagings of the processes that have arrived in time, on which they agree through a shared store."""

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from accordion_bench.batches import weights
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.members import Members
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.position import StepInfo
from accordion_bench.sync.outer import Average, treat_buffers
from accordion_bench.sync.quorum import Lateness, Quorum, nbytes
from accordion_bench.sync.scheme import SyncContext

TIMEOUT = 600.0  # default, seconds
# counts of a ledger that averagings change
LEARNT = ("payload", "wire", "rounds", "saved", "coded", "paper_floats", "uncounted")
# seconds between two reads of the store: bounds, and fraction of the time waited
SOONEST, SELDOM, SHARE = 0.002, 0.2, 0.1

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
        self.number += 1
        self.current = self.current and not closed.who

    def _closed(self, found: Averaging) -> Averaging:
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
    """Return a value from the store, or raise RuntimeError if it is invalid, so that processes would not agree."""
    if found is None:
        raise RuntimeError("what processes have told each other of an averaging is lost in the store of the run")
    return found


def _text(averaging: Averaging) -> str:
    return json.dumps([averaging.closed, averaging.who])


def _averaging(text: str) -> Averaging:
    """Parse the result of `_text`, or raise ValueError."""
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


class Room(NamedTuple):
    """Description of a tensor of a compressor's state: name of its parameter, key, shape, dtype."""

    name: str
    key: str
    shape: Sequence[int]
    dtype: torch.dtype


class LateProcesses(Quorum):
    """A process arrives at an averaging, with all its workers, when its round is complete.

    A late process waits at the next averaging, receives the missing state from another process, and takes part. At the
    end of an epoch, before a checkpoint and at the end of the run all processes wait for each other. The quorum is
    rounded up to whole processes.
    """

    def __init__(
        self, context: SyncContext, exchange: Exchange, outer: Average, buffers: str, waiting: Lateness
    ) -> None:
        super().__init__(context, exchange, outer, buffers)
        comm, needed = self.comm, math.ceil((waiting.quorum or 1) / self.comm.local_workers)
        store, grace = context.store.under("quorum"), waiting.grace or 0.0
        self.arrivals = Arrivals(store, comm.rank, comm.processes, needed, grace, comm.timeout or TIMEOUT)
        self._parts: dict[tuple[int, ...], Comm] = {}
        self._met_at: int | None = None  # step

    @torch.no_grad()
    def average(self, steps: int, round_lr: float) -> None:
        axis, comm, info = self.axis, self.comm, self.position.info()
        for worker in comm.local:
            self.saw(worker, steps)
        who = self.arrivals.come(self.samples[comm.first_worker], round_lr, info.step, info.epoch)
        self.clock.lap("exposed")
        if not who:
            return
        ranks, source = [arrival.rank for arrival in who], next(arrival for arrival in who if arrival.current)
        share = weights([arrival.samples for arrival in who])[ranks.index(comm.rank)]
        xs_W = self._differences([share] * comm.local_workers)
        self._learn(source.rank, [arrival.rank for arrival in who if not arrival.current])
        # steps differ between processes; keys and schedules that depend on them must not
        agreed = StepInfo(info.plan, source.step, 1.0, source.epoch)
        updates = self._exchanged(xs_W, self._among(ranks), agreed)
        self.outer.step(axis.shared, updates, source.lr)
        axis.restart(axis.shared, range(comm.local_workers))
        treat_buffers(self.inner, self.buffers)
        for worker in comm.local:
            self.samples[worker] = 0
        self.averagings += 1
        self.took_part += comm.local_workers * len(who)

    @torch.no_grad()
    def land(self) -> None:
        if self._met_at == self.position.step:
            return
        self._met_at = self.position.step
        comm, arrivals = self.comm, self.arrivals
        arrivals.meet()
        mine = self.averagings, arrivals.number, self.samples[comm.first_worker]
        known, numbers, samples = zip(*comm.gather_objects(mine), strict=True)
        # a process that has waited here may have missed averagings of the others
        late = [rank for rank, its in enumerate(known) if its < max(known)]
        before = [value.clone() for value in self.axis.shared] if comm.rank in late else []
        self._learn(known.index(max(known)), late)
        self._rebase(range(comm.local_workers) if before else [], before)
        arrivals.number = max(numbers)
        self.samples = [n for n in samples for _ in range(comm.local_workers)]

    def _learn(self, source: int, late: Sequence[int]) -> None:
        """Send the missing state from one rank to late ones; all participants of the averaging count the bytes."""
        if not late:
            return
        ledger, here = self.comm.ledger, self.comm.rank
        if here == source or here in late:
            self._make_room(self.comm.told(self._room(), source, late))
        counted = [*(ledger.counts[name] for name in LEARNT), self.averagings, self.took_part]
        numbers = torch.tensor(counted, dtype=torch.int64, device=self.comm.device)
        lacked: list[Tensor] = [*self._to_be_learnt(), numbers]
        if here == source or here in late:
            self.comm.send_tensors_(lacked, source, late)
        if here in late:
            *spent, self.averagings, self.took_part = numbers.tolist()
            ledger.counts.update(zip(LEARNT, spent, strict=True))
            self.arrivals.current = True
        ledger.deliver(nbytes(lacked), len(late))

    def _room(self) -> list[Room]:
        state = self.exchange.state
        return [
            Room(*place, state[place[0]][place[1]].shape, state[place[0]][place[1]].dtype)
            for place in self._kept_in_common()
        ]

    def _make_room(self, room: Sequence[Room]) -> None:
        """Allocate exactly the tensors of compressor state that another process describes."""
        for name, key in set(self._kept_in_common()) - {(place.name, place.key) for place in room}:
            del self.exchange.state[name][key]
        for name, key, shape, dtype in room:
            own = self.exchange.state.setdefault(name, {})
            if key not in own or own[key].shape != shape:
                own[key] = torch.zeros(shape, dtype=dtype, device=self.comm.device)

    def _among(self, ranks: Sequence[int]) -> Comm:
        """Return the communicator of some processes, all of which call this now."""
        key, comm = tuple(ranks), self.comm
        if key not in self._parts:
            self._parts[key] = Members(comm, ranks) if len(ranks) < comm.processes else _alike(comm)
        return self._parts[key]


def _alike(comm: Comm) -> Comm:
    """Create a communicator of all processes with its own ledger."""
    part = Comm(comm.local_workers, comm.processes, comm.rank, str(comm.device))
    part.group, part.clock, part.timeout, part.transport = comm.group, comm.clock, comm.timeout, comm.transport
    return part
