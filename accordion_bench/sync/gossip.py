"""Gossip: workers average parameters with neighbours in a graph; AD-PSGD: with a random other worker, in modelled time.

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
from accordion_bench.comm.on_device import copy_on_cpu
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange, ExchangeRunner
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import RunFacts, TensorSpec
from accordion_bench.position import Rate, StepInfo
from accordion_bench.sync.drawn_times import DrawnTimes
from accordion_bench.sync.outer import exact_average
from accordion_bench.sync.round import Round
from accordion_bench.sync.scheme import LEFT, Placed, Sync, SyncContext
from accordion_bench.sync.when import When
from accordion_bench.sync.who import Pairs, PeerExchange
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.same_shape import Blocks

GRAPHS = ("exponential", "ring", "complete")


def shifts(graph: str, workers: int, turn: int) -> list[int]:
    """Return the shifts of round `turn` in one of `GRAPHS`: worker w sends to w + shift modulo A, for each shift."""
    if graph == "exponential":
        return [2 ** (turn % (workers - 1).bit_length())] if workers > 1 else []
    return sorted({1, workers - 1} - {0, workers}) if graph == "ring" else list(range(1, workers))


class GraphNeighbours(PeerExchange):
    """Exchange of parameters with the neighbours in a graph, one of `GRAPHS`."""

    def __init__(self, graph: str, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> None:
        super().__init__(specs, comm, like)
        self.graph = graph

    @property
    def messages(self) -> int:
        return len(shifts(self.graph, self.comm.workers, 0))

    def targets(self, step: int) -> list[list[int]]:
        A = self.comm.workers
        return [[(worker + shift) % A for worker in range(A)] for shift in shifts(self.graph, A, self.turn)]


class Peers(Pairs):
    """Workers exchange parameters with their neighbours, and add them after the next step if `late`; there is no z."""

    anchored = False

    def __init__(self, graph: str, late: bool) -> None:
        super().__init__()
        self.graph, self.late = graph, late

    def new_exchange(
        self, runner: ExchangeRunner, comm: Comm, parts: Sequence[Sequence[int]] | None
    ) -> GraphNeighbours:
        neighbours = GraphNeighbours(self.graph, runner.axis.specs, comm, runner.axis.like)
        neighbours.finite, neighbours.with_own = runner.finite, not self.late
        return neighbours

    def consensus(self) -> list[Tensor]:
        return self.axis.mean_replica("eval")

    def own(self, row: int) -> dict[str, Any]:
        return {}


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Round.description.idle(cls, options, context)
    if context.workers <= 2:
        yield "graph", "a lone worker has no neighbours" if context.workers == 1 else "two workers are neighbours"


def _label_suffix(options: Config) -> str:
    graph = options.get("graph")
    return f", {graph}" if graph in GRAPHS[1:] else ""


@with_options
class Gossip(Round):
    """After every H steps x_w <- p (x_w + sum_j x_j), over the n neighbours j that send to w; p = 1 / (n + 1).

    With `delay=1` a worker keeps p x_w and continues; it adds the messages of its neighbours after the next step. A
    part of the parameters is then in flight, and gradients are computed at z (stochastic gradient push):

        x_w <- p x_w,  u <- p u;   a step later  x_w <- x_w + p sum_j x_j,  u <- u + p n u_sent;   z_w = x_w / u

    Without a delay u is 1. It is equal on all workers, because they have equally many neighbours. Gossip preserves the
    mean of all x_w, including messages in flight. The mean of z_w is evaluated; after the last step all workers average
    exactly.

    With `elastic=True`, which needs `delay=0`, the graph connects the current members. All members vote after each
    round. If a worker was lost, the A' survivors repeat the round in their own graph, from their own x_w. Every
    push-sum weight stays 1, so the weights sum to A', by which the mean divides. A worker that enters receives the
    parameters of the first member and weight 1; the mean of all x_w changes by that.

    `exponential` has one neighbour per round, at distance 2^k, with k = 0, 1, ... in turn (SGP); `ring` the previous
    and the next worker (D-PSGD); `complete` all others. More neighbours mean more bytes and a smaller distance between
    workers.

    Source: Assran et al. 2019 (arXiv 1811.10792); Lian et al. 2017 (arXiv 1705.09056).
    """

    graph: str = option(
        "exponential (one neighbour, by turns), ring (two), complete (all)", default="exponential", choices=GRAPHS
    )
    period: int = option("steps between two rounds; longer = fewer bytes", default=1, at_least=1)
    delay: int = option("1 = messages travel beside the next step", default=0, at_least=0, at_most=1)
    elastic: bool = option(
        "whether workers may be lost and others may enter after a round; needs comm=gloo", default=False
    )
    min_workers: int | None = option(LEFT, default=None, at_least=1, instead=2)

    chosen_as = {
        "gossip": Choice(
            "workers mix with neighbours in a graph after every step (SGP, Assran et al. 2019; D-PSGD, Lian et al. "
            "2017)"
        )
    }

    description = replace(
        Round.description, display_names={"gossip": "gossip SGD"}, idle=_idle, label_suffix=_label_suffix
    )

    keeps = ("forked", "since", "count", "round_lr", "period", "u", "under_way")
    without_averages = "whose workers mix with neighbours and never have one mean of all"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.late = self.delay > 0
        super().__init__(When(self.period, delay=self.delay), Peers(self.graph, self.late))
        self.u, self.under_way = 1.0, 0.0  # weights kept and in flight, which sum to 1
        self.distance: float | None = None
        self._loaded: list[Tensor] = []  # parameters of the worker whose state was loaded

    def check(self, run: RunFacts, workers_per_process: int) -> None:
        super().check(run, workers_per_process)
        if self.elastic and self.late:
            rule = (
                "0 where workers may join and leave (sync.elastic), because a lost worker's messages would be in flight"
            )
            raise ValueRefused("sync.delay", rule, self.delay, 0)

    def at_the_start(self) -> list[Tensor]:
        return []

    def restart(self) -> None:
        """Each local worker takes the parameters of the worker whose state was loaded."""
        self.axis.restart(self._loaded, range(len(self.axis.replicas)))

    @torch.no_grad()
    def before_step(self, lr: Rate) -> CompletedExchange | None:
        completed = super().before_step(lr)
        for row in range(len(self.axis.replicas) if self.late else 0):
            torch._foreach_mul_(self.axis.values(row), self.u)
        return completed

    @torch.no_grad()
    def after_local_step(self) -> None:
        super().after_local_step()
        for row in range(len(self.axis.replicas) if self.late else 0):
            torch._foreach_div_(self.axis.values(row), self.u)

    @torch.no_grad()
    def average(self, tier: int) -> None:
        self.neighbours.turn = self.count // (self.period or 1) - 1
        super().average(tier)
        if self.late:
            p = self.neighbours.weight
            for row in range(len(self.axis.replicas)):
                torch._foreach_mul_(self.axis.values(row), p)
            self.u, self.under_way = p * self.u, (1 - p) * self.u

    @torch.no_grad()
    def use(self) -> None:
        """Set the workers to the averages, or with a delay add the received part to the part that they kept."""
        mixed_W, take = self.in_flight.take(), torch._foreach_add_ if self.late else torch._foreach_copy_
        for row in range(len(self.axis.replicas)):
            take(self.axis.values(row), [x_W[row] for x_W in mixed_W])
        self.u, self.under_way = self.u + self.under_way, 0.0

    @property
    def neighbours(self) -> GraphNeighbours:
        """Exchange of all workers."""
        exchange = self.exchange
        assert isinstance(exchange, GraphNeighbours)
        return exchange

    def consensus(self) -> list[Tensor]:
        """Return the mean of z_w, and measure the distance of the workers from it."""
        mean = super().consensus()
        if self.forked and self.apart:
            rows = [self.axis.values(row) for row in range(len(self.axis.replicas))]
            squares = [(x - m).double().square().sum() for own in rows for x, m in zip(own, mean, strict=True)]
            total = self.comm.sum_(torch.stack(squares).sum(), "eval")
            self.distance = (float(total) / self.comm.workers) ** 0.5
        return mean

    def finish(self) -> None:
        """Measure the distance, then average exactly."""
        self.land()
        self.comm.membership.together(self.consensus)
        super().finish()

    def columns(self) -> dict[str, Any]:
        """Return for metrics rows the root mean square of |z_w - mean z| over the workers, before the exact average."""
        return {"consensus_distance": self.distance, **super().columns()}

    def own(self, row: int) -> dict[str, Any]:
        received = [x_W[row] for x_W in self.in_flight.updates]
        return {"received": self.who.named(received)} if received else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `Round`; in elastic runs also the parameters of the first local worker."""
        peer = {"peer": [copy_on_cpu(x) for x in self.axis.values(0)]} if self.elastic and self.forked else {}
        return {**super().state_dict(), **peer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._loaded = [x.to(self.comm.device) for x in state.get("peer", [])]
        if self.under_way:
            kept_W = [x.expand(self.comm.local_workers, *x.shape) for x in self.axis.shared]
            self.in_flight.updates = [torch.zeros_like(x_W, memory_format=torch.contiguous_format) for x_W in kept_W]


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
