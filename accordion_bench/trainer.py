"""The loop: one training step reads from top to bottom."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accordion_bench import checkpoint, config
from accordion_bench.adaptive.base import Policy, tell_followers
from accordion_bench.axis import WorkerAxis
from accordion_bench.build import build
from accordion_bench.comm import Comm
from accordion_bench.compressors.base import NonFinite
from accordion_bench.exchange import Exchange
from accordion_bench.interrupt import Interrupted, Stopper
from accordion_bench.network import Network
from accordion_bench.noise import square_norms
from accordion_bench.plan import Measured, Signals, SquareNorms, plan_record
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
BUCKET_STATISTICS = ("bucket_moments", "pooled_moments", "histogram")


class Trainer:
    """Trains one configuration; every process of a run has one.

    Args:
        cfg: the resolved configuration.
        comm: this process's view of all workers.
        folder: the run folder; only the leader writes there, except for checkpoints.

    Attributes, by role:
        what is trained: axis (model, gradients, buffers), optimizer or optimizers (of replicas), schedule,
            data, sampler
        what is exchanged: sync (with its exchanges), comm
        what adapts: plan, ladder, policies, signals, statistics, step_decisions
        where it stands: epoch, step, step_in_epoch, exchanges, loss_sum, unread_loss, best, to_target
        what is told: clock, network, folder, progress, tracker, stopper
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
        self.parts, self.run = parts, parts.run
        self.schedule, self.sync = parts.schedule, parts.sync
        self.optimizer = config.build_optimizer(cfg, parts.wrapped.compressor, self.axis.params)
        self.optimizers: list[torch.optim.Optimizer] = []

        specs, like = self.axis.specs, self.axis.params[0]
        self.policies, self.ladder = parts.policies, parts.ladder
        self.plan = parts.plan_for(specs)
        self.signals = GradientSums(specs, comm, like)
        self.statistics = BucketStatistics(comm)
        self.step_decisions: dict[str, list[dict[str, Any]]] = {}
        self.probes: dict[int, dict[str, Measured]] = {}
        self.recent: list[Tensor] = []
        self.recent_count = 0
        self.square_norms: SquareNorms | None = None
        self.just_exchanged: tuple[list[Exchange], list[list[Tensor]]] | None = None

        self.epoch = self.step = self.step_in_epoch = self.exchanges = self.loss_read_at = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.unread_loss = torch.zeros_like(self.loss_sum)
        self.best = -math.inf
        self.to_target: dict[str, float] = {}
        self.progress = Progress(comm.leader)
        self.tracker: Tracker = build(cfg["tracker"], "tracker")
        self.network: Network = build(cfg["network"], "network")
        self.sync.begin(self)

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
        comm.ledger.dense_step(sum(spec.numel for spec in axis.specs))
        try:
            self.refuse_non_finite(loss)
            self.sync.step(self, lr)
        except NonFinite as bad:
            raise NonFinite(
                f"step {self.step} (epoch {self.epoch}): {bad}; try a smaller optimizer.lr, now {lr:g} after schedule "
                "and scaling"
            ) from None
        if self.just_exchanged:
            self.decide_now()
        self.step += 1
        self.step_in_epoch += 1
        self.clock.warm = True

    def exchanged(
        self, exchanges: Sequence[Exchange], xs_W: Sequence[Sequence[Tensor]], lr: float
    ) -> list[list[Tensor]]:
        """One exchange: of all workers, or of groups side by side; notes what policies want to know of it.

        Args:
            exchanges: one for each local group.
            xs_W: what each is to exchange, tensors [rows, ...].
            lr: learning rate, where `xs_W` are gradients; 1 where they are in the units of the parameters.

        Returns:
            the updates [...] of each group.
        """
        pairs = list(zip(exchanges, xs_W, strict=True))
        self.clock.lap("update")
        needs = self.needs_at()
        levels = sorted(int(name.removeprefix("probe:")) for name in needs if name.startswith("probe:"))
        if statistics := frozenset(name for name in needs if name.startswith(BUCKET_STATISTICS)):
            buckets = [rows for e, x_W in pairs for rows in e.buckets(x_W, self.plan, self.step, self.now)]
            self.statistics.add(statistics, buckets)
        if self.comm.leader:
            self.probes = self.probed(exchanges[0], xs_W[0], levels, "recent" in needs, lr)
        if needs:
            self.clock.lap("policy")
        updates = [exchange(x_W, self.plan, self.step, lr, self.now) for exchange, x_W in pairs]
        if exchanges[0].comm is not self.comm:
            self.comm.ledger.absorb([exchange.comm.ledger for exchange in exchanges])
        self.clock.lap("exposed")
        if "square_norms" in needs:
            samples = len(self.sampler.batch(self.comm.first_worker, self.step_in_epoch))
            self.square_norms = square_norms(exchanges[0], xs_W[0], updates[0], samples)
            self.clock.lap("policy")
        self.signals.add_updates(updates[0])
        self.just_exchanged = (list(exchanges), [list(x_W) for x_W in xs_W])
        return updates

    def probed(
        self, exchange: Exchange, xs_W: Sequence[Tensor], levels: Sequence[int], recent: bool, lr: float
    ) -> dict[int, dict[str, Measured]]:
        """What some levels of the ladder would cost and lose, on worker 0.

        Args:
            exchange: which is to come.
            xs_W: what it is to exchange.
            levels: indices into the ladder.
            recent: this exchange counts among those over whose mean the levels are looked at; else it alone is.
            lr: as for the exchange.
        """
        if recent:
            own = exchange.error_fed(xs_W, lr)
            self.recent = [a + b for a, b in zip(self.recent, own, strict=True)] if self.recent else own
            self.recent_count += 1
        if not levels:
            return {}
        looked_at = [total / self.recent_count for total in self.recent] if recent else list(xs_W)
        if recent:
            self.recent, self.recent_count = [], 0
        # a mean over exchanges has its residuals in it, and no learning rate any more
        lr = 1.0 if recent else lr
        return {i: exchange.measured(looked_at, i, self.plan, self.step, self.now, lr, recent) for i in levels}

    def new_exchange(self, of_differences: bool = False, comm: Comm | None = None, seed: int | None = None) -> Exchange:
        """An exchange of gradients, or of differences of parameters, among the workers of `comm` (default: all)."""
        wrapped = self.parts.differences() if of_differences else self.parts.wrapped
        seed = self.cfg["seed"] if seed is None else seed
        specs, like, comm = self.axis.specs, self.axis.params[0], comm or self.comm
        exchange = Exchange(wrapped.compressor, specs, self.ladder, comm, like, seed, **wrapped.for_exchange)
        exchange.what = "difference" if of_differences else "gradient"
        return exchange

    @property
    def exchange(self) -> Exchange:
        """The exchange of all workers that is in force now."""
        return self.sync.exchange

    def fork_optimizer(self) -> None:
        """One inner optimizer for each replica, in the state of the common one, which is given up."""
        for replica in self.axis.replicas:
            optimizer = config.build_optimizer(self.cfg, self.parts.differences().compressor, replica)
            for mine, common in zip(replica, self.axis.params, strict=True):
                state = self.optimizer.state.get(common, {})
                optimizer.state[mine] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            self.optimizers.append(optimizer)
        self.optimizer.state.clear()

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
            gradient = self.exchange.non_finite(self.axis.gradients_W, "gradient")
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
        self.progress.begin(self.step + self.steps_left, self.step)
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
                if self.epoch + 1 == self.cfg["epochs"]:
                    self.sync.finish(self)
                self.end_epoch()
        summary = self.summary()
        if self.comm.leader:
            self.tracker.finish(summary)
        return summary

    def needs(self) -> frozenset[str]:
        """The signals that policies want from this epoch."""
        return frozenset().union(*(policy.needs(self.epoch) for policy in self.policies.values()))

    def needs_at(self) -> frozenset[str]:
        """What policies want to know of the exchange that is to come."""
        wanted = [policy.needs_at(self.exchanges) for policy in self.policies.values()]
        return frozenset().union(*wanted)

    def begin_epoch(self) -> None:
        """Draw the epoch's order; a resumed epoch goes on where it stood."""
        if self.step_in_epoch == 0:
            self.unread_loss += self.loss_sum
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
        # the plan, and with it the steps per epoch, may be the next epoch's already
        steps = self.comm.sum_(self.loss_sum.clone(), "eval") / (self.step_in_epoch * self.comm.workers)
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
            **self.network.columns(self.comm),
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
        lr, next_lr = self.lr(0), self.lr(0, self.epoch + 1)
        values = self.signals.read()
        signals = Signals(self.epoch, lr, next_lr, values, self.step, self.exchanges, self.steps_left)
        return decisions | self._agreed(policies, signals)

    @property
    def steps_left(self) -> int:
        """Optimizer steps to the end of the run, at the present batch size."""
        left = self.cfg["epochs"] - self.epoch
        return left * self.steps_per_epoch - self.step_in_epoch

    def decide_now(self) -> None:
        """After an exchange: let the policies that are due edit the plan, and note what new codebooks cost in error."""
        assert self.just_exchanged is not None
        (exchanges, xs_W), self.just_exchanged = self.just_exchanged, None
        policies = {name: policy for name, policy in self.policies.items() if policy.due(self.exchanges)}
        if policies:
            needs = frozenset().union(*(policy.needs_at(self.exchanges) for policy in policies.values()))
            signals = Signals(
                self.epoch,
                self.lr(self.step_in_epoch),
                self.lr(self.step_in_epoch + 1),
                step=self.step,
                exchange=self.exchanges,
                steps_left=self.steps_left - 1,
                warming_up=self.now < self.schedule.warmup_epochs,
                statistics=self.statistics.read(needs),
                loss=self.read_loss() if "loss" in needs else None,
                probes=self.probes,
                square_norms=self.square_norms,
            )
            codebooks = self.plan.codebooks
            decisions = self._agreed(policies, signals)
            if codebooks:
                levels = torch.tensor([level for book in self.plan.codebooks.values() for level in book])
                bits = levels.float().view(torch.int32).sum(dtype=torch.int64)
                self.comm.agree(int(bits), "the codebooks")
            for name, decision in decisions.items():
                if policies[name].drives == "codebook":
                    lr = self.lr(self.step_in_epoch)
                    probe = exchanges[0].probe(xs_W[0], self.plan, self.step, self.now, lr)
                    decision["measured_error"] = probe.total_error
                self.step_decisions.setdefault(name, []).append(decision)
            self.clock.lap("policy")
        self.probes, self.square_norms = {}, None
        self.exchanges += 1

    def read_loss(self) -> float:
        """Training loss of all workers since it was last read, mean over steps."""
        steps = self.step + 1 - self.loss_read_at
        total = self.comm.sum_(self.unread_loss + self.loss_sum, "control")
        self.unread_loss, self.loss_read_at = -self.loss_sum, self.step + 1
        return float(total) / (steps * self.comm.workers)

    def _agreed(self, policies: dict[str, Policy], signals: Signals) -> dict[str, Any]:
        """Update on the leader, then broadcast; returns what was decided."""
        decisions = {}
        if self.comm.leader:
            for name, policy in policies.items():
                before, self.plan = self.plan, policy.update(signals, self.plan)
                if self.plan is not before:
                    tell_followers(list(self.policies.values()), policy, self.plan)
                if before.lr_factor and self.plan.lr_factor != before.lr_factor:  # for the policies after this one
                    signals = replace(signals, next_lr=signals.next_lr * self.plan.lr_factor / before.lr_factor)
                if decision := policy.decision():
                    decisions[name] = decision
        numbers = torch.tensor(self.plan.pack(), dtype=torch.float32, device=self.device)
        self.comm.broadcast_([numbers], "control")
        self.plan = self.plan.unpack(numbers.tolist())
        return decisions

    def checksum(self) -> int:
        """The bits of all parameters, summed: equal on all processes, or they have drifted apart."""
        bits = [value.reshape(-1).view(torch.int32).sum(dtype=torch.int64) for value in self.axis.shared]
        return int(torch.stack(bits).sum())

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float]:
        """(loss, accuracy) of the consensus model on the test set; training state stays as it is."""
        axis, comm = self.axis, self.comm
        kept, values = None, self.sync.consensus(self)
        if axis.bn == "recompute":
            batches = min(RECOMPUTE_BATCHES, self.step_in_epoch)

            def forward(row: int, batch: int) -> None:
                axis.seed_dropout("recompute", self.step, row, batch)
                indices = self.sampler.batch(comm.first_worker + row, batch).to(self.device)
                axis.model(self.data.train_batch(indices)[0])

            with kept_rng(self.device):
                kept = axis.recompute_buffers(values, forward, batches)
        axis.model.eval()
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        for row, buffers in enumerate(axis.consensus_buffers()):
            axis.evaluate_with(values, buffers)
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
        axis.evaluate_with(axis.shared, {})
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
