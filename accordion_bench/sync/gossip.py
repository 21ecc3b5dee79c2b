"""Gossip: workers mix their parameters with those of neighbours in a graph; no collective of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.base import Context
from accordion_bench.compressors.none import Dense
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange, ExchangeRunner
from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import Ladder, TensorSpec
from accordion_bench.position import Rate, StepInfo
from accordion_bench.sync.outer import Average
from accordion_bench.sync.round import Round, When
from accordion_bench.sync.what import InFlight
from accordion_bench.sync.who import Group, Pairs, Tier

GRAPHS = ("exponential", "ring", "complete")


def shifts(graph: str, workers: int, turn: int) -> list[int]:
    """To whom worker w sends in a round: w + shift, modulo the workers, for each shift.

    Args:
        graph: one of `GRAPHS`.
        workers: A.
        turn: number of the round; `exponential` changes with it.
    """
    if graph == "exponential":
        return [2 ** (turn % (workers - 1).bit_length())] if workers > 1 else []
    return sorted({1, workers - 1} - {0, workers}) if graph == "ring" else list(range(1, workers))


class Neighbours(Exchange):
    """sum_j x_j over the neighbours j that send to a worker, [W, ...]; 4 N bytes to each of them.

    Args:
        graph: one of `GRAPHS`.
        specs, comm, like: see `Exchange`.

    Attributes:
        turn: number of the round.
    """

    alike = False

    def __init__(self, graph: str, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> None:
        super().__init__(Dense(), specs, Ladder("", ()), comm, like)
        self.graph, self.turn, self.what = graph, 0, "replica"

    @property
    def messages(self) -> int:
        """Neighbours to whom a worker sends in a round."""
        return len(shifts(self.graph, self.comm.workers, self.turn))

    @property
    def weight(self) -> float:
        """p, of each message, and of what a worker keeps."""
        return 1 / (1 + self.messages)

    def predicted_bytes(self, info: StepInfo) -> int:
        return 4 * self.numel * self.messages

    def mean_bytes(self, info: StepInfo) -> int:
        return self.predicted_bytes(info)

    def paper_floats(self, levels: list[float | None]) -> int:
        return self.numel * self.messages

    @torch.no_grad()
    def bucket(self, number: int, xs_W: Sequence[Tensor], ctx: Context) -> list[Tensor]:
        comm, A = self.comm, self.comm.workers
        with comm.clock.exchanging(self.kind, number, comm.ledger):
            own_W = torch.cat([x_W.flatten(1) for x_W in xs_W], dim=1)
            own_W = own_W.float() if own_W.element_size() == 2 else own_W
            sum_W = torch.zeros_like(own_W)
            for shift in shifts(self.graph, A, self.turn):
                sum_W += comm.send_receive(own_W, [(worker + shift) % A for worker in range(A)])
        parts = sum_W.split([x_W[0].numel() for x_W in xs_W], dim=1)
        return [part.view(x_W.shape).to(x_W.dtype) for part, x_W in zip(parts, xs_W, strict=True)]


class Peers(Pairs):
    """Workers send their parameters to their neighbours; each is where it is.

    Args:
        graph: one of `GRAPHS`.
    """

    def __init__(self, graph: str) -> None:
        super().__init__()
        self.graph = graph

    def begin(self, runner: ExchangeRunner, outer: Average, parts: Sequence[Sequence[int]] | None) -> None:
        self.runner, self.axis, comm = runner, runner.axis, runner.comm
        exchange = self.new_exchange(runner, comm, parts)
        rows = [range(row, row + 1) for row in range(comm.local_workers)]
        self.tiers = [Tier(comm.workers, [Group(row, exchange, [], []) for row in rows])]

    def new_exchange(self, runner: ExchangeRunner, comm: Comm, parts: Sequence[Sequence[int]] | None) -> Neighbours:
        neighbours = Neighbours(self.graph, runner.axis.specs, comm, runner.axis.like)
        neighbours.finite = runner.finite
        return neighbours

    def send(
        self, flight: InFlight, exchanges: Sequence[Exchange], message: Sequence[list[Tensor]], late: bool
    ) -> None:
        exchange, xs_W = exchanges[0], [torch.stack(rows) for rows in zip(*message, strict=True)]
        if late and self.runner.may_launch:
            flight.landing = self.runner.launch(exchange, xs_W)
            return
        flight.clock.waits(exchange.kind)
        flight.updates = exchange(xs_W, self.runner.position.info())
        flight.clock.lap("exposed")

    def consensus(self) -> list[Tensor]:
        return self.axis.mean_replica("eval")

    def own(self, row: int) -> dict[str, Any]:
        return {}


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from Round.description.idle(cls, options, context)
    if context.workers <= 2:
        yield "graph", "a lone worker has no neighbours" if context.workers == 1 else "two workers are neighbours"


@dataclass(eq=False)
class Gossip(Round):
    """After every H steps x_w <- p (x_w + sum_j x_j), over the n neighbours j that send to w; p = 1 / (n + 1).

    With `delay=1` a worker keeps p x_w and goes on; what its neighbours have sent comes after the next step. A part of
    the parameters is then under way, and gradients are taken at z (stochastic gradient push):

        x_w <- p x_w,  u <- p u;   a step later  x_w <- x_w + p sum_j x_j,  u <- u + p n u_sent;   z_w = x_w / u

    u is 1 without a delay, and at any time the same for all workers, since they have equally many neighbours. The mean
    of all x_w, with what is under way, is moved by the mean step alone. Evaluated is the mean of z_w; after the last
    step all workers average exactly.

    Args:
        graph: `exponential`: one neighbour in a round, 2^k further, k = 0, 1, ... by turns (SGP); `ring`: the one
            before and the one after (D-PSGD); `complete`: all others. More neighbours = more bytes, and workers that
            are closer.
        period: H, steps between two rounds; longer = fewer bytes.
        delay: 0, or 1: messages travel beside the next step.
        switch_step, final: see `LocalSGD`.

    Source: Assran et al. 2019 (arXiv 1811.10792); Lian et al. 2017 (arXiv 1705.09056).
    """

    description = replace(Round.description, display_names={"gossip": "gossip SGD"}, idle=_idle)

    keeps = ("forked", "since", "count", "round_lr", "period", "u", "under_way")
    without_averages = "whose workers mix with neighbours and never have one mean of all"
    graph: str = "exponential"
    period: int = 1
    delay: int = 0
    switch_step: int | None = 0
    final: bool = True

    def __post_init__(self) -> None:
        checks.choice("graph", self.graph, list(GRAPHS))
        checks.integer("delay", self.delay, at_least=0, at_most=1, instead=0)
        super().__init__(When(self.period, delay=self.delay), Peers(self.graph))
        self.late = self.delay > 0
        self.u, self.under_way = 1.0, 0.0  # sum to 1
        self.distance: float | None = None

    def at_the_start(self) -> list[Tensor]:
        return []

    @torch.no_grad()
    def before_step(self, lr: Rate) -> CompletedExchange | None:
        completed = super().before_step(lr)
        for row in range(len(self.axis.replicas) if self.delay else 0):
            torch._foreach_mul_(self.axis.values(row), self.u)
        return completed

    @torch.no_grad()
    def after_local_step(self) -> None:
        super().after_local_step()
        for row in range(len(self.axis.replicas) if self.delay else 0):
            torch._foreach_div_(self.axis.values(row), self.u)

    @torch.no_grad()
    def average(self, tier: int) -> None:
        self.neighbours.turn = self.count // (self.period or 1) - 1
        super().average(tier)
        if self.delay:
            p = self.neighbours.weight
            for row in range(len(self.axis.replicas)):
                torch._foreach_mul_(self.axis.values(row), p)
            self.u, self.under_way = p * self.u, (1 - p) * self.u

    @torch.no_grad()
    def use(self) -> None:
        """Add what neighbours have sent to what the workers have kept."""
        (sums_W,), p = self.in_flight.take(1), self.neighbours.weight
        for row in range(len(self.axis.replicas)):
            values, sums = self.axis.values(row), [x_W[row] for x_W in sums_W]
            torch._foreach_add_(values, sums, alpha=p if self.delay else 1)
            if not self.delay:
                torch._foreach_mul_(values, p)
        self.u, self.under_way = self.u + self.under_way, 0.0

    @property
    def neighbours(self) -> Neighbours:
        """The exchange of all workers."""
        exchange = self.exchange
        assert isinstance(exchange, Neighbours)
        return exchange

    # ---- the end, and in between

    def consensus(self) -> list[Tensor]:
        """The mean of z_w, from which their distance is measured."""
        mean = super().consensus()
        if self.forked and self.apart:
            rows = [self.axis.values(row) for row in range(len(self.axis.replicas))]
            squares = [(x - m).double().square().sum() for own in rows for x, m in zip(own, mean, strict=True)]
            total = self.comm.sum_(torch.stack(squares).sum(), "eval")
            self.distance = (float(total) / self.comm.workers) ** 0.5
        return mean

    def finish(self) -> None:
        """The distance, and one exact average."""
        self.land()
        self.consensus()
        super().finish()

    def columns(self) -> dict[str, Any]:
        """For metrics rows: the root mean square of |z_w - mean z| over the workers, before the exact average."""
        return {"consensus_distance": self.distance}

    # ---- checkpoints

    def own(self, row: int) -> dict[str, Any]:
        received = [x_W[row] for x_W in self.in_flight.updates]
        return {"received": self.who.named(received)} if received else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.under_way:
            kept_W = [x.expand(self.comm.local_workers, *x.shape) for x in self.axis.shared]
            self.in_flight.updates = [torch.zeros_like(x_W, memory_format=torch.contiguous_format) for x_W in kept_W]
