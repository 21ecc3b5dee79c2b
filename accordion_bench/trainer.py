"""The loop: one training step reads from top to bottom."""

import contextlib
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accordion_bench import checkpoint, config
from accordion_bench.adaptive.base import Policy
from accordion_bench.axis import WorkerAxis
from accordion_bench.build import build
from accordion_bench.comm import Comm
from accordion_bench.compressors.base import NonFinite
from accordion_bench.exchange import Exchange, levelled, sent_specs
from accordion_bench.interrupt import Interrupted, Stopper
from accordion_bench.plan import Plan, Signals, plan_record
from accordion_bench.progress import Progress
from accordion_bench.record import RunFolder, log
from accordion_bench.rng import kept_rng, key, seeded
from accordion_bench.sampler import Sampler
from accordion_bench.signals import GradientSums
from accordion_bench.statistics import BucketStatistics
from accordion_bench.trackers.base import Tracker

METRIC = "accuracy"
EVAL_BATCH = 512
RECOMPUTE_BATCHES = 128


class Trainer:
    """Trains one configuration; every process of a run has one.

    Args:
        cfg: the resolved configuration.
        comm: this process's view of all workers.
        folder: the run folder; only the leader writes there, except for checkpoints.

    Attributes, by role:
        what is trained: axis (model, gradients, buffers), optimizer, schedule, data, sampler
        what is exchanged: exchange, sync, comm
        what adapts: plan, ladder, policies, signals, statistics, step_decisions
        where it stands: epoch, step, step_in_epoch, loss_sum, best, to_target
        what is told: clock, folder, progress, tracker, stopper
    """

    def __init__(self, cfg: dict[str, Any], comm: Comm, folder: RunFolder, stopper: Stopper | None = None) -> None:
        self.cfg, self.comm, self.folder, self.stopper = cfg, comm, folder, stopper or Stopper()
        self.device, self.clock = comm.device, comm.clock
        seed = cfg["seed"]
        parts = config.components(cfg, comm.workers)

        self.data = parts.dataset.load(cfg["paths"]["data"], seed, self.device)
        self.sampler = Sampler(self.data.train_size, comm.workers, seed, parts.dataset.sharding)
        with seeded(key(seed, "model")):
            model = config.build_model(cfg, parts.dataset)
        model = model.to(self.device)
        comm.broadcast_([*model.parameters(), *model.buffers()], "setup")
        self.axis = WorkerAxis(model, comm, seed, cfg["bn"])
        self.schedule, self.sync = parts.schedule, parts.sync
        wrapped = parts.wrapped
        self.optimizer = config.build_optimizer(cfg, wrapped.compressor, self.axis.params)

        specs, like = self.axis.specs, self.axis.params[0]
        self.policies, self.ladder = parts.policies, parts.ladder
        sent = sent_specs(specs, wrapped.scope, wrapped.block_size)
        weakest = len(self.ladder.values) - 1
        levels = dict.fromkeys(levelled(wrapped.compressor, sent), weakest)
        self.plan = Plan(levels, cfg["batch_size"], codebooks=parts.codebooks)
        for policy in self.policies.values():
            self.plan = policy.start(self.plan, self.ladder)
        self.exchange = Exchange(
            wrapped.compressor, specs, self.ladder, comm, like, seed, **wrapped.for_exchange
        )
        self.signals = GradientSums(specs, comm, like)
        self.statistics = BucketStatistics(comm)
        self.step_decisions: dict[str, list[dict[str, Any]]] = {}

        self.epoch = self.step = self.step_in_epoch = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.best = -math.inf
        self.to_target: dict[str, float] = {}
        self.progress = Progress(comm.leader)
        self.tracker: Tracker = build(cfg["tracker"], "tracker")

    # ---- one step

    def train_step(self) -> None:
        """One optimizer step of all workers."""
        comm, axis, lr = self.comm, self.axis, self.lr(self.step_in_epoch)
        losses = []
        with kept_rng(self.device):
            for row in range(comm.local_workers):
                indices = self.sampler.batch(comm.first_worker + row, self.step_in_epoch)
                x, y = self.data.train_batch(indices.to(self.device))
                self.clock.lap("data")
                losses.append(self._backward(row, x, y))
                self.clock.lap("compute")
        loss = torch.stack(losses)
        self.loss_sum += loss.double().sum()
        self.clock.lap("compute")
        self.signals.add_gradients(axis.gradients_W)
        self.clock.lap("policy")
        comm.ledger.dense_step(self.exchange.numel)
        try:
            self.refuse_non_finite(loss)
            if needs := frozenset().union(*(policy.needs_at(self.step) for policy in self.policies.values())):
                self.statistics.add(needs, self.exchange.buckets(axis.gradients_W, self.plan, self.step, self.now))
                self.clock.lap("policy")
            self.sync.step(self, lr)
        except NonFinite as bad:
            raise NonFinite(
                f"step {self.step} (epoch {self.epoch}): {bad}; try a smaller optimizer.lr, now {lr:g} after schedule "
                "and scaling"
            ) from None
        due = {name: policy for name, policy in self.policies.items() if policy.due(self.step)}
        if due:
            self.decide_now(due)
            self.clock.lap("policy")
        self.step += 1
        self.step_in_epoch += 1
        self.clock.warm = True

    def _backward(self, row: int, x: Tensor, y: Tensor) -> Tensor:
        size = self.cfg["micro_batch_size"] or len(y)
        xs, ys = x.split(size), y.split(size)

        def share_of_loss(i: int) -> Tensor:
            return F.cross_entropy(self.axis.model(xs[i]), ys[i]) * (len(ys[i]) / len(y))

        return self.axis.backward(row, self.step, share_of_loss, len(xs))

    def refuse_non_finite(self, loss_W: Tensor) -> None:
        """Stop before anything is exchanged.

        Raises:
            NonFinite: naming the worker, its loss and the first parameter.
        """
        if not bool(loss_W.isfinite().all()):
            row = int((~loss_W.isfinite()).nonzero()[0])
            bad = f"the loss of worker {self.comm.first_worker + row} is {loss_W[row].item()}"
            gradient = self.exchange.non_finite(self.axis.gradients_W)
            raise NonFinite(bad + (f", and {gradient} is not finite" if gradient else ""))

    def lr(self, step_in_epoch: int, epoch: int | None = None) -> float:
        """Learning rate of a step: optimizer.lr x schedule x plan."""
        when = (self.epoch if epoch is None else epoch) + step_in_epoch / self.steps_per_epoch
        return self.cfg["optimizer"]["lr"] * self.schedule(when) * self.plan.lr_factor

    @property
    def now(self) -> float:
        """Epochs passed."""
        return self.epoch + self.step_in_epoch / self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        return self.sampler.steps(self.plan.batch_size)

    # ---- the run

    def fit(self) -> dict[str, Any]:
        """Train to the end; returns the summary."""
        every = self.cfg["checkpoint"]["every"]
        if self.comm.leader:
            self.tracker.begin(self.cfg, self.folder.path)
        self.progress.begin(self.cfg["epochs"] * self.steps_per_epoch, self.step)
        with contextlib.closing(self.progress):
            while self.epoch < self.cfg["epochs"]:
                self.begin_epoch()
                while self.step_in_epoch < self.steps_per_epoch:
                    self.train_step()
                    self.progress.step(self)
                    stop = self.stopper.due(self.step)
                    if stop or (every and self.step % every == 0):
                        self.save()
                        self.clock.start()
                    if stop:
                        raise Interrupted(self.step, self.stopper.signum or 0)
                self.end_epoch()
        self.sync.finish(self)
        summary = self.summary()
        if self.comm.leader:
            self.tracker.finish(summary)
        return summary

    def needs(self) -> frozenset[str]:
        """The signals that policies want from this epoch."""
        return frozenset().union(*(policy.needs(self.epoch) for policy in self.policies.values()))

    def begin_epoch(self) -> None:
        """Draw the epoch's order; a resumed epoch goes on where it stood."""
        if self.step_in_epoch == 0:
            self.loss_sum.zero_()
            self.signals.begin(self.needs())
        self.sampler.begin_epoch(self.epoch, self.plan.batch_size)
        self.data.begin_epoch(self.epoch)
        self.axis.model.train()
        self.clock.start()

    def end_epoch(self) -> None:
        """Decide, evaluate, write the row."""
        plan, lr = self.plan, self.lr(0)
        decisions = self.decide()
        self.clock.lap("policy")
        self.comm.agree(self.checksum(), "the parameters")
        steps = self.comm.sum_(self.loss_sum.clone(), "eval") / (self.steps_per_epoch * self.comm.workers)
        train_loss, (test_loss, metric) = float(steps), self.evaluate()
        row: dict[str, Any] = {
            "epoch": self.epoch,
            "step": self.step,
            "lr": lr,
            "train_loss": train_loss,
            "test_loss": test_loss,
            METRIC: metric,
            **self.comm.ledger.columns(),
            **self.clock.columns(self.comm.local_workers == 1),
            "plan": plan_record(plan, self.ladder),
            "decisions": decisions,
        }
        self.best = max(self.best, metric)
        target = self.cfg["target"]
        if target is not None and metric >= target and not self.to_target:
            self.to_target = {key: row[key] for key in ("seconds", "payload_bytes")}
        if self.comm.leader:
            self.folder.append_metrics(row)
            self.tracker.log(row)
            log.info("epoch %d: losses %.4f %.4f, %s %.4f", self.epoch, train_loss, test_loss, METRIC, metric)
        self.progress.epoch(metric)
        self.epoch += 1
        self.step_in_epoch = 0

    def decide(self) -> dict[str, Any]:
        """Let the policies edit the plan: decided on the leader, then broadcast."""
        decisions: dict[str, Any] = {name: {"updates": made} for name, made in self.step_decisions.items()}
        self.step_decisions = {}
        policies = {name: policy for name, policy in self.policies.items() if policy.when == "epoch"}
        if not policies:
            return decisions
        signals = Signals(self.epoch, self.lr(0), self.lr(0, self.epoch + 1), self.signals.read())
        return decisions | self._agreed(policies, signals)

    def decide_now(self, policies: dict[str, Policy]) -> None:
        """Let the policies that are due after this step edit the plan, and note what the new plan costs in error."""
        needs = frozenset().union(*(policy.needs_at(self.step) for policy in policies.values()))
        statistics = self.statistics.read(needs)
        lr, next_lr = self.lr(self.step_in_epoch), self.lr(0, self.epoch + 1)
        signals = Signals(self.epoch, lr, next_lr, step=self.step, statistics=statistics)
        decisions = self._agreed(policies, signals)
        levels = torch.tensor([level for book in self.plan.codebooks.values() for level in book], dtype=torch.float32)
        self.comm.agree(int(levels.view(torch.int32).sum(dtype=torch.int64)), "the codebooks")
        for name, decision in decisions.items():
            lr = self.lr(self.step_in_epoch)
            probe = self.exchange.probe(self.axis.gradients_W, self.plan, self.step, self.now, lr)
            decision["measured_error"] = probe.total_error
            self.step_decisions.setdefault(name, []).append(decision)

    def _agreed(self, policies: dict[str, Policy], signals: Signals) -> dict[str, Any]:
        """Update on the leader, then broadcast; returns what was decided."""
        decisions = {}
        if self.comm.leader:
            for name, policy in policies.items():
                self.plan = policy.update(signals, self.plan)
                if decision := policy.decision():
                    decisions[name] = decision
        numbers = torch.tensor(self.plan.pack(), dtype=torch.float32, device=self.device)
        self.comm.broadcast_([numbers], "control")
        self.plan = self.plan.unpack(numbers.tolist())
        return decisions

    def checksum(self) -> int:
        """The bits of all parameters, summed: equal on all processes, or they have drifted apart."""
        bits = [p.detach().reshape(-1).view(torch.int32).sum(dtype=torch.int64) for p in self.axis.params]
        return int(torch.stack(bits).sum())

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """(loss, accuracy) of the consensus model on the test set; training state stays as it is."""
        axis, comm = self.axis, self.comm
        kept = None
        if axis.bn == "recompute":
            batches = min(RECOMPUTE_BATCHES, self.steps_per_epoch)

            def forward(row: int, batch: int) -> None:
                axis.seed_dropout("recompute", self.step, row, batch)
                indices = self.sampler.batch(comm.first_worker + row, batch).to(self.device)
                axis.model(self.data.train_batch(indices)[0])

            with kept_rng(self.device):
                kept = axis.recompute_buffers(forward, batches)
        axis.model.eval()
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        for row, buffers in enumerate(axis.consensus_buffers()):
            axis.evaluate_with(buffers)
            first = min(comm.first_worker + row, self.data.test_size)
            share = torch.arange(first, self.data.test_size, comm.workers, device=self.device)
            for indices in share.split(EVAL_BATCH):
                x, y = self.data.test_batch(indices)
                output = axis.model(x)
                totals[0] += F.cross_entropy(output, y, reduction="sum").double()
                totals[1] += (output.argmax(1) == y).sum()
                totals[2] += len(y)
        if kept is not None:
            axis.buffers_W = kept
        loss, correct, count = comm.sum_(totals, "eval").tolist()
        return loss / count, correct / count

    def summary(self) -> dict[str, Any]:
        """summary.json: the final metric, the ledger and the clock."""
        row = self.folder.read_metrics()[-1] if self.comm.leader else {}
        kept = {k: v for k, v in row.items() if k not in ("epoch", "step", "lr", "plan", "decisions", METRIC)}
        return {
            "metric_name": METRIC,
            "metric": row.get(METRIC),
            "best_metric": self.best,
            "steps": self.step,
            "epochs": self.epoch,
            "parameters": sum(spec.numel for spec in self.axis.specs),
            "workers": self.comm.workers,
            "test_size": self.data.test_size,
            **kept,
            "seconds_to_target": self.to_target.get("seconds"),
            "payload_bytes_to_target": self.to_target.get("payload_bytes"),
        }

    def save(self) -> Path:
        """Write a checkpoint."""
        return checkpoint.save(self.folder.path, self)
