"""Averagings that go on without late workers, and what late workers keep.

    P   workers that take part in an averaging      n_w   samples of worker w since it last took part
    D = sum_P n_w (z_w - x_w) / sum_P n_w;   z <- outer(z, D);   x_w <- z, n_w <- 0 for w in P
    a late worker, when it learns z:         x_w <- x_w + z - z_w,  with z_w the last z that it knew

The difference z_w - x_w of a late worker stays what it is until it takes part: no step is lost.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.position import StepInfo
from accordion_bench.sync.base import SyncContext
from accordion_bench.sync.outer import Average
from accordion_bench.sync.state import PER_WORKER


def refuse_quorum(quorum: Any, grace: Any, lateness: Any, buffers: str, groups: Any, sparta: Any) -> None:
    """Refuse options that do not go together, whatever the run.

    Args:
        quorum, grace, lateness, buffers, groups, sparta: as `LocalSGD` has them.

    Raises:
        ValueRefused: for the first one.
    """
    if quorum is not None:
        checks.integer("quorum", quorum, at_least=1, instead=2)
    if grace is not None:
        checks.number("grace", grace, at_least=0, instead=1.0)
    if lateness is not None:
        checks.number("lateness", lateness, at_least=0, below=1, instead=0.1)
    if groups is not None and quorum is not None:
        raise ValueRefused("quorum", "null where groups say who averages", quorum, None)
    if sparta is not None and quorum is not None:
        rule = "null with a quorum, because all workers average a share of their parameters in every step"
        raise ValueRefused("sparta", rule, sparta, None)
    if buffers == "average" and quorum is not None:
        rule = "keep or reset with a quorum, because buffers are averaged by all workers"
        raise ValueRefused("buffers", rule, buffers, "keep")


def refuse_in_run(quorum: int, lateness: float | None, workers: int, workers_per_process: int) -> None:
    """Refuse a quorum that a run cannot have.

    Args:
        quorum, lateness: as `LocalSGD` has them.
        workers: A.
        workers_per_process: W.

    Raises:
        ValueRefused: more workers than there are, or workers of one process, of which none can be late.
    """
    if quorum > workers:
        raise ValueRefused("sync.quorum", f"at most {workers}, the number of workers", quorum, workers)
    if quorum < workers == workers_per_process and lateness is None:
        rule = "a probability where one process has all workers, which come together"
        raise ValueRefused("sync.lateness", rule, None, 0.1)


class Quorum:
    """Takes the averagings of a local method, among those who have come; the kinds of lateness are subclasses.

    Args:
        context: of the scheme.
        exchange: of differences, of all workers.
        outer: the outer optimizer.
        buffers: what becomes of the inner optimizers' buffers of those who take part: `keep` or `reset`.

    Attributes:
        samples: n_w of every worker; a process may not know of the others' until all have met.
        averagings: how many there have been.
        took_part: workers in all of them.
    """

    def __init__(self, context: SyncContext, exchange: Exchange, outer: Average, buffers: str) -> None:
        self.axis, self.position, self.inner = context.axis, context.position, context.inner
        self.comm, self.clock = context.axis.comm, context.axis.comm.clock
        self.exchange, self.outer, self.buffers = exchange, outer, buffers
        self.samples = [0] * self.comm.workers
        self.averagings = self.took_part = 0

    def average(self, steps: int, round_lr: float) -> None:
        """A round is over here: average with those who have come, or let them.

        Args:
            steps: of the round.
            round_lr: the inner learning rate at its start.
        """
        raise NotImplementedError

    def land(self) -> None:
        """Wait for everybody, so that all know the same."""

    @property
    def pending(self) -> bool:
        """Whether differences wait for an averaging, of workers that were late for the last one."""
        return any(self.samples)

    def settled(self) -> None:
        """All differences have been averaged."""
        self.samples = [0] * self.comm.workers

    def columns(self) -> dict[str, Any]:
        """For metrics rows: averagings so far, and how many workers have taken part in one, on average."""
        mean = self.took_part / self.averagings if self.averagings else None
        return {"averagings": self.averagings, "took_part": mean}

    # ---- parts of an averaging

    def _differences(self, shares: Sequence[float]) -> list[Tensor]:
        """share_w (z_w - x_w) of the local workers, [W, ...], in the storage of their gradients."""
        xs_W = self.axis.differences(self.axis.shared, range(self.comm.local_workers))
        for row, share in enumerate(shares):
            if share != 1:
                torch._foreach_mul_([x_W[row] for x_W in xs_W], share)
        return xs_W

    def _exchanged(self, xs_W: Sequence[Tensor], part: Comm, info: StepInfo) -> list[Tensor]:
        """Their mean over the workers of `part`, as the compressor makes it."""
        self.clock.lap("update")
        self.clock.waits(self.exchange.kind)
        with self.exchange.among(part):
            updates = self.exchange(xs_W, info)
        self.comm.ledger.add(part.ledger)
        self.clock.lap("exposed")
        return updates

    def _rebase(self, rows: Sequence[int], before: Sequence[Tensor]) -> None:
        """x_w <- x_w + z - z_w for some local workers.

        Args:
            rows: which.
            before: z_w.
        """
        if rows:
            moved = torch._foreach_sub(self.axis.shared, list(before))
            for row in rows:
                torch._foreach_add_(self.axis.values(row), moved)

    def _to_be_learnt(self) -> list[Tensor]:
        """What a late worker lacks: z, the outer optimizer's buffers, what the compressor keeps for all workers."""
        common = [self.exchange.state[name][key] for name, key in self._kept_in_common()]
        return [*self.axis.shared, *self.outer.buffers(self.axis.shared), *common]

    def _kept_in_common(self) -> list[tuple[str, str]]:
        """Names and keys of what the compressor keeps for all workers."""
        state = self.exchange.state
        return sorted((name, key) for name, own in state.items() for key in own if not key.endswith(PER_WORKER))

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What all workers have in common, when they have met."""
        return {"samples": list(self.samples), "averagings": self.averagings, "took_part": self.took_part}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.samples = list(state["samples"])
        self.averagings, self.took_part = state["averagings"], state["took_part"]


def shares_of(samples: Sequence[int]) -> list[float]:
    """n_w |P| / sum_P n_w of those who take part: 1 where all have seen as many samples, and 1 on average."""
    total = sum(samples)
    return [len(samples) * n / total for n in samples]


def nbytes(xs: Sequence[Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(x.numel() * x.element_size() for x in xs)
