"""Averagings of the processes that have arrived in time, without waiting for late ones."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.batches import weights
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.members import Members
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.position import StepInfo
from accordion_bench.sync.arrivals import Arrivals
from accordion_bench.sync.outer import Average, treat_buffers
from accordion_bench.sync.quorum import Lateness, Quorum, nbytes
from accordion_bench.sync.scheme import SyncContext

TIMEOUT = 600.0  # default, seconds
LEARNT = (
    "payload",
    "wire",
    "rounds",
    "saved",
    "coded",
    "paper_floats",
    "uncounted",
)  # counts of a ledger that averagings change


class Room(NamedTuple):
    """Description of a tensor of a compressor's state: name of its parameter, key, shape, dtype."""

    name: str
    key: str
    shape: Sequence[int]
    dtype: torch.dtype


class LateProcesses(Quorum):
    """A process arrives at an averaging, with all its workers, when its round is complete.

    A late process waits at the next averaging, receives the missing state from another process, and takes part. At the
    end of an epoch, before a checkpoint and at the end of the run all processes wait for each other.

    Args:
        context, exchange, outer, buffers: see `Quorum`.
        waiting: quorum, rounded up to whole processes, and grace period.
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
        """Send the missing state from one process to late ones; all participants of the averaging count the bytes.

        Args:
            source: rank of the sender.
            late: ranks of the late processes.
        """
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
        """Describe the compressor state that is equal on all workers; some exists only after the first exchange."""
        state = self.exchange.state
        return [
            Room(*place, state[place[0]][place[1]].shape, state[place[0]][place[1]].dtype)
            for place in self._kept_in_common()
        ]

    def _make_room(self, room: Sequence[Room]) -> None:
        """Allocate exactly the tensors that another process describes."""
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
