"""PolicyRunner: collects the signals that policies request, and broadcasts the decisions that the leader makes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from accordion_bench.adaptive.policy import Policy, checked, notify_refiners
from accordion_bench.comm.on_device import copy_on_cpu, restore_
from accordion_bench.comm.replicas import Replicas
from accordion_bench.exchange.dry_exchange import compressor_input, cut_into_buckets, measure_level, probe_exchange
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange
from accordion_bench.plan import (
    WHOLE_MODEL,
    BucketStatistic,
    GradientNoise,
    Ladder,
    Measured,
    Probe,
    RecentMean,
    Request,
    RunFacts,
    Signals,
    SquareNorms,
    TrainingLoss,
    statistic_named,
)
from accordion_bench.position import Position, StepInfo
from accordion_bench.signals.statistics import BucketStatistics, GradientSums, square_norms

NORMS = "norm_of_sum_local"
MOST_DECISIONS = 1000  # decisions of a policy recorded per epoch; beyond that every second one is dropped, repeatedly
KEPT = ("compression_error", "made", "exchanges", "loss_read_at", "recent_count")
SUMMED = ("norm_of_sum_mean",)  # signals that are sums over the local workers; the others belong to the leader
BEFORE_EXCHANGE = (BucketStatistic, Probe, RecentMean)  # requests that inspect the tensors before an exchange


class Adapting(Protocol):
    """The policies of a training, and their inputs."""

    @property
    def policies(self) -> dict[str, Policy]:
        """Policies by name, in the order in which they decide."""

    @property
    def ladder(self) -> Ladder:
        """The knob's values that the plan's levels index."""

    @property
    def run(self) -> RunFacts:
        """Facts of the training."""


class BatchFacts(NamedTuple):
    """Loss and sample counts of the loop's batches.

    loss_sum: training loss of this epoch, float64 [...], as terms of a sum that the loop updates in place.
    count_samples: returns the samples per gradient of the next exchange.
    """

    loss_sum: Tensor
    count_samples: Callable[[], int]


class PolicyRunner:
    """Collects the signals of the policies of a run and applies their decisions; unrequested signals cost nothing.

    Args:
        methods: the policies; their traffic is charged to control_bytes.
        axis: replicas whose gradients and parameters are exchanged.
        position: current step and epoch of the training; its plan is replaced by the decided one.
        batches: the loss and the samples of the loop's batches.
        measure: metrics to record regardless of policies, as in the configuration.

    Attributes:
        norms: norms of the last epoch's summed gradients of worker 0, per tensor, if measured.
        compression_error: of worker 0's first message of the epoch, if measured.
        epoch_sums: signals of a whole epoch.
        statistics: of the quantiser's buckets.
        recent, recent_count: sum and number of worker 0's recent compressor inputs, including residuals.
        exchanges: number of exchanges so far.
        made: decisions after exchanges of this epoch, for the metrics row.
        unread_loss, loss_read_at: training loss of earlier epochs that `read_loss` has not returned, and its last step.
    """

    def __init__(
        self,
        methods: Adapting,
        axis: Replicas,
        position: Position,
        batches: BatchFacts,
        measure: Mapping[str, bool] | None = None,
    ) -> None:
        self.policies, self.ladder, self.warmup_epochs = methods.policies, methods.ladder, methods.run.warmup_epochs
        self.comm, self.position = axis.comm, position
        self.loss_sum, self.count_samples = batches
        self.measure = measure or {}
        self.norms: dict[str, float] = {}
        self.compression_error: float | None = None
        self.epoch_sums = GradientSums(axis.specs, axis.comm, axis.like)
        self.statistics = BucketStatistics(axis.comm)
        self.probes: dict[str, dict[int, dict[str, Measured]]] = {}
        self.square_norms: SquareNorms | None = None
        self.asked: frozenset[Request] = frozenset()
        self.recent: list[Tensor] = []
        self.recent_count = self.exchanges = self.loss_read_at = 0
        self.unread_loss = torch.zeros((), dtype=torch.float64, device=axis.like.device)
        self.made: dict[str, list[dict[str, Any]]] = {}

    # ---- signals

    def needs(self, epoch: int) -> frozenset[str]:
        """Return the signals that an epoch requires."""
        wanted = frozenset([NORMS] if self.measure.get("norms") else [])
        return wanted.union(*(policy.needs(epoch) for policy in self.policies.values()))

    def needs_at(self) -> frozenset[Request]:
        """Return the requests for the next exchange."""
        return frozenset().union(*(policy.needs_at(self.exchanges) for policy in self.policies.values()))

    def begin_epoch(self) -> None:
        """Start the epoch's sums, before the loop clears the last epoch's loss."""
        self.unread_loss += self.loss_sum.sum()
        self.compression_error = None
        for policy in self.policies.values():
            policy.begin_epoch(self.position.epoch, self.exchanges, self.position.plan)
        self.epoch_sums.begin(self.needs(self.position.epoch))

    @property
    def wanted(self) -> bool:
        """Whether a policy may want to inspect an exchange at any time."""
        return bool(self.policies) or bool(self.measure.get("error"))

    def looks(self) -> bool:
        """Whether a policy inspects the tensors of the next exchange before they are exchanged."""
        first_error = self.comm.leader and self.measure.get("error") and self.compression_error is None
        return bool(first_error) or any(isinstance(request, BEFORE_EXCHANGE) for request in self.needs_at())

    def inspect_before(self, exchanges: Sequence[Exchange], xs_W: Sequence[Sequence[Tensor]], info: StepInfo) -> None:
        """Collect signals before an exchange from the inputs of each local group, tensors [rows, ...]."""
        needs = self.asked = self.needs_at()
        if not self.wanted:
            return
        for request, count in Counter(type(request).__name__ for request in needs).items():
            self.comm.clock.event(f"{count} x {request}")
        if self.comm.leader and self.measure.get("error") and self.compression_error is None:
            self.comm.clock.event("compression error")
            self.compression_error = probe_exchange(exchanges[0], xs_W[0], info, first=True).total_error
        if statistics := frozenset(request for request in needs if isinstance(request, BucketStatistic)):
            pairs = zip(exchanges, xs_W, strict=True)
            buckets = [rows for exchange, x_W in pairs for rows in cut_into_buckets(exchange, x_W, info)]
            self.statistics.add(statistics, buckets)
        if self.comm.leader and RecentMean() in needs:
            own = compressor_input(exchanges[0], xs_W[0], info)
            self.recent = [a + b for a, b in zip(self.recent, own, strict=True)] if self.recent else own
            self.recent_count += 1
        if self.comm.leader and any(isinstance(request, Probe) for request in needs):
            looked = exchanges[0], xs_W[0], info
            self.probes = self._probe(*looked, mean=False) | self._probe(*looked, mean=True)

    def _probe(
        self, exchange: Exchange, xs_W: Sequence[Tensor], info: StepInfo, mean: bool
    ) -> dict[str, dict[int, dict[str, Measured]]]:
        """Return, by policy, bytes and error on worker 0 of the levels that it requests.

        Args:
            exchange, xs_W, info: of the next exchange.
            mean: whether to probe for the policies that use the mean of recent inputs, which is then cleared; if not,
                for those that use `xs_W`.
        """
        asked = {name: policy.needs_at(self.exchanges) for name, policy in self.policies.items()}
        asked = {name: requests for name, requests in asked.items() if (RecentMean() in requests) == mean}
        levels = {name: [r.level for r in requests if isinstance(r, Probe)] for name, requests in asked.items()}
        wanted = sorted({level for own in levels.values() for level in own})
        if mean and wanted:
            xs_W = [total / self.recent_count for total in self.recent]
            self.recent, self.recent_count = [], 0
        found = {level: measure_level(exchange, xs_W, level, info, is_input=mean) for level in wanted}
        return {name: {level: found[level] for level in own} for name, own in levels.items()}

    def inspect_after(self, exchange: Exchange, xs_W: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
        """Collect signals after an exchange from the results of the first local group."""
        if GradientNoise() in self.asked:
            self.square_norms = square_norms(exchange, xs_W, updates, self.count_samples())
        self.epoch_sums.add_updates(updates, exchange.specs)

    def units_change(self) -> None:
        """Clear sums that would mix gradients with differences of parameters, which are exchanged from now on."""
        self.recent, self.recent_count = [], 0
        self.epoch_sums.forget_updates()
        self.statistics.sums.clear()
        for policy in self.policies.values():
            policy.units_change()

    def read_loss(self) -> float:
        """Return the training loss of all workers since the last call, as a mean over steps."""
        steps = self.position.step + 1 - self.loss_read_at
        total = self.comm.sum_(self.unread_loss + self.loss_sum.sum(), "control")
        self.unread_loss, self.loss_read_at = -self.loss_sum.sum(), self.position.step + 1
        return float(total) / (steps * self.comm.workers)

    # ---- decisions

    def after_exchange(self, completed: CompletedExchange, averaging: bool) -> None:
        """Let the policies that are due change the plan, and record the error of new codebooks.

        `completed` is of the first local group; `averaging`: whether it was an averaging of local steps.
        """
        policies = {name: policy for name, policy in self.policies.items() if policy.due(self.exchanges)}
        if policies:
            position = self.position
            needs = frozenset().union(*(policy.needs_at(self.exchanges) for policy in policies.values()))
            lr, next_lr = (position.lr(position.step_in_epoch + ahead) for ahead in (0, 1))
            signals = Signals(
                position.epoch,
                lr,
                next_lr,
                step=position.step,
                exchange=self.exchanges,
                steps_left=position.steps_left - 1,
                warming_up=position.at(position.step_in_epoch + 1) < self.warmup_epochs,
                statistics=self.statistics.read(needs),
                loss=self.read_loss() if TrainingLoss() in needs else None,
                square_norms=self.square_norms,
                local=averaging,
            )
            decisions = self._agree(policies, signals)
            if books := position.plan.codebooks:
                levels = torch.tensor([level for book in books.values() for level in book], dtype=torch.float32)
                self.comm.agree(int(levels.view(torch.int32).sum(dtype=torch.int64)), "the codebooks")
            for name, decision in decisions.items():
                if policies[name].drives == "codebook":
                    found = probe_exchange(completed.exchange, completed.xs_W, position.info(lr))
                    decision["measured_error"] = found.total_error
                made = self.made.setdefault(name, [])
                made.append(decision)
                if len(made) > MOST_DECISIONS:
                    del made[1:-1:2]
        self.probes, self.square_norms = {}, None
        self.exchanges += 1

    def end_epoch(self) -> dict[str, Any]:
        """Let the policies that decide per epoch change the plan; returns the decisions of this epoch, by policy."""
        decisions: dict[str, Any] = {name: {"updates": made} for name, made in self.made.items()}
        self.made = {}
        sums = self.epoch_sums.read()
        self.norms = {name: norm for name, norm in sums.get(NORMS, {}).items() if name != WHOLE_MODEL}
        policies = {name: policy for name, policy in self.policies.items() if policy.when == "epoch"}
        if not policies:
            return decisions
        position = self.position
        lr, following = position.lr(0), position.epoch + 1
        signals = Signals(
            position.epoch,
            lr,
            position.lr(0, following) if following < position.epochs else lr,
            sums,
            position.step,
            self.exchanges,
            position.steps_left,
            epoch_steps=position.step_in_epoch,
            end_lr=position.end_lr(),
        )
        return decisions | self._agree(policies, signals)

    def measured(self) -> dict[str, Any]:
        """Return the columns that `measure` requests, for the epoch that has ended."""
        columns: dict[str, Any] = {"norms": self.norms} if self.measure.get("norms") else {}
        return columns | ({"compression_error": self.compression_error} if self.measure.get("error") else {})

    def _agree(self, policies: dict[str, Policy], signals: Signals) -> dict[str, Any]:
        """Update the plan on the leader and broadcast it; returns the decisions."""
        decisions, plan = {}, self.position.plan
        self.comm.clock.event("decision")
        if self.comm.leader:
            for name, policy in policies.items():
                own = replace(signals, probes=self.probes.get(name, {}))
                before, plan = plan, checked(name, plan, policy.update(own, plan), self.ladder)
                if plan is not before:
                    notify_refiners(list(self.policies.values()), policy, plan)
                if before.lr_factor and plan.lr_factor != before.lr_factor:  # for the policies after this one
                    signals = replace(signals, next_lr=signals.next_lr * plan.lr_factor / before.lr_factor)
                if decision := policy.decision():
                    decisions[name] = decision
        numbers = torch.tensor(plan.pack(), dtype=torch.float32, device=self.comm.device)
        self.comm.broadcast_([numbers], "control")
        self.position.plan = plan.unpack(numbers.tolist())
        return decisions

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state that all workers share."""
        return {
            "policies": {name: policy.state_dict() for name, policy in self.policies.items()},
            "signals": sorted(self.needs(self.position.epoch)),
            **{key: getattr(self, key) for key in KEPT},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, policy in self.policies.items():
            policy.load_state_dict(state["policies"][name])
        for key in KEPT:
            setattr(self, key, state[key])
        self.epoch_sums.begin(frozenset(state["signals"]))

    def worker_state(self, row: int) -> dict[str, Any]:
        """Return one local worker's share of the sums; sums over the local workers belong to the first one."""
        first, nothing = row == 0, torch.zeros((), dtype=torch.float64)
        sums = self.epoch_sums.state_dict() if first else {}
        return {
            "signals": {name: total for name, total in sums.items() if self.comm.leader or name in SUMMED},
            "statistics": {asked.name: copy_on_cpu(total[row]) for asked, total in self.statistics.sums.items()},
            "recent": [copy_on_cpu(x) for x in self.recent] if first else [],
            "unread_loss": copy_on_cpu(self.unread_loss) if first else nothing,
        }

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        device = self.comm.device
        self.epoch_sums.add_state(state["signals"])
        for name, total in state["statistics"].items():
            empty = torch.zeros(self.comm.local_workers, *total.shape, dtype=total.dtype)
            restore_(self.statistics.sums.setdefault(statistic_named(name), empty)[row], total)
        if state["recent"]:
            self.recent = [x.to(device) for x in state["recent"]]
        self.unread_loss += state["unread_loss"].to(device)
