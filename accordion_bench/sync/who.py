"""Groups of workers that average: all workers, nested groups, or random pairs that change each time."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context
from accordion_bench.compressors.uncoded import Dense
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.runner import CompletedExchange, ExchangeRunner
from accordion_bench.options.checks import ValueRefused
from accordion_bench.plan import Ladder, RunFacts, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.sync.outer import Average
from accordion_bench.sync.scheme import Placed
from accordion_bench.sync.what import InFlight
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.same_shape import in_rows


class Group(NamedTuple):
    """Local workers with a common z.

    rows: rows of these workers.
    exchange: exchange with the other workers of the group.
    anchor: z.
    outers: outer optimizer of each part of the tensors.
    """

    rows: range
    exchange: Exchange
    anchor: list[Tensor]
    outers: list[Average]

    def values(self, tensors: Sequence[int] | None) -> list[Tensor]:
        """Return z of some tensors, by index; None = of all."""
        return self.anchor if tensors is None else [self.anchor[i] for i in tensors]


class Tier(NamedTuple):
    """All groups of one size with local workers."""

    size: int
    groups: list[Group]


class All:
    """All workers average differences z - x of their parameters; smaller groups, if any, average more often.

    Args:
        groups: (period, size) of each level, from small to large; () = one group of all workers.

    Attributes:
        one_mean: whether all workers get the same mean.
        tiers: groups from the smallest size to all workers; [] before `begin`.
    """

    one_mean = True

    def __init__(self, groups: Sequence[tuple[int, int]] = ()) -> None:
        self.groups = groups
        self.tiers: list[Tier] = []

    def begin(self, runner: ExchangeRunner, outer: Average, parts: Sequence[Sequence[int]] | None) -> None:
        """Create the groups, once workers have their own parameters.

        Args:
            runner, outer: creates exchanges; outer optimizer of the z of all workers.
            parts: indices of the tensors of each part that is exchanged at a different time; None = all at once.
        """
        self.runner, self.axis, comm = runner, runner.axis, runner.comm
        self.tiers = [self._tier(size) for _, size in self.groups[:-1]]
        outers = [outer, *(copy.deepcopy(outer) for _ in (parts or [[]])[1:])]
        everyone = Group(range(comm.local_workers), self.new_exchange(runner, comm, parts), self.axis.shared, outers)
        self.tiers.append(Tier(comm.workers, [everyone]))

    def _tier(self, size: int) -> Tier:
        comm, tier, runner = self.runner.comm, Tier(size, []), self.runner
        first = comm.first_worker // size
        for i, inner in enumerate(comm.groups(size)):
            rows = range(i * inner.local_workers, (i + 1) * inner.local_workers)
            # seeds differ between groups, and do not depend on the placement
            exchange = runner.new_exchange(True, inner, keyed_rng.key(runner.seed, "group", size, first + i))
            tier.groups.append(Group(rows, exchange, [value.clone() for value in self.axis.shared], [Average()]))
        return tier

    def new_exchange(self, runner: ExchangeRunner, comm: Comm, parts: Sequence[Sequence[int]] | None) -> Exchange:
        """Create the exchange of the workers of `comm`; other arguments as in `begin`."""
        return runner.new_exchange(True, comm, parts=parts)

    def resized(self) -> None:
        """Adapt to a new number of workers."""
        *smaller, (_, groups) = self.tiers
        self.tiers = [*smaller, Tier(self.runner.comm.workers, groups)]
        groups[0].exchange.resized()

    def placed(self) -> list[Placed]:
        """Return all exchanges with state."""
        return [Placed(f"pseudo_gradient-{t.size}", g.exchange, g.rows) for t in self.tiers for g in t.groups]

    @property
    def exchange(self) -> Exchange:
        """Exchange of all workers."""
        return self.tiers[-1].groups[0].exchange

    def message(self, tier: int, tensors: Sequence[int] | None) -> list[list[Tensor]]:
        """Return the message of each group of a tier: tensors [rows, ...], in the storage of the gradients."""
        groups = self.tiers[tier].groups
        return [self.axis.differences(group.values(tensors), group.rows, tensors) for group in groups]

    def send(
        self, flight: InFlight, exchanges: Sequence[Exchange], message: Sequence[list[Tensor]], late: bool
    ) -> CompletedExchange | None:
        """Launch the averaging of each group's message; see `InFlight.launch`."""
        return flight.launch(exchanges, message, late)

    def differences(self, flight: InFlight, tier: int) -> list[list[Tensor]]:
        """Take z - mean x of each group of a tier out of the flight."""
        updates, groups = flight.take(), len(self.tiers[tier].groups)
        each = len(updates) // groups
        return [updates[i * each : (i + 1) * each] for i in range(groups)]

    def inherit(self, tier: int) -> None:
        """Copy z of the groups of a tier to the smaller groups inside."""
        for lower in [group for below in self.tiers[:tier] for group in below.groups]:
            above = next(group for group in self.tiers[tier].groups if lower.rows.start in group.rows)
            torch._foreach_copy_(lower.anchor, above.anchor)

    def consensus(self) -> list[Tensor]:
        """Return the mean parameters [...] for evaluation while workers differ."""
        return self.axis.mean_replica("eval")

    # ---- state

    def outer_buffers(self, parts: Sequence[Sequence[int]] | None) -> list[Tensor]:
        """Return the state tensors of the outer optimizers of all workers."""
        if not self.tiers:
            return []
        (everyone,) = self.tiers[-1].groups
        whole: list[Sequence[int] | None] = [None]
        pairs = zip(everyone.outers, parts or whole, strict=True)
        return [buffer for outer, tensors in pairs for buffer in outer.buffers(everyone.values(tensors))]

    def own(self, row: int) -> dict[str, Any]:
        """Return the tensors of one local worker by name; see `Sync.own`."""
        lower = [(size, next(group for group in groups if row in group.rows)) for size, groups in self.tiers[:-1]]
        return {"anchors": {size: self.named(group.anchor) for size, group in lower}}

    def named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return a dictionary from the names of the specs to tensors."""
        return dict(zip((spec.name for spec in self.axis.specs), values, strict=True))


class Pairs(All):
    """Workers exchange parameters in random pairs, drawn from a common key; each has its own z.

    Class attributes:
        anchored: whether workers have their own z.
    """

    one_mean = False
    anchored = True

    def begin(self, runner: ExchangeRunner, outer: Average, parts: Sequence[Sequence[int]] | None) -> None:
        self.runner, self.axis, comm = runner, runner.axis, runner.comm
        exchange = self.new_exchange(runner, comm, parts)
        values = [self.axis.values(row) if self.anchored else [] for row in range(comm.local_workers)]
        anchors = [[x.clone() for x in own] for own in values]
        groups = [Group(range(row, row + 1), exchange, z, [copy.deepcopy(outer)]) for row, z in enumerate(anchors)]
        self.tiers = [Tier(comm.workers, groups)]

    def new_exchange(self, runner: ExchangeRunner, comm: Comm, parts: Sequence[Sequence[int]] | None) -> Exchange:
        pairs = PairExchange(runner.axis.specs, comm, runner.axis.like, runner.seed)
        pairs.finite = runner.finite
        return pairs

    def placed(self) -> list[Placed]:
        return [Placed(f"pseudo_gradient-{t.size}", self.exchange, range(len(t.groups))) for t in self.tiers]

    def message(self, tier: int, tensors: Sequence[int] | None) -> list[list[Tensor]]:
        rows = [self.axis.values(row) for row in range(self.runner.comm.local_workers)]
        return [[torch.stack(xs) for xs in zip(*rows, strict=True)]]

    def send(
        self, flight: InFlight, exchanges: Sequence[Exchange], message: Sequence[list[Tensor]], late: bool
    ) -> None:
        exchange, xs_W = exchanges[0], message[0]
        if late and self.runner.may_launch:
            flight.landing = self.runner.launch(exchange, xs_W)
            return

        def mixed() -> list[Tensor]:
            flight.clock.waits(exchange.kind)
            return exchange(xs_W, self.runner.position.info())

        flight.updates = self.runner.comm.membership.repeated(lambda: mixed, mixed, exchange.keep)()
        flight.clock.lap("exposed")

    def differences(self, flight: InFlight, tier: int) -> list[list[Tensor]]:
        means_W, pairs = flight.take(), enumerate(self.tiers[tier].groups)
        return [[z - mean_W[row] for z, mean_W in zip(own.anchor, means_W, strict=True)] for row, own in pairs]

    def consensus(self) -> list[Tensor]:
        return self.axis.mean_over_workers([group.anchor for group in self.tiers[-1].groups], "eval")

    def outer_buffers(self, parts: Sequence[Sequence[int]] | None) -> list[Tensor]:
        return []

    def own(self, row: int) -> dict[str, Any]:
        if not self.tiers:
            return {}
        group = self.tiers[-1].groups[row]
        momentum = group.outers[0].buffers(group.anchor)
        return {"z": self.named(group.anchor), "momentum": self.named(momentum)}


class Nobody(All):
    """No averaging at the end of a round."""

    one_mean = False

    def begin(self, runner: ExchangeRunner, outer: Average, parts: Sequence[Sequence[int]] | None) -> None:
        self.runner, self.axis = runner, runner.axis


# ---- groups


def checked_groups(groups: Any) -> list[tuple[int, int]]:
    """Return groups [(period, workers), ...], after checking that each pair divides the next one."""
    good = isinstance(groups, list | tuple) and len(groups) > 0
    good = good and all(
        isinstance(g, list | tuple) and len(g) == 2 and all(type(n) is int and n >= 1 for n in g) for g in groups
    )
    pairs = [(int(period), int(size)) for period, size in groups] if good else []
    good = good and all(b[0] % a[0] == 0 and b[1] % a[1] == 0 and a[1] < b[1] for a, b in itertools.pairwise(pairs))
    if not good:
        rule = "a list of [period, workers] in which each divides the next"
        raise ValueRefused("groups", rule, groups, [[4, 2], [16, 4]])
    return pairs


def refuse_groups(groups: Sequence[tuple[int, int]], run: RunFacts, workers_per_process: int) -> None:
    """Check groups against the number of workers and the workers per process."""
    shown = [list(group) for group in groups]
    if groups[-1][1] != run.workers:
        smaller = [group for group in shown if run.workers % group[1] == 0 and group[1] < run.workers]
        rule = f"a list whose last group has all {run.workers} workers"
        raise ValueRefused("sync.groups", rule, shown, [*smaller, [groups[-1][0], run.workers]])
    W = workers_per_process
    whole = [group for group in shown if group[1] % W == 0 or W % group[1] == 0]
    if whole != shown:
        rule = f"groups that divide the {W} workers of a process, or are made of whole processes"
        raise ValueRefused("sync.groups", rule, shown, whole)


# ---- messages to single workers


class PeerExchange(Exchange):
    """Weighted sum p (x_w + sum_j x_j) over the workers j that send their parameters to w, [W, ...].

    Uses point-to-point messages: each worker sends and receives 4 N bytes per neighbour, in one message.

    Args:
        specs, comm, like, seed: see `Exchange`.

    Attributes:
        turn: number of the round.
        with_own: whether the sum contains x_w; otherwise it is p sum_j x_j.
    """

    alike = False
    with_own = True

    def __init__(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor, seed: int = 0) -> None:
        super().__init__(Dense(), specs, Ladder("", ()), comm, like, SendOptions(seed))
        self.what, self.turn = "replica", 0

    def targets(self, step: int) -> list[list[int]]:
        """Return, for each message of a worker, the targets of all workers; each is a permutation of the workers."""
        raise NotImplementedError

    @property
    def messages(self) -> int:
        """Number of other workers to which a worker sends in each step."""
        raise NotImplementedError

    @property
    def weight(self) -> float:
        """p = 1 / (1 + messages), so that the weights sum to 1."""
        return 1 / (1 + self.messages)

    def predicted_bytes(self, info: StepInfo) -> int:
        return 4 * self.numel * self.messages

    def mean_bytes(self, info: StepInfo) -> int:
        return self.predicted_bytes(info)

    def paper_floats(self, levels: list[float | None]) -> int:
        return self.numel * self.messages

    def non_finite(
        self, xs_W: Sequence[Tensor], what: str | None = None, members: Sequence[int] | None = None
    ) -> str | None:
        return super().non_finite(xs_W, what or "value", members)

    @torch.no_grad()
    def bucket(self, number: int, xs_W: Sequence[Tensor], ctx: Context) -> list[Tensor]:
        """Exchange one bucket; return updates [W, ...] with a row for each local worker."""
        comm = self.comm
        with comm.clock.exchanging(self.kind, number, comm.ledger):
            own_W = torch.cat([in_rows(x_W) for x_W in xs_W], dim=1)
            own_W = own_W.float() if own_W.element_size() == 2 else own_W
            sum_W = own_W.clone() if self.with_own else torch.zeros_like(own_W)
            for targets_A in self.targets(ctx.step):
                sum_W += comm.send_receive(own_W, targets_A)
            sum_W *= self.weight
        parts = sum_W.split([x_W[0].numel() for x_W in xs_W], dim=1)
        return [part.view(x_W.shape).to(x_W.dtype) for part, x_W in zip(parts, xs_W, strict=True)]


class PairExchange(PeerExchange):
    """Mean of each local worker's tensors and its partner's, mean_pair x; equal on both, bit for bit.

    The number of workers is even, or one, which is its own partner.
    """

    @property
    def messages(self) -> int:
        return 1

    def partners(self, step: int) -> list[int]:
        """Return the partner of each worker of the run at a step; all pairings are equally likely."""
        workers = self.comm.workers
        order = torch.randperm(workers, generator=keyed_rng.generator(self.seed, "pairs", step)).tolist()
        partner = list(range(workers))
        for one, other in zip(order[::2], order[1::2], strict=False):  # a single worker has no partner
            partner[one], partner[other] = other, one
        return partner

    def targets(self, step: int) -> list[list[int]]:
        return [self.partners(step)]
