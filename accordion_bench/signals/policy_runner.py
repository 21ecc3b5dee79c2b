"""Decisions: what policies want to know, collected; what they decide, taken once on the leader and broadcast."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accordion_bench.adaptive.base import Policy, tell_followers
from accordion_bench.comm.collectives import Comm
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.plan import WHOLE_MODEL, Measured, Signals, SquareNorms, TensorSpec
from accordion_bench.signals.bucket_statistics import BucketStatistics
from accordion_bench.signals.gradient_sums import GradientSums
from accordion_bench.signals.square_norms import square_norms

if TYPE_CHECKING:
    from accordion_bench.training.trainer import Trainer

NORMS = "norm_of_sum_local"
BUCKET_STATISTICS = ("bucket_moments", "pooled_moments", "histogram")


class Decisions:
    """Stands between the trainer and its policies; what nobody wants to know costs nothing.

    Args:
        policies: by name, in order.
        specs: the trained tensors.
        comm: collectives; what policies cost is charged to control_bytes.
        like: gives type and device.
        measure: what is to be recorded whatever policies want to know, as in the configuration.

    Attributes:
        norms: of the last epoch's summed gradients of worker 0, per tensor, where measured.
        compression_error: of worker 0's first message of the epoch, where measured.
        epoch_sums: signals of a whole epoch.
        statistics: of the quantiser's buckets.
        recent, recent_count: sum of what worker 0 would have sent in the last exchanges, residual included.
        exchanges: made so far.
        made: what was decided after exchanges of this epoch, for the metrics row.
        unread_loss, loss_read_at: training loss of earlier epochs that `read_loss` has not seen, and its last step.
    """

    def __init__(
        self,
        policies: dict[str, Policy],
        specs: Sequence[TensorSpec],
        comm: Comm,
        like: Tensor,
        measure: dict[str, bool] | None = None,
    ) -> None:
        self.policies, self.comm = policies, comm
        self.measure = measure or {}
        self.norms: dict[str, float] = {}
        self.compression_error: float | None = None
        self.epoch_sums = GradientSums(specs, comm, like)
        self.statistics = BucketStatistics(comm)
        self.probes: dict[int, dict[str, Measured]] = {}
        self.square_norms: SquareNorms | None = None
        self.asked: frozenset[str] = frozenset()
        self.recent: list[Tensor] = []
        self.recent_count = self.exchanges = self.loss_read_at = 0
        self.unread_loss = torch.zeros((), dtype=torch.float64, device=like.device)
        self.made: dict[str, list[dict[str, Any]]] = {}

    # ---- what they want to know

    def needs(self, epoch: int) -> frozenset[str]:
        """Of an epoch."""
        wanted = frozenset([NORMS] if self.measure.get("norms") else [])
        return wanted.union(*(policy.needs(epoch) for policy in self.policies.values()))

    def needs_at(self) -> frozenset[str]:
        """Of the exchange that is to come."""
        return frozenset().union(*(policy.needs_at(self.exchanges) for policy in self.policies.values()))

    def begin_epoch(self, trainer: "Trainer") -> None:
        """Start the epoch's sums; the trainer is about to forget the last epoch's loss."""
        self.unread_loss += trainer.loss_sum
        self.compression_error = None
        for policy in self.policies.values():
            policy.begin_epoch(trainer.epoch, self.exchanges, trainer.plan)
        self.epoch_sums.begin(self.needs(trainer.epoch))

    @property
    def wanted(self) -> bool:
        """Whether anybody may want to look at an exchange, at any time."""
        return bool(self.policies) or bool(self.measure.get("error"))

    def looks(self) -> bool:
        """Whether somebody is to look at the coming exchange's tensors before they are exchanged."""
        first_error = self.comm.leader and self.measure.get("error") and self.compression_error is None
        return bool(first_error) or any(
            name == "recent" or name.startswith((*BUCKET_STATISTICS, "probe:")) for name in self.needs_at()
        )

    def look_at(
        self, trainer: "Trainer", exchanges: Sequence[Exchange], xs_W: Sequence[Sequence[Tensor]], lr: float
    ) -> None:
        """Before an exchange: look at what each local group is to exchange, tensors [rows, ...]."""
        needs, plan = self.needs_at(), trainer.plan
        self.asked = needs
        if self.comm.leader and self.measure.get("error") and self.compression_error is None:
            probe = exchanges[0].probe(xs_W[0], plan, trainer.step, trainer.now, lr, first=True)
            self.compression_error = probe.total_error
        if statistics := frozenset(name for name in needs if name.startswith(BUCKET_STATISTICS)):
            pairs = zip(exchanges, xs_W, strict=True)
            buckets = [rows for e, x_W in pairs for rows in e.quantised(x_W, plan, trainer.step, trainer.now)]
            self.statistics.add(statistics, buckets)
        levels = sorted(int(name.removeprefix("probe:")) for name in needs if name.startswith("probe:"))
        if self.comm.leader and "recent" in needs:
            own = exchanges[0].fed(xs_W[0], plan, trainer.step, trainer.now, lr)
            self.recent = [a + b for a, b in zip(self.recent, own, strict=True)] if self.recent else own
            self.recent_count += 1
        if self.comm.leader and levels:
            self.probes = self._probed(trainer, exchanges[0], xs_W[0], levels, lr, "recent" in needs)

    def _probed(
        self,
        trainer: "Trainer",
        exchange: Exchange,
        xs_W: Sequence[Tensor],
        levels: Sequence[int],
        lr: float,
        mean: bool,
    ) -> dict[int, dict[str, Measured]]:
        """What some levels would cost and lose on worker 0; of `xs_W`, or of the mean of the recent exchanges."""
        if mean:
            xs_W = [total / self.recent_count for total in self.recent]
            self.recent, self.recent_count = [], 0
        step, now = trainer.step, trainer.now
        return {i: exchange.measured(xs_W, i, trainer.plan, step, now, lr, fed=mean) for i in levels}

    def look_back(
        self, trainer: "Trainer", exchange: Exchange, xs_W: Sequence[Tensor], updates: Sequence[Tensor]
    ) -> None:
        """After the exchange: look at what the first local group has got."""
        if "square_norms" in self.asked:
            samples = len(trainer.sampler.batch(self.comm.first_worker, trainer.step_in_epoch))
            self.square_norms = square_norms(exchange, xs_W, updates, samples)
        self.epoch_sums.add_updates(updates)

    def units_change(self) -> None:
        """From here on differences of parameters are exchanged, no more gradients: forget sums that would mix both."""
        self.recent, self.recent_count = [], 0
        self.epoch_sums.forget_updates()

    def read_loss(self, trainer: "Trainer") -> float:
        """Training loss of all workers since it was last read, mean over steps."""
        steps = trainer.step + 1 - self.loss_read_at
        total = self.comm.sum_(self.unread_loss + trainer.loss_sum, "control")
        self.unread_loss, self.loss_read_at = -trainer.loss_sum, trainer.step + 1
        return float(total) / (steps * self.comm.workers)

    # ---- what they decide

    def after_exchange(self, trainer: "Trainer", exchange: Exchange, xs_W: Sequence[Tensor]) -> None:
        """Let the policies that are due edit the plan, and note what new codebooks cost in error.

        Args:
            trainer: whose plan is edited.
            exchange: the one that has been made, of the first local group.
            xs_W: what it has exchanged.
        """
        policies = {name: policy for name, policy in self.policies.items() if policy.due(self.exchanges)}
        if policies:
            needs = frozenset().union(*(policy.needs_at(self.exchanges) for policy in policies.values()))
            lr, next_lr = (trainer.lr(trainer.step_in_epoch + ahead) for ahead in (0, 1))
            signals = Signals(
                trainer.epoch,
                lr,
                next_lr,
                step=trainer.step,
                exchange=self.exchanges,
                steps_left=trainer.steps_left - 1,
                warming_up=trainer.at(trainer.step_in_epoch + 1) < trainer.run.warmup_epochs,
                statistics=self.statistics.read(needs),
                loss=self.read_loss(trainer) if "loss" in needs else None,
                probes=self.probes,
                square_norms=self.square_norms,
                local=trainer.sync.averaging,
            )
            decisions = self._agreed(trainer, policies, signals)
            if books := trainer.plan.codebooks:
                levels = torch.tensor([level for book in books.values() for level in book], dtype=torch.float32)
                self.comm.agree(int(levels.view(torch.int32).sum(dtype=torch.int64)), "the codebooks")
            for name, decision in decisions.items():
                if policies[name].drives == "codebook":
                    probe = exchange.probe(xs_W, trainer.plan, trainer.step, trainer.now, lr)
                    decision["measured_error"] = probe.total_error
                self.made.setdefault(name, []).append(decision)
        self.probes, self.square_norms = {}, None
        self.exchanges += 1

    def end_epoch(self, trainer: "Trainer") -> dict[str, Any]:
        """Let the policies that decide per epoch edit the plan; returns what was decided in this epoch, by policy."""
        decisions: dict[str, Any] = {name: {"updates": made} for name, made in self.made.items()}
        self.made = {}
        sums = self.epoch_sums.read()
        self.norms = {name: norm for name, norm in sums.get(NORMS, {}).items() if name != WHOLE_MODEL}
        policies = {name: policy for name, policy in self.policies.items() if policy.when == "epoch"}
        if not policies:
            return decisions
        signals = Signals(
            trainer.epoch,
            trainer.lr(0),
            trainer.lr(0, trainer.epoch + 1),
            sums,
            trainer.step,
            self.exchanges,
            trainer.steps_left,
            epoch_steps=trainer.step_in_epoch,
        )
        return decisions | self._agreed(trainer, policies, signals)

    def measured(self) -> dict[str, Any]:
        """Columns that `measure` asks for, of the epoch that has ended."""
        columns: dict[str, Any] = {"norms": self.norms} if self.measure.get("norms") else {}
        return columns | ({"compression_error": self.compression_error} if self.measure.get("error") else {})

    def _agreed(self, trainer: "Trainer", policies: dict[str, Policy], signals: Signals) -> dict[str, Any]:
        """Update on the leader, then broadcast; returns what was decided."""
        decisions, plan = {}, trainer.plan
        if self.comm.leader:
            for name, policy in policies.items():
                before, plan = plan, policy.update(signals, plan)
                if plan is not before:
                    tell_followers(list(self.policies.values()), policy, plan)
                if before.lr_factor and plan.lr_factor != before.lr_factor:  # for the policies after this one
                    signals = replace(signals, next_lr=signals.next_lr * plan.lr_factor / before.lr_factor)
                if decision := policy.decision():
                    decisions[name] = decision
        numbers = torch.tensor(plan.pack(), dtype=torch.float32, device=self.comm.device)
        self.comm.broadcast_([numbers], "control")
        trainer.plan = plan.unpack(numbers.tolist())
        return decisions
