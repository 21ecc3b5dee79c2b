"""Averagings with a quorum, which do not wait for late workers.

    P   workers that take part in an averaging      n_w   samples of worker w since it last took part
    D = sum_P n_w (z_w - x_w) / sum_P n_w;   z <- outer(z, D);   x_w <- z, n_w <- 0 for w in P
    a late worker, when it learns z:         x_w <- x_w + z - z_w,  with z_w the last z that it knew

The difference z_w - x_w of a late worker is kept until it takes part, so that no step is lost.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accordion_bench.batches import weights
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.members import Present
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.position import StepInfo
from accordion_bench.sync.outer import Average, treat_buffers
from accordion_bench.sync.scheme import PER_WORKER, Stateful, SyncContext
from accordion_bench.tensors import keyed_rng


class Lateness(NamedTuple):
    """Rule for which workers an averaging waits.

    quorum: number of workers, 1 to A, that an averaging needs; None = all.
    grace: seconds to wait for the others once the quorum is complete; None = 0.
    lateness: probability in [0, 1) that a worker is late, drawn at random; None = lateness is real.
    """

    quorum: int | None = None
    grace: float | None = None
    lateness: float | None = None

    def leaves_out(self, workers: int) -> bool:
        """Return whether averagings may leave out some of `workers` workers."""
        return self.quorum is not None and self.quorum < workers

    def refuse_in_run(self, workers: int, workers_per_process: int) -> None:
        """Refuse a quorum above the number of workers, or of workers of one process, none of which can be late."""
        if self.quorum is not None and self.quorum > workers:
            raise ValueRefused("sync.quorum", f"at most {workers}, the number of workers", self.quorum, workers)
        if self.leaves_out(workers) and workers == workers_per_process and self.lateness is None:
            rule = "a probability where one process has all workers, which come together"
            raise ValueRefused("sync.lateness", rule, None, 0.1)

    def refuse_unheard(self, context: SyncContext) -> None:
        """Refuse processes without a store for their arrivals."""
        comm = context.axis.comm
        if not self.leaves_out(comm.workers) or self.lateness is not None:
            return
        if context.store is None or comm.device.type != "cpu":
            raise ConfigError(
                f"sync.quorum needs a run over comm=gloo on CPUs, where processes can be late, got {self.quorum} "
                "elsewhere",
                {"sync.lateness": 0.1},  # drawn lateness
                {"sync.quorum": None},
            )


class Quorum(Stateful):
    """Averagings of a local method among the workers that have arrived; subclasses define lateness.

    Args:
        context: context of the scheme.
        exchange: exchange of differences, of all workers.
        outer: outer optimizer.
        buffers: treatment of the inner optimizers' buffers of workers that take part: `keep` or `reset`.

    Attributes:
        samples: n_w of every worker; those of other processes may be outdated until all have met.
        averagings: number of averagings so far.
        took_part: sum over the averagings of the workers that took part.
    """

    keeps = ("samples", "averagings", "took_part")

    def __init__(self, context: SyncContext, exchange: Exchange, outer: Average, buffers: str) -> None:
        self.axis, self.position, self.inner = context.axis, context.position, context.inner
        self.comm, self.clock = context.axis.comm, context.axis.comm.clock
        self.exchange, self.outer, self.buffers = exchange, outer, buffers
        self.samples = [0] * self.comm.workers
        self.averagings = self.took_part = 0

    def average(self, steps: int, round_lr: float) -> None:
        """Average at the end of a local round of some steps; `round_lr` is the inner learning rate at its start."""
        raise NotImplementedError

    def land(self) -> None:
        """Wait for all processes and make their state equal."""

    @property
    def pending(self) -> bool:
        """Whether differences of late workers are not averaged yet."""
        return any(self.samples)

    def saw(self, worker: int, steps: int) -> None:
        """Add the samples of `steps` batches of a worker."""
        batches = self.comm.samples
        self.samples[worker] += steps * (batches[worker] if batches else self.position.plan.batch_size)

    def settled(self) -> None:
        """Note that all differences have been averaged."""
        self.samples = [0] * self.comm.workers

    def columns(self) -> dict[str, Any]:
        """Return for metrics rows the number of averagings and the mean number of workers that took part."""
        mean = self.took_part / self.averagings if self.averagings else None
        return {"averagings": self.averagings, "took_part": mean}

    def _differences(self, shares: Sequence[float]) -> list[Tensor]:
        """Return share_w (z_w - x_w) of the local workers, [W, ...], in the storage of their gradients."""
        xs_W = self.axis.differences(self.axis.shared, range(self.comm.local_workers))
        for row, share in enumerate(shares):
            if share != 1:
                torch._foreach_mul_([x_W[row] for x_W in xs_W], share)
        return xs_W

    def _exchanged(self, xs_W: Sequence[Tensor], part: Comm, info: StepInfo) -> list[Tensor]:
        """Exchange the differences with the compressor among the workers of `part`; return their mean."""
        self.clock.lap("update")
        self.clock.waits(self.exchange.kind)
        with self.exchange.among(part):
            updates = self.exchange(xs_W, info)
        self.comm.ledger.add(part.ledger)
        self.clock.lap("exposed")
        return updates

    def _rebase(self, rows: Sequence[int], before: Sequence[Tensor]) -> None:
        """x_w <- x_w + z - z_w for the rows of some local workers, with z_w `before`."""
        if rows:
            moved = torch._foreach_sub(self.axis.shared, list(before))
            for row in rows:
                torch._foreach_add_(self.axis.values(row), moved)

    def _to_be_learnt(self) -> list[Tensor]:
        """Return the tensors that a late worker lacks: z, the outer optimizer's buffers, common compressor state."""
        common = [self.exchange.state[name][key] for name, key in self._kept_in_common()]
        return [*self.axis.shared, *self.outer.buffers(self.axis.shared), *common]

    def _kept_in_common(self) -> list[tuple[str, str]]:
        """Return names and keys of the compressor state that is equal on all workers."""
        state = self.exchange.state
        return sorted((name, key) for name, own in state.items() for key in own if not key.endswith(PER_WORKER))


class DrawnLateness(Quorum):
    """Each worker is late at each averaging with a given probability; it receives z directly after the averaging.

    If fewer workers than the quorum are in time, the next ones are included. A draw depends only on the seed and the
    number of the averaging, so that results do not depend on the number of processes.
    """

    def __init__(
        self, context: SyncContext, exchange: Exchange, outer: Average, buffers: str, waiting: Lateness
    ) -> None:
        super().__init__(context, exchange, outer, buffers)
        self.quorum, self.lateness, self.seed = waiting.quorum or 1, waiting.lateness or 0.0, context.runner.seed

    def present(self) -> list[int]:
        """Return the numbers of the workers that take part in the next averaging, ascending."""
        generator = keyed_rng.generator(self.seed, "late", self.averagings)
        draws = torch.rand(self.comm.workers, generator=generator, dtype=torch.float64).tolist()
        in_time = sum(draw >= self.lateness for draw in draws)
        by_arrival = sorted(range(self.comm.workers), key=lambda worker: -draws[worker])
        return sorted(by_arrival[: max(in_time, self.quorum)])

    @torch.no_grad()
    def average(self, steps: int, round_lr: float) -> None:
        axis, comm = self.axis, self.comm
        for worker in range(comm.workers):
            self.saw(worker, steps)
        present = self.present()
        shares = dict(zip(present, weights([self.samples[worker] for worker in present]), strict=True))
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
        """Context in which residuals of absent workers are zero; they are restored afterwards."""
        absent, state = list(rows), self.exchange.state
        places = [(name, key) for name, own in state.items() for key in own if key.endswith(PER_WORKER) and absent]
        kept = [state[name][key][absent] for name, key in places]
        for name, key in places:
            state[name][key][absent] = 0
        try:
            yield
        finally:
            for (name, key), value_W in zip(places, kept, strict=True):
                state[name][key][absent] = value_W


def nbytes(xs: Sequence[Tensor]) -> int:
    """Return the number of bytes of tensors."""
    return sum(x.numel() * x.element_size() for x in xs)
