"""AD-PSGD in simulated time: each worker averages with a random other one when its gradient is ready.

Tensor suffixes: W local workers, A all workers.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.options.option import Choice, with_options
from accordion_bench.plan import RunFacts, TensorSpec
from accordion_bench.position import Rate, StepInfo
from accordion_bench.sync.drawn_times import DrawnTimes
from accordion_bench.sync.outer import exact_average
from accordion_bench.sync.scheme import Placed, Sync, SyncContext
from accordion_bench.sync.who import PeerExchange
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.same_shape import Blocks

DRAWN_AHEAD = 1000  # number of steps that a forecast simulates


class Meetings(PeerExchange):
    """Mean of the parameters of disjoint pairs of workers (`pairs`); other workers keep their parameters."""

    def __init__(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> None:
        super().__init__(specs, comm, like)
        self.pairs: list[tuple[int, int]] = []

    @property
    def messages(self) -> int:
        return 1

    def targets(self, step: int) -> list[Any]:
        partner: list[int | None] = [None] * self.comm.workers
        for one, other in self.pairs:
            partner[one], partner[other] = other, one
        return [partner]

    def predicted_bytes(self, info: StepInfo) -> int:
        return 4 * self.numel * 2 * len(self.pairs) // self.comm.workers


@with_options
class ADPSGD(DrawnTimes):
    """When worker w's gradient is ready: x_w, x_j <- (x_w + x_j) / 2 for a random j, then x_w <- x_w - eta g_w(r_w).

    r_w is x_w after the last update of worker w; x_w may have been averaged with others since. Computing times are
    random, as in `DrawnTimes`. A step of the run processes as many gradients, in their order, as belong to disjoint
    pairs, at most `first`; the result equals that of processing one after the other. Each worker has its own optimizer.

    The mean of all x_w is evaluated; after the last step all workers average exactly. Each worker of a pair sends 4 N
    bytes to the other.

    Source: Lian et al. 2018 (arXiv 1710.06952).
    """

    description = replace(Sync.description, display_names={"adpsgd": "AD-PSGD"})
    without_averages = "whose workers meet in pairs and never have one mean of all"
    gradient_exchange = False
    waits = False
    weighs = False
    rule: str = field(init=False, default="k_async")
    budget: float | None = field(init=False, default=None)

    chosen_as = {
        "adpsgd": Choice(
            "workers with drawn computing times, each of which averages with a drawn other when it is ready (AD-PSGD, "
            "Lian et al. 2018), simulated"
        )
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.finished = False
        self.own_W: list[Tensor] = []

    def begin(self, context: SyncContext) -> None:
        super().begin(context)
        self.inner.fork()
        specs, like = self.axis.specs, self.axis.like
        self.meetings = Meetings(specs, self.comm, like)
        self.meetings.finite = self.runner.finite
        self.own_W = Blocks(specs, self.comm.local_workers, like).tensors
        for row in range(self.comm.local_workers):
            self._keep(row)

    def _keep(self, row: int) -> None:
        torch._foreach_copy_([x_W[row] for x_W in self.own_W], self.axis.values(row))

    def makes(self, run: RunFacts) -> Sequence[tuple[Exchange, int]]:
        """Return exchanges by number of pairs per step: simulated for the first steps, extrapolated to the run."""
        ahead, A = copy.copy(self), self.comm.workers
        ahead.draws, ahead.read_at, ahead.used = [0] * A, [0] * A, 0
        ahead.ready = [ahead.drawn(worker) for worker in range(A)]
        ahead.meetings = copy.copy(self.meetings)
        steps = min(run.steps, DRAWN_AHEAD)
        met: dict[int, list[tuple[int, int]]] = {}
        found = Counter[int]()
        for _ in range(steps):
            ahead.samples_used(())
            found[len(ahead.meetings.pairs)] += 1
            met[len(ahead.meetings.pairs)] = ahead.meetings.pairs
        made = []
        for pairs, times in found.items():
            meetings = copy.copy(self.meetings)
            meetings.pairs = met[pairs]
            made.append((meetings, round(times * run.steps / steps)))
        return made

    def ends_apart(self, steps: int, period: int) -> bool:
        return True

    def samples_used(self, batches: Sequence[int]) -> list[int]:
        """Select the workers of this step and their partners; all gradients have equal weights in reports."""
        A, busy = self.comm.workers, set[int]()
        self.arrived, self.meetings.pairs = [], []
        while len(self.arrived) < (self.first or A):
            worker = min(range(A), key=lambda worker: (self.ready[worker], worker))  # a worker may be ready again
            partner = self._partner(worker)
            if busy & {worker, partner}:
                break
            busy |= {worker, partner}
            self._meet(worker, partner)
        return []

    def comes(self, worker: int) -> None:
        self.arrived, self.meetings.pairs = [], []
        self._meet(worker, self._partner(worker))

    def _meet(self, worker: int, partner: int) -> None:
        self.arrived.append(worker)
        self.meetings.pairs += [(worker, partner)] if partner != worker else []
        self.staleness += self.used - self.read_at[worker]
        self.used += 1
        self.read_at[worker] = self.used
        self.now = self.ready[worker]
        self.ready[worker] += self.drawn(worker)

    def _partner(self, worker: int) -> int:
        """Return the partner of a worker, uniformly among the others; a single worker is its own partner."""
        A = self.comm.workers
        if A == 1:
            return worker
        generator = keyed_rng.generator(self.runner.seed, "partner", self.used)
        return (worker + 1 + int(torch.randint(A - 1, (), generator=generator))) % A

    def before_step(self, lr: Rate) -> None:
        self.meetings.refuse_non_finite(self.axis.gradients_W, "gradient")
        self.clock.waits(self.meetings.kind)
        torch._foreach_copy_(self.own_W, self.meetings(self.own_W, self.position.info()))
        self.clock.lap("exposed")
        here = [worker - self.comm.first_worker for worker in self.arrived if worker in self.comm.local]
        for row in here:
            torch._foreach_copy_(self.axis.values(row), [x_W[row] for x_W in self.own_W])
        self.axis.resting = set(range(self.comm.local_workers)) - set(here)

    @torch.no_grad()
    def after_step(self, lr: Rate) -> None:
        for worker in self.arrived:
            if worker in self.comm.local:
                self._keep(worker - self.comm.first_worker)
        self.axis.resting = set()
        self.clock.lap("update")

    @property
    def exchange(self) -> Exchange:
        return self.meetings

    def gradient_exchange_of_next_step(self) -> None:
        return None

    def exchanges(self) -> list[Placed]:
        return [Placed("replica", self.meetings, range(self.comm.local_workers))]

    def consensus(self) -> list[Tensor]:
        """Return the mean of all x_w."""
        if self.finished:
            return self.axis.shared
        rows = [[x_W[row] for x_W in self.own_W] for row in range(self.comm.local_workers)]
        return self.axis.mean_over_workers(rows, "eval")

    def finish(self) -> None:
        """Average exactly."""
        for row in range(self.comm.local_workers):
            torch._foreach_copy_(self.axis.values(row), [x_W[row] for x_W in self.own_W])
        exact_average(self.axis)
        self.finished = True

    def own(self, row: int) -> dict[str, Any]:
        return {"own": {spec.name: x_W[row] for spec, x_W in zip(self.axis.specs, self.own_W, strict=True)}}
