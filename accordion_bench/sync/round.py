"""Rounds of local methods: a schedule of exchanges (`When`), a group of workers (`All`) and an outer optimizer.

    x_w   parameters of worker w (a replica)      z   the last consensus      H   period

Workers send differences z - x_w instead of x_w, so that the exchange can compress them and store the error as a
residual in the units of the parameters.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange
from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import option, with_options
from accordion_bench.options.units import counted
from accordion_bench.plan import Plan, RunFacts, TensorSpec
from accordion_bench.position import Rate
from accordion_bench.sync.every_step import EveryStep
from accordion_bench.sync.late_processes import LateProcesses
from accordion_bench.sync.outer import Average, exact_average, treat_buffers
from accordion_bench.sync.quorum import DrawnLateness, Lateness, Quorum
from accordion_bench.sync.scheme import Placed, Sync, SyncContext
from accordion_bench.sync.what import InFlight, SparseAverage, fragments, layers_of
from accordion_bench.sync.when import When
from accordion_bench.sync.who import All, Pairs, Tier, refuse_groups


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Sync.description.idle(cls, options, context)
    if options.get("switch_step") == 0:
        yield "phase1", "sync.switch_step is 0"
    if context.workers == 1:
        yield "sparta", "a lone worker has no other to average with"


def _smoke_options(options: Config, knob: str) -> Config:
    return {"groups": [[1, 2], [2, 4]]} if options.get("groups") else {"period": 2}


@with_options
class Round(Sync):
    """Local steps of the inner optimizer on each worker, with averagings at the steps of `when`, among `who`:

        z <- outer(z, mean(z - x_w));   x_w <- (1 - pull) x_w + pull z

    A new scheme is a class in one file and a YAML file:

        class Halves(Round):
            def __init__(self, period=8):
                super().__init__(When(period), outer=OuterSGD(outer_lr=0.5))

    Args:
        when: schedule of a round.
        who: the workers that average; None = all.
        outer: outer optimizer; None = the mean is used unchanged.
        pull: step of the workers towards z, in [0, 1]; 1 = they restart at z.

    Every preset has the options `period`, `switch_step` (S) and `final`. It calls `super().__post_init__()`, which
    checks them, then `super().__init__(...)`. Some presets declare more options:
        phase1: tensors that synchronous steps average: `gradient` (one inner optimizer) or `model` (one per worker).
        buffers: treatment of the inner optimizers' buffers at an averaging of all workers: `keep`, `reset` or
            `average`; None = as in the paper.
        sparta: fraction of the coordinates that are averaged after each local step, before an averaging; None = none.
        quorum, grace, lateness: see `Lateness`.
        elastic, min_workers: whether processes may be lost and enter, and the lower bound of the number of workers;
            see `ElasticMembership`.

    Attributes:
        since: number of steps since the last averaging of all workers.
        count: number of local steps so far, without synchronous ones.
        round_lr: inner learning rate at the start of this round.
        tensors: indices of the tensors of each fragment.
    """

    description = replace(Sync.description, idle=_idle, smoke_options=_smoke_options)

    local = True
    keeps: ClassVar[tuple[str, ...]] = (
        *("forked", "since", "count", "round_lr", "period"),
        *("outer_buffers", "in_flight", "attendance"),
    )
    period: int | None = option("steps between averagings; longer = fewer bytes", default=8, at_least=1)
    switch_step: int | None = option(
        "synchronous steps before; null = until the first decay of the learning rate", default=0, at_least=0
    )
    final: bool = option("average all after the last step", default=True)
    phase1: str = field(init=False, default="gradient")
    buffers: str | None = field(init=False, default=None)
    sparta: float | None = field(init=False, default=None)
    quorum: int | None = field(init=False, default=None)
    grace: float | None = field(init=False, default=None)
    lateness: float | None = field(init=False, default=None)
    elastic: bool = field(init=False, default=False)
    min_workers: int | None = field(init=False, default=None)

    def __init__(self, when: When, who: All | None = None, outer: Average | None = None, pull: float = 1.0) -> None:
        self.when, self.who, self.outer, self.pull = when, who or All(when.groups), outer or Average(), pull
        self.period, self.groups = checks.integer("period", when.period, at_least=1, instead=8), when.groups or None
        by_the_clock = self.quorum is not None and self.lateness is None
        self.weighs = not isinstance(self.who, Pairs) and not by_the_clock and not self.elastic
        self.required_facts = frozenset() if self.switch_step is not None else frozenset({"epochs", "schedule"})
        self.gradient_exchange = self.phase1 == "gradient" and self.switch_step != 0
        self.fragments, self.partial = when.slots, when.slots > 1
        self.tensors: list[list[int]] = []
        self.in_parts: list[Exchange] = []
        self.sparse: SparseAverage | None = None
        self.attendance: Quorum | None = None
        self.since = self.count = 0
        self.round_lr = 0.0
        self.tier = -1  # tier of the averages in flight
        self.forked = self.finished = False

    def check(self, run: RunFacts, workers_per_process: int) -> None:
        super().check(run, workers_per_process)
        if self.switch_step is None and run.first_drop() is None:
            rule = "a number of steps where the learning rate never drops at once, to 0.7 or less"
            raise ValueRefused("sync.switch_step", rule, None, run.steps // 2)
        if self.switch_step and self.switch_step >= run.steps:
            rule = f"below {run.steps}, the steps of the run, or workers would never take a step of their own"
            raise ValueRefused("sync.switch_step", rule, self.switch_step, run.steps // 2)
        if self.groups is not None:
            refuse_groups(self.groups, run, workers_per_process)
        self.waiting.refuse_in_run(run.workers, workers_per_process)
        if self.elastic:
            self._refuse_in_elastic_run()

    def _refuse_in_elastic_run(self) -> None:
        for key, good in (("switch_step", 0), ("buffers", "keep"), ("sparta", None), ("quorum", None)):
            value = getattr(self, key)
            if value in (good, None) or (key == "buffers" and value == "reset"):
                continue
            rule = f"{checks.show(good)} where workers may join and leave (sync.elastic)"
            raise ValueRefused(f"sync.{key}", rule, value, good)

    @property
    def waiting(self) -> Lateness:
        """Rule that decides for which workers an averaging waits."""
        return Lateness(self.quorum, self.grace, self.lateness)

    def refuse_tensors(self, specs: Sequence[TensorSpec]) -> None:
        most = len(layers_of(specs).layers)
        if self.partial and self.fragments > most:
            fitting = [p for p in range(1, most + 1) if (self.period or 1) % p == 0]
            rule = f"at most {most}, because the model has {counted(most, 'layer')}"
            raise ValueRefused("sync.fragments", rule, self.fragments, max(fitting, default=1))

    def refuse_driven(self, drivers: Mapping[str, str], run: RunFacts) -> None:
        super().refuse_driven(drivers, run)
        for what, name in drivers.items():
            if what and self.quorum is not None:
                rule = f"{{null}} where adaptive={name} drives the {what}, because policies look at exchanges of all"
                raise ValueRefused("sync.quorum", rule, self.quorum, None)
        if "batch" not in drivers:
            return
        step, drop = self.switch_step, run.first_drop()
        if step or (step is None and drop is None):
            until = "{null} (until the first drop of the learning rate) or " if drop is not None else ""
            rule = f"{until}0 where adaptive={drivers['batch']} drives the batch and with it the steps per epoch"
            raise ValueRefused("sync.switch_step", rule, step, 0 if drop is None else None)

    def local_steps(self, run: RunFacts) -> int:
        if self.switch_step is None:
            return run.steps - (run.first_drop() or 0) * run.steps_per_epoch()
        return run.steps - self.switch_step

    def averagings(self, steps: int) -> list[int]:
        sent = self.when.sent(steps, self.when.period)
        return [len(range(p, sent, self.fragments)) for p in range(self.fragments)]

    def buffer_interval(self, key: str) -> int:
        return 1 if self.buffers == "average" else 0

    def buffer_averagings(self, steps: int, period: int, key: str) -> int:
        at_the_switch, interval = self.phase1 == "model" and self.switch_step != 0, self.buffer_interval(key)
        return (self.when.used(steps, period) + at_the_switch) // interval if interval else 0

    def ends_apart(self, steps: int, period: int) -> bool:
        period = self.when.period if self.groups else period
        return self.final and (steps % period > 0 if self.meets else steps > 0)

    def start(self, plan: Plan) -> Plan:
        return replace(plan, period=self.period or 1)

    def begin(self, context: SyncContext) -> None:
        super().begin(context)
        self.waiting.refuse_unheard(context)
        self.refuse_tensors(self.axis.specs)
        self.tensors = fragments(self.axis.specs, self.fragments)
        self.split = self.tensors if self.partial else None
        self.in_flight = InFlight(self.runner)
        if self.buffers is None:
            self.buffers = "reset" if self.outer.resets(self.inner) else "keep"
        self.every_step = EveryStep()
        if self.gradient_exchange:
            self.every_step.begin(context)
        if self.sparta is not None:
            self.sparse = self.sparse_average(self.comm)
        self.switch = context.run.first_drop() if self.switch_step is None else None
        if not self.gradient_exchange:
            self.fork()

    def fork(self) -> None:
        """Give each worker its own parameters and inner optimizer."""
        self.axis.fork()
        self.inner.fork()
        self.who.begin(self.runner, self.outer, self.split)
        self.in_parts = [self.exchange.part(p, own) for p, own in enumerate(self.split or [])]
        self.in_flight.updates = self.at_the_start()
        self.every_step = EveryStep()  # discards its residuals
        if self.waiting.leaves_out(self.comm.workers):
            kind = LateProcesses if self.lateness is None else DrawnLateness
            self.attendance = kind(self.context, self.exchange, self.outer, self.buffers or "keep", self.waiting)
        self.forked = True

    def at_the_start(self) -> list[Tensor]:
        """Return the averages in flight at the start, when all workers are equal."""
        return [torch.zeros_like(value) for value in self.axis.shared] if self.when.in_next_round else []

    def sparse_average(self, comm: Comm) -> SparseAverage:
        """Create the exchange that averages the fraction `sparta` of the coordinates."""
        sparse = SparseAverage(self.sparta or 1.0, self.axis.specs, comm, self.axis.like, self.runner.seed)
        sparse.finite = self.runner.finite
        return sparse

    def new_exchange(self, comm: Comm | None = None) -> Exchange:
        return self.who.new_exchange(self.runner, comm or self.comm, self.split)

    def between(self) -> list[Exchange]:
        return [self.sparse] if self.sparse else []

    def exchanges(self) -> list[Placed]:
        return self.who.placed() if self.forked else self.every_step.exchanges()

    @property
    def tiers(self) -> list[Tier]:
        """Groups with local workers, by size."""
        return self.who.tiers

    @property
    def exchange(self) -> Exchange:
        return self.who.exchange if self.who.tiers else self.every_step.exchange

    @property
    def parts(self) -> list[Exchange]:
        return self.in_parts or super().parts

    # ---- the steps

    def gradient_exchange_of_next_step(self) -> Exchange | None:
        return None if self.forked or self.switched() else self.every_step.exchange

    @property
    def averaging(self) -> bool:
        return self.count > 0

    def switched(self) -> bool:
        """Return whether the synchronous steps are over."""
        if self.switch is not None:
            return self.position.now >= self.switch
        return self.position.step >= (self.switch_step or 0)

    def before_step(self, lr: Rate) -> CompletedExchange | None:
        local = self.switched()
        if local and not self.forked:
            self.runner.units_change()
            self.fork()
        if not self.forked:
            return self.every_step.before_step(lr)
        if local and not self.count and (self.phase1 == "model" or self.buffers == "reset"):
            self.treat_buffers()  # the last synchronous step averaged, too
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
            self.land()  # collectives must not run concurrently
            self.clock.waits(self.sparse.kind)
            self.sparse.average_([self.axis.values(row) for row in range(self.comm.local_workers)], self.position.step)
            self.clock.lap("exposed")
        completed = self.after_local_step()
        self.clock.lap("update")
        return completed

    def after_local_step(self) -> CompletedExchange | None:
        """Apply averages whose delay is over, send those that are due, and start a new round at the end of one."""
        period, completed = self.period or 1, None
        if self.in_flight and self.when.uses(self.since, period):
            self.clock.event("use")
            self.use()
        # synchronous steps average models
        due = self.when.sends(self.since, period) if self.count else len(self.tiers) - 1
        if due is not None and self.tiers:
            completed = self.average(due)
        if (self.since >= period or not self.count) and self.tiers:
            self.since = 0
        return completed

    @torch.no_grad()
    def average(self, tier: int) -> CompletedExchange | None:
        """Send the differences of the workers; return the exchange if it was blocking."""
        if self.attendance is not None and self.count:
            self.attendance.average(self.since, self.round_lr)
            return None
        self.tier = tier
        message = self.who.message(tier, self.fragment)
        self.prepare(message)
        exchanges = self.in_parts[self.turn :][:1] or [group.exchange for group in self.tiers[tier].groups]
        completed = self.who.send(self.in_flight, exchanges, message, self.when.delay != 0)
        if self.when.delay == 0:
            self.use()
        return completed

    def prepare(self, message: Sequence[list[Tensor]]) -> None:
        """Modify the message in place before it is sent: tensors [rows, ...] of each group."""

    @torch.no_grad()
    def use(self) -> None:
        """Apply the averages in flight by outer steps, and pass the new z to the workers."""
        groups, own = self.tiers[self.tier].groups, self.fragment
        of_all = self.tiers[self.tier] is self.tiers[-1] and self.count > 0
        for group, update in zip(groups, self.who.differences(self.in_flight, self.tier), strict=True):
            outer = group.outers[self.turn if self.partial else 0] if of_all else Average()
            outer.step(group.values(own), update, self.round_lr)
            self.learn(group.values(own), group.rows)
        self.who.inherit(self.tier)
        if of_all:
            self.treat_buffers()

    def treat_buffers(self) -> None:
        """Keep, reset or average the inner optimizers' buffers at an averaging of all workers."""
        treat_buffers(self.inner, self.buffers or "keep")

    def learn(self, z: list[Tensor], rows: range) -> None:
        """Move some local workers to a new z, or towards it; see `pull`."""
        if self.pull == 1:
            self.axis.restart(z, rows, self.fragment)
        else:
            self.axis.pull(z, self.pull, self.fragment)

    @property
    def turn(self) -> int:
        """Number of the fragment of the slot that contains the last step."""
        return (self.since - 1) // self.when.slot(self.period or 1)

    @property
    def fragment(self) -> list[int] | None:
        """Indices of the tensors of this fragment; None = all."""
        return self.tensors[self.turn] if self.partial else None

    @property
    def meets(self) -> bool:
        """Whether all workers are equal at the end of a round."""
        return self.who.one_mean and self.pull == 1 and not self.partial and not self.when.in_next_round

    @property
    def apart(self) -> bool:
        """Whether workers differ: after local steps, or because some were late for the last averaging."""
        if not self.meets:
            return self.forked and not self.finished
        return self.since > 0 or (self.attendance is not None and self.attendance.pending)

    def land(self) -> None:
        self.in_flight.land()
        if self.attendance is not None:
            self.attendance.land()

    def consensus(self) -> list[Tensor]:
        return self.who.consensus() if self.forked and self.apart else self.axis.shared

    def finish(self) -> None:
        """Average the parameters of all workers exactly; discard averages in flight."""
        self.in_flight.land()
        if self.forked and self.apart and self.final:
            self.in_flight.drop()
            exact_average(self.axis)
            self.since, self.finished = 0, True
            if self.attendance is not None:
                self.attendance.settled()

    def resized(self) -> None:
        self.who.resized()
        for part in self.in_parts:
            part.resized()

    def columns(self) -> dict[str, Any]:
        own = {} if self.attendance is None else self.attendance.columns()
        return own | super().columns()

    @property
    def outer_buffers(self) -> list[Tensor]:
        """Buffers of the outer optimizers."""
        return self.who.outer_buffers(self.split)

    def own(self, row: int) -> dict[str, Any]:
        return self.who.own(row)

    def derived(self) -> list[Tensor]:
        """Return buffers of the outer optimizer that exist only after the switch, and are not in an earlier state."""
        return [] if self.forked else copy.deepcopy(self.outer).buffers(self.axis.shared)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("forked") and not self.forked:
            self.fork()
        super().load_state_dict(state)
