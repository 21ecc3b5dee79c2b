"""Local SGD and its relatives: workers take steps of their own and average what they have become every H steps.

    x_w   parameters of worker w (a replica)      z   the last consensus      H   period

Differences z - x_w travel, not x_w: the exchange may then compress them and keep what was lost as a residual, in the
units of the parameters.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.on_device import copy_on_cpu, restore_
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange
from accordion_bench.optimizers.inner import is_sgd
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import Plan, RunFacts
from accordion_bench.position import Rate
from accordion_bench.sync.attendance import attended, refuse_unheard
from accordion_bench.sync.base import Placed, Sync, SyncContext
from accordion_bench.sync.buffers import BUFFERS, treat_buffers
from accordion_bench.sync.every_step import EveryStep
from accordion_bench.sync.exact_average import exact_average
from accordion_bench.sync.groups import Tier, checked_groups, refuse_groups, tiers
from accordion_bench.sync.outer import OUTER, Average
from accordion_bench.sync.quorum import Quorum, refuse_in_run, refuse_quorum
from accordion_bench.sync.sparse_average import SparseAverage


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from Sync.description.idle(cls, options, context)
    if options.get("switch_step") == 0:
        yield "phase1", "sync.switch_step is 0"
    if context.workers == 1:
        yield "sparta", "a lone worker has nobody to average with"
    quorum = options.get("quorum")
    if quorum is None:
        for key in ("grace", "lateness"):
            yield key, "sync.quorum is null"
    elif quorum == context.workers:
        for key in ("quorum", "grace", "lateness"):
            yield key, f"all {quorum} workers are waited for anyway"
    elif options.get("lateness") is not None:
        yield "grace", "sync.lateness draws who is late"


def _smoke_options(options: Config, knob: str) -> Config:
    if options.get("groups"):
        return {"groups": [[1, 2], [2, 4]]}
    return {"period": 2}


class LocalSGD(Sync):
    """Each worker takes H steps of the inner optimizer; then z <- outer(z, mean(z - x_w)) and x_w <- z.

    Counting optimizer steps c = 1, 2, ..., workers average after the steps S + H, S + 2 H, ..., and once more, exactly,
    after the last step of the run. At the switch every worker inherits the inner optimizer's buffers; what a compressor
    has held back of the gradients until then is dropped.

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
        sparta: p, the share of all coordinates that become their mean over the workers after each local step, before an
            averaging; null = none. See `SparseAverage`; payload 4 p N bytes a step.
        quorum: workers, 1 to A, that must have come for an averaging to go on; fewer = less waiting. Whoever is late
            keeps its difference for the next one, see `quorum.py`. null = all.
        grace: seconds that others are waited for when the quorum is full; null = 0.
        lateness: probability in [0, 1) that a worker is late at an averaging, drawn; null = processes are late by the
            clock.
        outer: the options of the outer optimizer.

    Source: Stich 2019 (arXiv 1805.09767); Lin et al. 2020 (arXiv 1808.07217); Zhou and Cong 2019 (hierarchical).
    """

    description = replace(
        Sync.description,
        display_names={
            "local_sgd": "local SGD",
            "post_local_sgd": "post-local SGD",
            "slowmo": "SlowMo",
            "diloco": "DiLoCo",
            "hierarchical": "hierarchical local SGD",
        },
        shares={"sparta": "SPARTA"},
        idle=_idle,
        smoke_options=_smoke_options,
    )

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
        sparta: float | None = None,
        quorum: int | None = None,
        grace: float | None = None,
        lateness: float | None = None,
        **outer: Any,
    ) -> None:
        self.groups = None if groups is None else checked_groups(groups)
        if self.groups is None:
            checks.integer("period", period, at_least=1, instead=8)
        elif period is not None:
            raise ValueRefused("period", "null where groups say it", period, None)
        self.period = self.groups[-1][0] if self.groups else period
        self.switch_step = switch_step
        if switch_step is not None:
            checks.integer("switch_step", switch_step, at_least=0)
        self.plans_with = frozenset() if switch_step is not None else frozenset({"epochs", "schedule"})
        self.phase1 = checks.choice("phase1", phase1, ["gradient", "model"])
        self.outer_optimizer = checks.choice("outer_optimizer", outer_optimizer, list(OUTER))
        for option in outer.keys() - inspect.signature(OUTER[outer_optimizer]).parameters.keys():
            raise ConfigError(
                f"sync.{option} is no option of outer_optimizer={outer_optimizer}; type sync=slowmo or sync=diloco to "
                "choose an outer optimizer with its options"
            )
        self.outer = OUTER[outer_optimizer](**outer)
        self.buffers = "" if buffers is None else checks.choice("buffers", buffers, BUFFERS)
        self.final = checks.boolean("final", final)
        if sparta is not None:
            checks.number("sparta", sparta, above=0, at_most=1, instead=0.005)
            if self.groups is not None:
                raise ValueRefused("sparta", "null where groups say who averages", sparta, None)
        self.sparta = sparta
        self.sparse: SparseAverage | None = None
        refuse_quorum(quorum, grace, lateness, self.buffers, self.groups, sparta)
        self.quorum, self.grace, self.lateness = quorum, grace or 0.0, lateness
        self.attendance: Quorum | None = None
        self.gradient_exchange = phase1 == "gradient" and switch_step != 0
        self.count = 0  # local steps in all, after the synchronous ones
        self.since = 0  # steps since the last averaging of all workers
        self.round_lr = 0.0  # the inner learning rate at the start of this round
        self.tiers: list[Tier] = []
        self.forked = False

    # ---- before the run

    def check(self, run: RunFacts, workers_per_process: int) -> None:
        if self.switch_step is None and run.first_drop() is None:
            rule = "a number of steps where the learning rate never drops at once, to 0.7 or less"
            raise ValueRefused("sync.switch_step", rule, None, run.steps // 2)
        if self.switch_step and self.switch_step >= run.steps:
            rule = f"below {run.steps}, the steps of the run, or workers would never take a step of their own"
            raise ValueRefused("sync.switch_step", rule, self.switch_step, run.steps // 2)
        if self.groups is not None:
            refuse_groups(self.groups, run, workers_per_process)
        if self.quorum is not None:
            refuse_in_run(self.quorum, self.lateness, run.workers, workers_per_process)

    def refuse_driven(self, drivers: Mapping[str, str], run: RunFacts) -> None:
        for what, name in drivers.items():
            if what and self.quorum is not None:
                rule = f"null where adaptive={name} drives the {what}, because policies look at exchanges of all"
                raise ValueRefused("sync.quorum", rule, self.quorum, None)
        if "batch" not in drivers:
            return
        step, drop = self.switch_step, run.first_drop()
        if step or (step is None and drop is None):
            until = "null (until the first drop of the learning rate) or " if drop is not None else ""
            rule = f"{until}0 where adaptive={drivers['batch']} drives the batch and with it the steps per epoch"
            raise ValueRefused("sync.switch_step", rule, step, 0 if drop is None else None)

    def local_steps(self, run: RunFacts) -> int:
        if self.switch_step is None:
            return run.steps - (run.first_drop() or 0) * run.steps_per_epoch()
        return run.steps - self.switch_step

    def buffer_averagings(self, steps: int, period: int) -> int:
        at_the_switch = self.phase1 == "model" and self.switch_step != 0
        return steps // period + at_the_switch if self.buffers == "average" else 0

    def ends_apart(self, steps: int, period: int) -> bool:
        return self.final and steps % (self.groups[-1][0] if self.groups else period) > 0

    def start(self, plan: Plan) -> Plan:
        return replace(plan, period=self.period or 1)

    def begin(self, context: SyncContext) -> None:
        super().begin(context)
        refuse_unheard(context, self.quorum, self.lateness)
        self.names = [spec.name for spec in self.axis.specs]
        if not self.buffers:
            resets = self.outer_optimizer == "slowmo" and is_sgd(self.inner.common)
            self.buffers = "reset" if resets else "keep"
        self.every_step = EveryStep()
        if self.gradient_exchange:
            self.every_step.begin(context)
        if self.sparta is not None:
            self.sparse = self.sparse_average(self.comm)
        self.switch = context.run.first_drop() if self.switch_step is None else None
        if not self.gradient_exchange:
            self.fork()

    def fork(self) -> None:
        """From here on each worker has parameters and an inner optimizer of its own."""
        self.axis.fork()
        self.inner.fork()
        self.tiers = tiers(self.runner, self.groups, self.split)
        self.every_step = EveryStep()  # and its residuals are given up
        everyone, late = self.tiers[-1].groups[0].exchange, (self.quorum, self.grace, self.lateness)
        self.attendance = attended(self.context, everyone, self.outer, self.buffers, *late)
        self.forked = True

    def sparse_average(self, comm: Comm) -> SparseAverage:
        """What averages the share `sparta` of the parameters."""
        sparse = SparseAverage(self.sparta or 1.0, self.axis.specs, comm, self.axis.like, self.runner.seed)
        sparse.finite = self.runner.finite
        return sparse

    def new_exchange(self, comm: Comm | None = None) -> Exchange:
        return self.runner.new_exchange(True, comm, parts=self.split)

    def between(self) -> list[Exchange]:
        return [self.sparse] if self.sparse else []

    def exchanges(self) -> list[Placed]:
        if not self.forked:
            return self.every_step.exchanges()
        return [Placed(f"pseudo_gradient-{t.size}", g.exchange, g.rows) for t in self.tiers for g in t.groups]

    @property
    def exchange(self) -> Exchange:
        return self.tiers[-1].groups[0].exchange if self.forked else self.every_step.exchange

    # ---- the steps

    def gradients_go_to(self) -> Exchange | None:
        return None if self.forked or self.switched() else self.every_step.exchange

    @property
    def averaging(self) -> bool:
        return self.count > 0

    def switched(self) -> bool:
        """Whether the synchronous steps are over."""
        return (
            self.position.now >= self.switch
            if self.switch is not None
            else self.position.step >= (self.switch_step or 0)
        )

    def before_step(self, lr: Rate) -> CompletedExchange | None:
        local = self.switched()
        if local and not self.forked:
            self.runner.units_change()
            self.fork()
        if not self.forked:
            return self.every_step.before_step(lr)
        if local and not self.count and (self.phase1 == "model" or self.buffers == "reset"):
            treat_buffers(self.inner, self.buffers)  # the last synchronous step was an averaging, too
        if self.since == 0:
            self.round_lr = lr if isinstance(lr, int | float) else lr[0]
            self.period = self.position.plan.period
        self.exchange.refuse_non_finite(self.axis.gradients_W, "gradient")
        return None

    def after_step(self, lr: Rate) -> CompletedExchange | None:
        if not self.forked:
            self.every_step.after_step(lr)
            return None
        self.clock.lap("update")
        self.since += 1
        self.count += self.switched()
        if self.sparse is not None and self.count:
            self.land()  # one collective at a time
            self.clock.waits(self.sparse.kind)
            self.sparse.average_([self.axis.values(row) for row in range(self.comm.local_workers)], self.position.step)
            self.clock.lap("exposed")
        completed = self.after_local_step()
        self.clock.lap("update")
        return completed

    def after_local_step(self) -> CompletedExchange | None:
        """Average where a period has passed."""
        tier = self.due_tier()
        return None if tier is None else self.average(tier)

    def due_tier(self) -> int | None:
        """The largest groups whose period has passed with this step."""
        top = len(self.tiers) - 1
        if not self.count:  # a synchronous step of phase1=model
            return top
        if self.groups is None:
            return top if self.since >= (self.period or 1) else None
        return max((i for i, (period, _) in enumerate(self.groups) if self.count % period == 0), default=None)

    @torch.no_grad()
    def average(self, tier: int) -> CompletedExchange | None:
        """Average within the groups of one tier, take the outer step, and let the replicas go on from there."""
        if self.attendance is not None and self.count:
            self.attendance.average(self.since, self.round_lr)
            self.since = 0
            return None
        axis, groups = self.axis, self.tiers[tier].groups
        differences = [axis.differences(group.anchor, group.rows) for group in groups]
        completed = self.runner.run([group.exchange for group in groups], differences)
        top = tier == len(self.tiers) - 1
        outer = self.outer if top and self.count else Average()
        for group, update in zip(groups, completed.updates, strict=True):
            outer.step(group.anchor, update, self.round_lr)
            axis.restart(group.anchor, group.rows)
        for lower in [group for below in self.tiers[:tier] for group in below.groups]:
            above = next(group for group in groups if lower.rows.start in group.rows)
            torch._foreach_copy_(lower.anchor, above.anchor)
        if top:
            self.since = 0
        if top and self.count:
            treat_buffers(self.inner, self.buffers)
        return completed

    # ---- the end, and in between

    @property
    def apart(self) -> bool:
        """Whether workers differ: by steps since the last averaging, or because some were late for it."""
        return self.since > 0 or (self.attendance is not None and self.attendance.pending)

    def land(self) -> None:
        if self.attendance is not None:
            self.attendance.land()

    def consensus(self) -> list[Tensor]:
        if not self.forked or not self.apart:
            return self.axis.shared
        return self.axis.mean_replica("eval")

    def finish(self) -> None:
        """One exact average of what the workers have become since the last one."""
        if self.forked and self.apart and self.final:
            exact_average(self.axis)
            self.since = 0
            if self.attendance is not None:
                self.attendance.settled()

    def columns(self) -> dict[str, Any]:
        return {} if self.attendance is None else self.attendance.columns()

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        kept = ("since", "count", "round_lr", "period", "forked")
        taken = {} if self.attendance is None else {"quorum": self.attendance.state_dict()}
        return {**{key: getattr(self, key) for key in kept}, "outer": self.outer_state(), **taken}

    def outer_state(self) -> dict[str, dict[str, Tensor]]:
        """Buffers of the outer optimizer, by parameter name."""
        buffers = self.outer.state_dict()
        return {key: dict(zip(self.names, values, strict=True)) for key, values in buffers.items()}

    def make_state(self) -> None:
        self.outer.buffers(self.axis.shared)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["forked"] and not self.forked:
            self.fork()
        for key in ("since", "round_lr", "period", "count"):
            setattr(self, key, state[key])
        self.load_outer(state["outer"])
        if self.attendance is not None:
            self.attendance.load_state_dict(state["quorum"])

    def load_outer(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Continue from `outer_state()`."""
        outer = {key: [values[name] for name in self.names] for key, values in state.items()}
        self.outer.load_state_dict(outer, self.axis.shared)

    def worker_state(self, row: int) -> dict[str, Any]:
        anchors = {}
        for size, groups in self.tiers[:-1]:
            group = next(group for group in groups if row in group.rows)
            anchors[size] = {name: copy_on_cpu(value) for name, value in zip(self.names, group.anchor, strict=True)}
        return {"anchors": anchors}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        for size, groups in self.tiers[:-1]:
            group = next(group for group in groups if row in group.rows)
            for name, value in zip(self.names, group.anchor, strict=True):
                restore_(value, state["anchors"][size][name])
