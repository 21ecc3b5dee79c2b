"""Elastic membership: processes may be lost and others may enter, while the run continues.

Processes form generations, one after another. A generation is a list of members in a store that outlives them, and a
process group of these members.

A collective operation, such as an averaging, is valid once all members have voted in the store that they completed it.
If one fails because a member was lost, all members undo it, the survivors form the next generation and repeat it. So no
member continues with an average that another one lacks. A waiting process enters between two rounds: it becomes a
member of a new generation, whose first member sends it the state of the run over the network.

The first generation is formed in the same way: its first process has the state, and sends it to the others.
"""

import contextlib
import io
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.generations import Generation, Register, Terms, pauses
from accordion_bench.comm.ledger import Ledger
from accordion_bench.comm.members import communication_error_text
from accordion_bench.comm.membership import LeftBehind, Membership, Owner, TooFewLeft, Undo, nothing
from accordion_bench.comm.sealed_store import SealedStore
from accordion_bench.options.units import counted

GRACE = 1.0  # seconds after the timeout in which a late member may still arrive

T = TypeVar("T")


class ElasticMembership(Membership):
    """Set of processes that may be lost at any time; others may enter between two rounds.

    Args:
        store: store that outlives the processes.
        comm: communicator of this process, not connected yet; its rank and number of processes are set here.
        terms: conditions for forming generations.

    Attributes:
        number: number of the current generation.
        joined, lost: number of processes so far that entered after the first generation, and that were lost.
        joining_bytes: bytes of state that were sent to entering processes.
        stood: seconds that forming the last generation took.
    """

    elastic = True

    def __init__(self, store: SealedStore, comm: Comm, terms: Terms) -> None:
        self.comm, self.terms, self.register = comm, terms, Register(store, terms)
        self.number, self.stood = 0, 0.0
        self.joined = self.lost = self.joining_bytes = 0
        self._now = self._newest = Generation([])  # of this process; the newest known one
        self._knows = False
        self._turn = self._waiting = self._at_the_door = 0
        self._since = time.monotonic()  # start of the current wait of members for each other
        comm.connected, comm.membership = False, self

    def enter(self, owner: Owner) -> None:
        """Wait until the members admit this process, and restore the state of the run, which `owner` has.

        Raises:
            LeftBehind: the run has other options or has ended, or too few processes arrived.
        """
        self.owner = owner
        with self._store_told():
            if differs := self.register.register_arrival():
                raise LeftBehind(f"{differs}; start it alike")
            self._settle(self._let_in())

    def leave(self, over: bool = True) -> None:
        if self._knows and over:
            with contextlib.suppress(RuntimeError):
                self.register.end()
        self.register.beats.stop()
        _leave_group()

    # ---- collective operations

    def together(self, do: Callable[[], T], undo: Undo = nothing) -> T:
        return self._until_done(lambda: do, undo, Ledger.fields, self.comm.ledger.noted())

    def repeated(
        self, begin: Callable[[], Callable[[], T]], again: Callable[[], T], keep: Callable[[], Undo]
    ) -> Callable[[], T]:
        undo, spent = keep(), self.comm.ledger.noted()  # before a thread may change them
        ways = iter([begin()])

        def wait() -> T:
            found = self._until_done(lambda: next(ways, again), undo, Ledger.exchanged, spent)
            self._waiting = self._at_the_door
            self.owner.averaged()
            return found

        return wait

    def _until_done(self, way: Callable[[], Callable[[], T]], undo: Undo, counts: Sequence[str], spent: Any) -> T:
        """Repeat an operation until all members have completed it in the same attempt; return its result.

        `way` returns the function to call in this attempt. `counts` are the ledger's counters that it changes, `spent`
        their values before.
        """
        while True:
            self._since = time.monotonic()
            done: list[T] = []
            try:
                done.append(way()())
            except RuntimeError as error:
                if not communication_error_text(error):
                    raise
                self._release(error)
            with self._store_told():
                if self._all_have_done(bool(done)):
                    return done[0]
                self.comm.ledger.put_back(spent, counts)
                undo()
                self._settle(self._next())
                spent = self.comm.ledger.noted()

    def _release(self, error: BaseException | None) -> None:
        """Drop all references of an error and of a thread to the process group, which closes with the last one."""
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        if self.comm.transport is not None:
            self.comm.transport.reset_after_failure()

    def _all_have_done(self, done: bool) -> bool:
        """Vote, and return whether every member completed the operation; all members get the same result."""
        self._turn += 1
        said = self.register.done(f"{self.number}-{self._turn}", self._now.ids, done, self.terms.timeout)
        self._at_the_door = max(said, 0)
        return said >= 0

    def border(self) -> None:
        waiting, self._waiting, self._since = self._waiting, 0, time.monotonic()
        if waiting > self._now.arrivals:
            with self._store_told():
                self._settle(self._next(waiting))

    @property
    def changed(self) -> bool:  # type: ignore[override]
        return self.joined > 0 or self.lost > 0

    def columns(self) -> dict[str, Any]:
        counts = zip(("joined", "lost", "joining_bytes"), self._counts(), strict=True)
        return {"members": self.comm.workers, **dict(counts)}

    # ---- generations

    def _settle(self, generation: Generation) -> None:
        """Become a member of a generation, or of a later one, in which all members have the state of the run."""
        began = time.monotonic()
        while not self._settled(generation):
            generation = self._next()
        self._knows = True
        self.stood = time.monotonic() - began

    def _settled(self, generation: Generation) -> bool:
        """Connect to a generation; return whether all its members are connected and have the state of the run."""
        self.number, self._turn, self._newest = self.number + 1, 0, generation
        ids, before, me = generation.ids, self._now, self.register.me
        self._refuse_leaving(generation)
        if not self._connected(ids):
            return False
        lost = [rank for rank, member in enumerate(before.ids) if member not in ids]
        new = [rank for rank, (_, knows) in enumerate(generation.members) if not knows]
        self._now = generation
        self._knows = generation.members[ids.index(me)][1]
        self.comm.resize(len(ids), ids.index(me))
        self.lost += len(lost)
        self.owner.resized(lost, len(before.members))
        return not new or self._handed_over(new)

    def _refuse_leaving(self, generation: Generation) -> None:
        if self.register.me not in generation.ids:
            raise LeftBehind(
                "this worker must be in time, got one that the others went on without after "
                f"{self.terms.timeout:g} s or longer; start it again, and it enters after a round"
            )
        if len(generation.members) < self.terms.least:
            raise TooFewLeft(
                f"at least min_workers must be left, got {counted(len(generation.members), 'process')} of "
                f"{self.terms.least}; go on from a checkpoint, or begin with a smaller min_workers"
            )
        if not any(knows for _, knows in generation.members):
            raise TooFewLeft("a worker must be left that knows the state of the run, got newcomers alone; begin anew")

    def _connected(self, ids: Sequence[str]) -> bool:
        """Create the process group of the members; return whether all of them connected."""
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(str(self.number), self.register.store.of_torch()),
                rank=ids.index(self.register.me),
                world_size=len(ids),
                timeout=timedelta(seconds=self.terms.timeout),
            )
        except RuntimeError as error:
            if not communication_error_text(error):
                raise
            return False
        return True

    def _handed_over(self, new: Sequence[int]) -> bool:
        """Send the state of the run from the first member to new ranks; return whether all of them have it."""
        done, packed = False, torch.empty(0, dtype=torch.uint8)
        if not new or self.comm.rank == 0:
            packed = _packed({"shared": self.owner.shared_state(), "counts": self._counts()})
        size = torch.tensor([len(packed)])
        try:
            dist.broadcast(size, 0)
            if self.comm.rank == 0:
                for rank in new:
                    dist.send(packed, rank)
            elif self.comm.rank in new:
                packed = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(packed, 0)
                state = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
                self.owner.take_over(state["shared"])
                self.joined, self.lost, self.joining_bytes = state["counts"]
            done = True
        except RuntimeError as error:
            if not communication_error_text(error):
                raise
        if not self._all_have_done(done):
            return False
        if not self._now.founding:
            self.joined += len(new)
            self.joining_bytes += int(size) * len(new)
        self.comm.ledger.charge("setup", int(size))
        return True

    def _counts(self) -> list[int]:
        return [self.joined, self.lost, self.joining_bytes]

    # ---- forming the next generation

    def _next(self, arrivals: int = 0) -> Generation:
        """Form the generation after the newest one, of its members that are alive and of waiting processes.

        Args:
            arrivals: number of arrivals, in their order, that may enter; 0 = none beyond those of the newest one.
        """
        _leave_group()
        register, number, newest = self.register, self.number + 1, self._newest
        taken = max(arrivals, newest.arrivals)
        wanted = [*newest.ids, *register.arrived(range(newest.arrivals + 1, taken + 1))]
        register.come(number, self._knows)
        until, waits = max(self._since + self.terms.timeout, time.monotonic()) + GRACE, pauses()
        while (found := register.generation(number)) is None:
            here = register.here(number)
            missing = [member for member in wanted if member not in here]
            if time.monotonic() > until or not set(missing) - set(register.beats.silent(missing)):
                members = [(member, here[member]) for member in wanted if member in here]
                members.sort(key=lambda member: not member[1])
                return register.proposed(number, Generation(members, taken))
            next(waits)
        return found

    def _let_in(self) -> Generation:
        """Wait for the first generation of which this process is a member, and return it."""
        register, until, waits, came = self.register, time.monotonic() + self.terms.timeout, pauses(), 0
        while True:
            while (found := register.generation(self.number + 1)) is not None:
                if register.me in found.ids:
                    return found
                self.number, self._newest = self.number + 1, found
            if register.over:
                raise LeftBehind("a run must go on for a worker to enter, got one that is over; begin another one")
            number, old = self.number + 1, self._newest.ids
            founding = len(register.beats.silent(old)) == len(old)
            if founding and not self.terms.may_found:
                raise LeftBehind("a worker must be left for another one to enter, got none; begin the run again")
            if came < number and (founding or register.forming(number)):
                register.come(number, knows=False)
                came = number
            if founding:
                self._found(number, time.monotonic() > until)
            next(waits)

    def _found(self, number: int, late: bool) -> None:
        """Propose a first generation if enough processes have arrived.

        Args:
            number: number of the generation.
            late: whether the timeout is over, so that missing processes are not waited for.
        """
        came, terms = self.register.here(number), self.terms
        here = sorted(came.keys() - self.register.beats.silent(list(came)))
        if len(here) >= terms.expected or (late and len(here) >= terms.least):
            members = [(member, first == 0) for first, member in enumerate(here)]
            self.register.proposed(number, Generation(members, self.register.arrivals(), founding=True))
        elif late:
            raise TooFewLeft(
                f"{counted(terms.least, 'process')} must come for a run to begin, got {len(here)} within "
                f"{terms.timeout:g} s; start the others, or wait longer"
            )

    @contextlib.contextmanager
    def _store_told(self) -> Iterator[None]:
        """Context of operations on the store: raise LeftBehind with one sentence if the store is lost."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, LeftBehind) or not communication_error_text(error):
                raise
            first = " ".join(str(error).split())[:200]
            raise LeftBehind(
                f"the store of the run must outlive its workers, got one whose host is gone ({first}); host it in a "
                "process that stays, as torchrun and the own launcher do"
            ) from None


def _packed(state: Any) -> Tensor:
    """Serialise tensors, numbers and containers as a tensor of bytes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def _leave_group() -> None:
    """Destroy the process group; members that still wait in it for this process get an error."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
