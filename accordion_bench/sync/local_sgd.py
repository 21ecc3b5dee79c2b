"""Local SGD and its relatives: workers take steps of their own and average what they have become every H steps.

    x_w   parameters of worker w (a replica)      z   the last consensus      H   period

Differences z - x_w travel, not x_w: the exchange may then compress them and keep what was lost as a residual, in the
units of the parameters.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from accordion_bench import check, rng
from accordion_bench.build import Config
from accordion_bench.check import ConfigError, ValueRefused
from accordion_bench.comm import Comm
from accordion_bench.compressors.base import NonFinite
from accordion_bench.exchange import Exchange
from accordion_bench.plan import Plan, Run
from accordion_bench.sync.base import Placed, Sync
from accordion_bench.sync.every_step import EveryStep
from accordion_bench.sync.outer import OUTER, Average

if TYPE_CHECKING:
    from accordion_bench.trainer import Trainer

BUFFERS = ("keep", "reset", "average")


class Group(NamedTuple):
    """Local workers that average together: their rows, what connects them with the others of their group, and z."""

    rows: range
    exchange: Exchange
    anchor: list[Tensor]


class LocalSGD(Sync):
    """Each worker takes H steps of the inner optimizer; then z <- outer(z, mean(z - x_w)) and x_w <- z.

    Counting optimizer steps c = 1, 2, ..., workers average after the steps S + H, S + 2 H, ..., and once more, exactly,
    after the last step of the run.

    Args:
        period: H, steps between two averagings; longer = fewer bytes. A policy may change it; a change is in force from
            the next averaging on.
        switch_step: S, synchronous steps before; null = until the first decay of the learning rate (post-local SGD).
        phase1: what the synchronous steps average: `gradient`s (one inner optimizer) or `model`s (each worker's own).
        outer_optimizer: `none` (the mean), `slowmo` (`alpha`, `beta`) or `sgd` (`outer_lr`, `outer_momentum`,
            `outer_nesterov`).
        buffers: the inner optimizers' at an averaging: `keep`, `reset`, or `average` (sent as they are, like one more
            model for each buffer); null = reset where SlowMo's inner optimizer is SGD (its paper), else keep.
        groups: hierarchical averaging: [[H_1, n_1], [H_2, n_2], ...], every H_1 steps within groups of n_1 consecutive
            workers, and so on; each H and n divides the next, the last n is the number of workers. null = [[H, A]];
            else `period` is null.
        final: leave the mean behind after the last step.
        outer: the options of the outer optimizer.

    Source: Stich 2019 (arXiv 1805.09767); Lin et al. 2020 (arXiv 1808.07217); Zhou and Cong 2019 (hierarchical).
    """

    local = True

    def __init__(
        self,
        period: int | None = 8,
        switch_step: int | None = 0,
        phase1: str = "gradient",
        outer_optimizer: str = "none",
        buffers: str | None = None,
        groups: Sequence[Sequence[int]] | None = None,
        final: bool = True,
        **outer: Any,
    ) -> None:
        self.groups = None if groups is None else checked_groups(groups)
        if self.groups is None:
            check.integer("period", period, at_least=1, instead=8)
        elif period is not None:
            raise ValueRefused("period", "null where groups say it", period, None)
        self.period = self.groups[-1][0] if self.groups else period
        self.switch_step = switch_step
        if switch_step is not None:
            check.integer("switch_step", switch_step, at_least=0)
        self.phase1 = check.choice("phase1", phase1, ["gradient", "model"])
        self.outer_optimizer = check.choice("outer_optimizer", outer_optimizer, list(OUTER))
        try:
            self.outer = OUTER[outer_optimizer](**outer)
        except TypeError:
            raise ConfigError(
                f"sync.{next(iter(outer))} is no option of outer_optimizer={outer_optimizer}; type sync=slowmo or "
                "sync=diloco to choose an outer optimizer with its options"
            ) from None
        self.buffers = None if buffers is None else check.choice("buffers", buffers, BUFFERS)
        self.final = check.boolean("final", final)
        self.gradient_exchange = phase1 == "gradient" and switch_step != 0
        self.count = 0  # local steps in all
        self.since = 0  # local steps since the last averaging
        self.round_lr = 0.0  # the inner learning rate at the start of this round
        self.tiers: list[tuple[int, list[Group]]] = []
        self.forked = False

    # ---- before the run

    def check(self, cfg: Config, run: Run) -> None:
        if self.switch_step is None and self.switch_epoch(run) is None:
            raise ValueRefused(
                "sync.switch_step",
                "a number of steps where the learning rate never drops to half",
                None,
                run.steps // 2,
            )
        if self.switch_step is not None and self.switch_step >= run.steps:
            rule = f"below {run.steps}, the steps of the run, or workers would never take a step of their own"
            raise ValueRefused("sync.switch_step", rule, self.switch_step, run.steps // 2)
        if self.groups is None:
            return
        if self.groups[-1][1] != run.workers:
            shown = [*self.groups[:-1], (self.groups[-1][0], run.workers)]
            rule = f"a list whose last group has all {run.workers} workers"
            raise ValueRefused("sync.groups", rule, [list(g) for g in self.groups], [list(g) for g in shown])
        W = cfg["comm"]["workers_per_process"] or run.workers // (cfg["comm"]["processes"] or 1)
        for _, size in self.groups:
            if size % W and W % size:
                rule = f"groups that divide the {W} workers of a process, or are made of whole processes"
                raise ValueRefused("sync.groups", rule, [list(g) for g in self.groups], None)

    def switch_epoch(self, run: Run) -> float | None:
        """The epoch in which the learning rate first drops, to 0.7 of its last value or less."""
        factors = [run.schedule(float(epoch)) for epoch in range(run.epochs)]
        drops = (e for e in range(1, run.epochs) if factors[e] <= 0.7 * factors[e - 1])
        return next(drops, None)

    def start(self, plan: Plan) -> Plan:
        return Plan(plan.levels, plan.batch_size, plan.lr_factor, self.period or 1, plan.codebooks)

    def begin(self, trainer: "Trainer") -> None:
        axis, comm = trainer.axis, trainer.comm
        self.names = [spec.name for spec in axis.specs]
        if self.buffers is None:
            is_sgd = isinstance(trainer.optimizer, torch.optim.SGD)
            self.buffers = "reset" if self.outer_optimizer == "slowmo" and is_sgd else "keep"
        self.every_step = EveryStep()
        if self.gradient_exchange:
            self.every_step.begin(trainer)
        self.switch = self.switch_epoch(trainer.run) if self.switch_step is None else None
        self.make_tiers(trainer, comm)
        if self.phase1 == "model" or self.switched(trainer):
            self.fork(trainer)

    def make_tiers(self, trainer: "Trainer", comm: Comm) -> None:
        """One exchange for every group of every tier that has workers here."""
        sizes = [size for _, size in self.groups or []][:-1]
        for size in sizes:
            groups = []
            first = comm.first_worker // size
            for i, inner in enumerate(comm.groups(size)):
                rows = range(i * inner.local_workers, (i + 1) * inner.local_workers)
                exchange = trainer.new_exchange(True, inner, rng.key(trainer.cfg["seed"], "group", size, first + i))
                groups.append(Group(rows, exchange, [value.clone() for value in trainer.axis.shared]))
            self.tiers.append((size, groups))
        everyone = Group(range(comm.local_workers), trainer.new_exchange(True), trainer.axis.shared)
        self.tiers.append((comm.workers, [everyone]))

    def exchanges(self) -> list[Placed]:
        placed = self.every_step.exchanges() if self.gradient_exchange and not self.forked else []
        for size, groups in self.tiers:
            placed += [Placed(f"pseudo_gradient-{size}", group.exchange, group.rows) for group in groups]
        return placed

    @property
    def exchange(self) -> Exchange:
        """The one that is in force now."""
        return self.every_step.exchange if self.gradient_exchange and not self.forked else self.tiers[-1][1][0].exchange

    # ---- the steps

    def switched(self, trainer: "Trainer") -> bool:
        """Whether the synchronous steps are over."""
        return trainer.now >= self.switch if self.switch is not None else trainer.step >= (self.switch_step or 0)

    def fork(self, trainer: "Trainer") -> None:
        """From here on each worker has parameters and an inner optimizer of its own."""
        trainer.axis.fork()
        trainer.fork_optimizer()
        self.forked = True
        for _, groups in self.tiers:
            for group in groups:
                torch._foreach_copy_(group.anchor, trainer.axis.shared)

    def step(self, trainer: "Trainer", lr: float) -> None:
        if not self.forked and self.switched(trainer):
            self.fork(trainer)
        if not self.forked:
            self.every_step.step(trainer, lr)
            return
        if self.since == 0:
            self.round_lr, self.period = lr, trainer.plan.period
        if bad := self.exchange.non_finite(trainer.axis.gradients_W):
            raise NonFinite(f"{bad} is not finite")
        self.local_step(trainer, lr)
        trainer.clock.lap("update")
        self.since += 1
        self.after_local_step(trainer)
        trainer.clock.lap("update")

    def local_step(self, trainer: "Trainer", lr: float) -> None:
        """x_w <- inner optimizer(x_w, g_w) for each local worker."""
        axis = trainer.axis
        for row, optimizer in enumerate(trainer.optimizers):
            for replica, gradient_W in zip(axis.replicas[row], axis.gradients_W, strict=True):
                replica.grad = gradient_W[row]
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()

    def after_local_step(self, trainer: "Trainer") -> None:
        """Average where a period has passed."""
        tier = self.due_tier(trainer)
        if tier is not None:
            self.average(trainer, tier)

    def due_tier(self, trainer: "Trainer") -> int | None:
        """The largest groups whose period has passed with this step."""
        top = len(self.tiers) - 1
        if not self.switched(trainer):  # phase1=model
            return top
        self.count += 1
        if self.groups is None:
            return top if self.since >= (self.period or 1) else None
        return max((i for i, (period, _) in enumerate(self.groups) if self.count % period == 0), default=None)

    def average(self, trainer: "Trainer", tier: int) -> None:
        """Average within the groups of one tier, take the outer step, and let the replicas go on from there."""
        axis = trainer.axis
        _, groups = self.tiers[tier]
        differences = [axis.differences(group.anchor, group.rows) for group in groups]
        updates = trainer.exchanged([group.exchange for group in groups], differences, 1.0)
        top = tier == len(self.tiers) - 1
        outer = self.outer if top and self.switched(trainer) else Average()
        with torch.no_grad():
            for group, update in zip(groups, updates, strict=True):
                outer.step(group.anchor, update, self.round_lr)
                axis.restart(group.anchor, group.rows)
        for _, lower in self.tiers[:tier]:
            for group in lower:
                above = next(g for g in groups if group.rows.start in g.rows)
                torch._foreach_copy_(group.anchor, above.anchor)
        if top:
            self.since = 0
            self.treat_buffers(trainer)

    def treat_buffers(self, trainer: "Trainer") -> None:
        """What an averaging of all workers does to the inner optimizers."""
        if self.buffers == "reset":
            for optimizer in trainer.optimizers:
                optimizer.state.clear()
        elif self.buffers == "average":
            average_buffers(trainer)

    # ---- the end, and in between

    def consensus(self, trainer: "Trainer") -> list[Tensor]:
        if not self.forked or not self.since:
            return trainer.axis.shared
        return trainer.axis.mean_replica("eval")

    def finish(self, trainer: "Trainer") -> None:
        """One exact average of what the workers have become since the last one."""
        if self.forked and self.since and self.final:
            exact_average(trainer)
            self.since = 0

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        outer = {
            key: dict(zip(self.names, values, strict=True)) for key, values in self.outer.state_dict().items() if values
        }
        kept = ("since", "count", "round_lr", "period", "forked")
        return {**{key: getattr(self, key) for key in kept}, "outer": outer}

    def load_state_dict(self, trainer: "Trainer", state: dict[str, Any]) -> None:
        if state["forked"] and not self.forked:
            self.fork(trainer)
        for key in ("since", "round_lr", "period", "count"):
            setattr(self, key, state[key])
        outer = {key: [values[name] for name in self.names] for key, values in state["outer"].items()}
        self.outer.load_state_dict(outer, trainer.axis.shared)

    def worker_state(self, row: int) -> dict[str, Any]:
        anchors = {}
        for size, groups in self.tiers[:-1]:
            group = next(g for g in groups if row in g.rows)
            anchors[size] = {name: value.clone() for name, value in zip(self.names, group.anchor, strict=True)}
        return {"anchors": anchors}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        for size, groups in self.tiers[:-1]:
            group = next(g for g in groups if row in g.rows)
            for name, value in zip(self.names, group.anchor, strict=True):
                value.copy_(state["anchors"][size][name])


def checked_groups(groups: Any) -> list[tuple[int, int]]:
    """[(period, workers), ...] from small to large.

    Raises:
        ValueRefused: no such list, or a pair does not divide the next.
    """
    good = isinstance(groups, list | tuple) and len(groups) > 0
    good = good and all(
        isinstance(g, list | tuple) and len(g) == 2 and all(type(n) is int and n >= 1 for n in g) for g in groups
    )
    pairs = [(int(period), int(size)) for period, size in groups] if good else []
    good = good and all(
        b[0] % a[0] == 0 and b[1] % a[1] == 0 and a[1] < b[1] for a, b in itertools.pairwise(pairs)
    )
    if not good:
        rule = "a list of [period, workers] in which each divides the next"
        raise ValueRefused("groups", rule, groups, [[4, 2], [16, 4]])
    return pairs


@torch.no_grad()
def exact_average(trainer: "Trainer") -> None:
    """z <- mean x_w, uncompressed; x_w <- z."""
    axis, everyone = trainer.axis, range(trainer.comm.local_workers)
    means = trainer.comm.all_reduce_mean(axis.differences(axis.shared, everyone))
    torch._foreach_sub_(axis.shared, means)
    axis.restart(axis.shared, everyone)
    trainer.clock.lap("exposed")


@torch.no_grad()
def average_buffers(trainer: "Trainer") -> None:
    """Replace every buffer of the inner optimizers by its mean over all workers; step counts stay."""
    rows = [
        [optimizer.state[p] for p in replica]
        for optimizer, replica in zip(trainer.optimizers, trainer.axis.replicas, strict=True)
    ]
    keys = [key for key, value in rows[0][0].items() if isinstance(value, Tensor) and value.ndim]
    for key in keys:
        stacked = [torch.stack([row[i][key] for row in rows]) for i in range(len(rows[0]))]
        for i, mean in enumerate(trainer.comm.all_reduce_mean(stacked)):
            for row in rows:
                row[i][key].copy_(mean)
    trainer.clock.lap("exposed")
