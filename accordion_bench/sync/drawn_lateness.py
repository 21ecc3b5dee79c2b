"""Late workers that are drawn, for runs whose workers are all here or in step with each other."""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from accordion_bench.comm.members import Present
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.sync.base import SyncContext
from accordion_bench.sync.buffers import treat_buffers
from accordion_bench.sync.outer import Average
from accordion_bench.sync.quorum import Quorum, nbytes, shares_of
from accordion_bench.sync.state import PER_WORKER
from accordion_bench.tensors import keyed_rng


class DrawnLateness(Quorum):
    """At every averaging each worker is late with a probability; it learns z right after it and goes on.

    Where fewer than the quorum are in time, those that come next are waited for. A draw depends on seed and averaging
    alone, so that runs in one process and in several are the same.

    Args:
        context, exchange, outer, buffers: see `Quorum`.
        quorum: workers that take part at least.
        lateness: probability in [0, 1) that a worker is late at an averaging.
        seed: of the run.
    """

    def __init__(
        self,
        context: SyncContext,
        exchange: Exchange,
        outer: Average,
        buffers: str,
        quorum: int,
        lateness: float,
        seed: int,
    ) -> None:
        super().__init__(context, exchange, outer, buffers)
        self.quorum, self.lateness, self.seed = quorum, lateness, seed

    def present(self) -> list[int]:
        """The numbers of those who take part in the coming averaging, ascending."""
        generator = keyed_rng.generator(self.seed, "late", self.averagings)
        draws = torch.rand(self.comm.workers, generator=generator, dtype=torch.float64).tolist()
        in_time = sum(draw >= self.lateness for draw in draws)
        by_arrival = sorted(range(self.comm.workers), key=lambda worker: -draws[worker])
        return sorted(by_arrival[: max(in_time, self.quorum)])

    @torch.no_grad()
    def average(self, steps: int, round_lr: float) -> None:
        axis, comm = self.axis, self.comm
        self.samples = [n + steps * self.position.plan.batch_size for n in self.samples]
        present = self.present()
        shares = dict(zip(present, shares_of([self.samples[worker] for worker in present]), strict=True))
        part = Present(comm, present)
        xs_W = self._differences([shares.get(worker, 0.0) for worker in comm.local])
        with self._left_alone(part.absent):
            updates = self._exchanged(xs_W, part, self.position.info())
        before = [value.clone() for value in axis.shared] if part.absent else []
        self.outer.step(axis.shared, updates, round_lr)
        here = [row for row in range(comm.local_workers) if row not in part.absent]
        for row in here:
            axis.restart(axis.shared, range(row, row + 1))
        self._rebase(part.absent, before)
        treat_buffers(self.inner, self.buffers, here)
        comm.ledger.deliver(nbytes(self._to_be_learnt()), comm.workers - len(present))
        for worker in present:
            self.samples[worker] = 0
        self.averagings += 1
        self.took_part += len(present)

    @contextlib.contextmanager
    def _left_alone(self, rows: Sequence[int]) -> Iterator[None]:
        """The residuals of absent workers are zero inside, and as they were afterwards."""
        absent, state = list(rows), self.exchange.state
        places = [(name, key) for name, own in state.items() for key in own if key.endswith(PER_WORKER) and absent]
        kept = [state[name][key][absent] for name, key in places]
        for name, key in places:
            state[name][key][absent] = 0
        yield
        for (name, key), value_W in zip(places, kept, strict=True):
            state[name][key][absent] = value_W
