"""The loop: one training step reads from top to bottom."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.worker_axis import WorkerAxis
from accordion_bench.compressors.base import NonFinite
from accordion_bench.config.components import build_components, build_model, build_optimizer
from accordion_bench.datasets.sampler import Sampler
from accordion_bench.exchange.ddp import UNMEASURED, DDPExchange
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.overlap import Overlap
from accordion_bench.exchange.overlap_rules import after_backward, bucket_mb, overlaps
from accordion_bench.forward.compile import compiled
from accordion_bench.forward.precision import LossScale, autocast
from accordion_bench.forward.task import Task, task_of
from accordion_bench.network.link_model import Network
from accordion_bench.network.meter import Meter
from accordion_bench.options.instantiate import build
from accordion_bench.plan import plan_record
from accordion_bench.processes.interrupt import Interrupted, Stopper
from accordion_bench.runs import checkpoint
from accordion_bench.runs.folder import RunFolder, log
from accordion_bench.signals.policy_runner import Decisions
from accordion_bench.tensors.keyed_rng import kept_rng, key, seeded
from accordion_bench.trackers.base import Tracker
from accordion_bench.training.evaluation import evaluate
from accordion_bench.training.profiler import profiled
from accordion_bench.training.progress import Progress

OF_AN_EPOCH = ("epoch", "step", "lr", "plan", "decisions", "norms", "compression_error")


class Trainer:
    """Trains one configuration; every process of a run has one.

    Args:
        cfg: the resolved configuration.
        comm: this process's view of all workers.
        folder: the run folder; only the leader writes there, except for checkpoints.

    Attributes, by role:
        what is trained: axis (model, gradients, buffers), optimizer or optimizers (of replicas), schedule,
            task, data, sampler, batches (of this epoch), loss_scale (in float16), layout (of images), forward (what is
            called as the model)
        what is exchanged: sync (with its exchanges), comm, ddp (in the place of an exchange)
        what adapts: plan, ladder, decisions (with the policies and what they want to know)
        where it stands: epoch, step, step_in_epoch, loss_sum, best, to_target
        what is told: clock, network, meter, folder, progress, tracker, stopper
    """

    def __init__(self, cfg: dict[str, Any], comm: Comm, folder: RunFolder, stopper: Stopper | None = None) -> None:
        self.cfg, self.comm, self.folder, self.stopper = cfg, comm, folder, stopper or Stopper()
        self.device, self.clock = comm.device, comm.clock
        seed = cfg["seed"]
        parts = build_components(cfg, comm.workers)

        self.task: Task = task_of(parts.dataset)
        self.data = parts.dataset.load(cfg["paths"]["data"], seed, self.device)
        self.sampler = Sampler(self.data.train_size, comm.workers, seed, parts.dataset.sharding)
        with seeded(key(seed, "model")):
            model = build_model(cfg, parts.dataset)
        self.layout = torch.channels_last if cfg["channels_last"] else torch.preserve_format
        model = model.to(self.device).to(memory_format=self.layout)
        comm.broadcast_([*model.parameters(), *model.buffers()], "setup")
        self.axis = WorkerAxis(model, comm, seed, cfg["bn"])
        self.ddp: DDPExchange | None = None
        self.parts, self.run = parts, parts.run
        self.schedule, self.sync = parts.schedule, parts.sync
        self.optimizer = build_optimizer(cfg, parts.wrapped.compressor, self.axis.params)
        self.optimizers: list[torch.optim.Optimizer] = []
        self.loss_scale = LossScale() if cfg["precision"] == "float16" else None

        specs, like = self.axis.specs, self.axis.params[0]
        self.ladder, self.plan = parts.ladder, parts.plan_for(specs)
        self.decisions = Decisions(parts.policies, specs, comm, like, cfg["measure"])
        self.just_exchanged: tuple[Exchange, list[Tensor]] | None = None
        leave_early = not after_backward(cfg, parts.wrapped, comm.processes)
        self.overlap = Overlap(self.axis, comm, overlaps(cfg, comm.processes), leave_early)
        # in processes of their own they would, unless something forbids it
        self.models_overlap = not after_backward(cfg, parts.wrapped, max(2, comm.processes))

        self.epoch = self.step = self.step_in_epoch = 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.best = self.task.metric.worst
        self.to_target: dict[str, float] = {}
        self.progress = Progress(comm.leader)
        self.tracker: Tracker = build(cfg["tracker"], "tracker")
        self.network: Network = build(cfg["network"], "network")
        self.meter = Meter(cfg["comm"].get("interface"), comm)
        self.sync.begin(self)
        self.forward = compiled(self.ddp.module if self.ddp else self.axis.model, cfg["compile"])

    # ---- one step

    def train_step(self) -> None:
        """One optimizer step of all workers."""
        comm, lr = self.comm, self.lr(self.step_in_epoch)
        losses = []
        with kept_rng(self.device):
            for row in range(comm.local_workers):
                self.clock.worker()
                x, y = next(self.batches)
                self.clock.lap("data")
                losses.append(self._backward(row, x, y))
                self.clock.lap("compute")
        loss = torch.stack(losses)
        self.loss_sum += loss.double().sum()
        self.clock.lap("compute")
        try:
            self.refuse_non_finite(loss)
            if self.loss_scale is None or self._undo(self.loss_scale):
                self._step(lr)
        except NonFinite as bad:
            raise NonFinite(
                f"step {self.step} (epoch {self.epoch}): {bad}; try a smaller optimizer.lr, now {lr:g} after schedule "
                "and scaling"
            ) from None
        self.step += 1
        self.step_in_epoch += 1
        self.clock.warm = True

    def _step(self, lr: float) -> None:
        """From this step's gradients to parameters, and to what is decided of them."""
        axis = self.axis
        if self.cfg["clip_norm"] and self.cfg["clip_at"] != "after":
            axis.clip(self.cfg["clip_norm"])
            self.clock.lap("compute")
        self.decisions.epoch_sums.add_gradients(axis.gradients_W)
        self.clock.lap("policy")
        self.comm.ledger.dense_step(sum(spec.numel for spec in axis.specs))
        self.sync.step(self, lr)
        if self.just_exchanged:
            self.decisions.after_exchange(self, *self.just_exchanged)
            self.just_exchanged = None
            self.clock.lap("policy")

    def _undo(self, scale: LossScale) -> bool:
        """Divide the gradients by the loss scale; whether all workers' are finite, so that the step can be taken.

        A step that is not taken leaves everything as it is but the scale, BatchNorm's statistics and the count of
        steps, with which the schedule goes on.

        Raises:
            NonFinite: they are not, although the loss is not scaled any more.
        """
        gradients_W = self.axis.gradients_W
        self.clock.lap("update")
        overflow = bool(self.comm.sum_(scale.undo_(gradients_W), "control"))
        self.clock.lap("exposed")
        if overflow and scale.value <= 1:
            bad = self.exchange.non_finite(gradients_W, "gradient") or "a gradient of another process"
            raise NonFinite(f"{bad} is not finite, at a loss scale of {scale.value:g}")
        if overflow and self.ddp:
            self.ddp.charge(self.plan, self.step, self.now)
            self.comm.ledger.dense_step(sum(spec.numel for spec in self.axis.specs))
        scale.update(overflow)
        return not overflow

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
        self.clock.lap("update")
        self.decisions.look_at(self, exchanges, xs_W, lr)
        self.clock.lap("policy")
        for exchange in exchanges:
            if self.ddp is None:  # which has waited in the backward pass
                self.clock.waits(exchange.name)
        if self.overlap.armed:
            updates = [self.overlap.join()]
        else:
            pairs = zip(exchanges, xs_W, strict=True)
            updates = [exchange(x_W, self.plan, self.step, lr, self.now) for exchange, x_W in pairs]
        if exchanges[0].comm is not self.comm:
            self.comm.ledger.absorb([exchange.comm.ledger for exchange in exchanges])
        self.clock.lap("exposed")
        self.decisions.look_back(self, exchanges[0], xs_W[0], updates[0])
        self.clock.lap("policy")
        self.just_exchanged = exchanges[0], list(xs_W[0])
        return updates

    def new_exchange(self, of_differences: bool = False, comm: Comm | None = None, seed: int | None = None) -> Exchange:
        """An exchange of gradients, or of differences of parameters, among the workers of `comm` (default: all)."""
        if self.cfg["comm"].get("engine") == "ddp":
            self.ddp = DDPExchange(self.axis, self.cfg, self.ladder, self.comm)
            return self.ddp
        wrapped = self.parts.differences() if of_differences else self.parts.wrapped
        seed = self.cfg["seed"] if seed is None else seed
        specs, like, comm = self.axis.specs, self.axis.params[0], comm or self.comm
        options = {**wrapped.for_exchange, "bucket_mb": bucket_mb(self.cfg)}
        exchange = Exchange(wrapped.compressor, specs, self.ladder, comm, like, seed, **options)
        exchange.what = "difference" if of_differences else "gradient"
        return exchange

    @property
    def exchange(self) -> Exchange:
        """The exchange of all workers that is in force now."""
        return self.sync.exchange

    def fork_optimizer(self) -> None:
        """One inner optimizer for each replica, in the state of the common one, which is given up."""
        compressor = self.parts.differences().compressor
        for replica in self.axis.replicas:
            optimizer = build_optimizer(self.cfg, compressor, replica)
            for mine, common in zip(replica, self.axis.params, strict=True):
                state = self.optimizer.state.get(common, {})
                optimizer.state[mine] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            self.optimizers.append(optimizer)
        self.optimizer.state.clear()

    def _backward(self, row: int, x: Tensor, y: Tensor) -> Tensor:
        size = self.cfg["micro_batch_size"] or len(y)
        xs, ys = x.to(memory_format=self.layout).split(size), y.split(size)

        def share_of_loss(i: int) -> Tensor:
            hushed = self.ddp.hushed() if self.ddp and i < len(xs) - 1 else contextlib.nullcontext()
            with hushed, autocast(self.cfg["precision"], self.device):
                return self.task.loss(self.forward, xs[i], ys[i], row, i) * (len(ys[i]) / len(y))

        scale = self.loss_scale.value if self.loss_scale else 1.0
        if row < self.comm.local_workers - 1:
            return self.axis.backward(row, self.step, share_of_loss, len(xs), scale)
        loss = self.axis.backward(row, self.step, share_of_loss, len(xs), scale, self._arm)
        self.overlap.complete()
        return loss

    def _arm(self) -> None:
        """Let the buckets of this step's exchange of gradients leave as they fill, unless somebody must look first."""
        exchange = self.sync.gradients_go_to(self)
        if exchange is not None and self.ddp is None and not self.decisions.looks():
            lr = self.lr(self.step_in_epoch)
            leave = self.overlap.allowed
            self.overlap.arm(exchange, exchange.begin(self.plan, self.step, lr, self.now) if leave else None)

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
        return self.cfg["optimizer"]["lr"] * self.schedule(self.at(step_in_epoch, epoch)) * self.plan.lr_factor

    def at(self, step_in_epoch: int, epoch: int | None = None) -> float:
        """Epochs passed before a step."""
        return (self.epoch if epoch is None else epoch) + step_in_epoch / self.steps_per_epoch

    @property
    def now(self) -> float:
        """Epochs passed."""
        return self.at(self.step_in_epoch)

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
        recording = profiled(self.cfg["profile"] * self.comm.leader, self.folder, self.clock)
        with contextlib.closing(self.progress), recording as profile_step:
            while self.epoch < self.cfg["epochs"]:
                self.begin_epoch()
                while self.step_in_epoch < self.steps_per_epoch:
                    self.train_step()
                    profile_step()
                    self.progress.step(self)
                    stop = self.stopper.due(self.step)
                    if stop or (every and self.step % every == 0):
                        self.pause()
                        saved = self.save()
                        self.meter.start()
                        self.clock.start()
                    if stop:
                        raise Interrupted(self.step if saved else None, self.stopper.signum or 0)
                if self.epoch + 1 == self.cfg["epochs"]:
                    self.sync.finish(self)
                self.end_epoch()
        summary = self.summary()
        if self.comm.transport is not None:
            self.comm.transport.close()
        if self.comm.leader:
            self.tracker.finish(summary)
        return summary

    def pause(self) -> None:
        """Training stops for a while: what is under way arrives, and counts as training."""
        self.sync.land(self)
        self.meter.stop()

    def begin_epoch(self) -> None:
        """Draw the epoch's order; a resumed epoch goes on where it stood."""
        if self.step_in_epoch == 0:
            self.decisions.begin_epoch(self)
            self.loss_sum.zero_()
            self.task.begin_epoch()
        self.sampler.begin_epoch(self.epoch, self.plan.batch_size)
        steps = range(self.step_in_epoch, self.steps_per_epoch)
        self.batches = self.data.train_batches(self.epoch, self.upcoming(steps))
        self.axis.model.train()
        self.meter.start()
        self.clock.start()

    def upcoming(self, steps: range) -> Iterator[Tensor]:
        """Sample numbers of the local workers' batches, in the order in which they are wanted."""
        workers = range(self.comm.first_worker, self.comm.first_worker + self.comm.local_workers)
        return (self.sampler.batch(worker, step) for step in steps for worker in workers)

    def end_epoch(self) -> None:
        """Decide, evaluate, write the row."""
        plan, lr = self.plan, self.lr(0)
        self.pause()
        decisions = self.decisions.end_epoch(self)
        self.clock.lap("policy")
        self.comm.agree(self.checksum(), "the parameters")
        # the plan, and with it the steps per epoch, may be the next epoch's already
        steps = self.comm.sum_(self.loss_sum.clone(), "eval") / (self.step_in_epoch * self.comm.workers)
        train_loss, evaluated = float(steps), self.evaluate()
        metric, name = evaluated[self.task.metric.name], self.task.metric.name
        self.comm.settle()
        row: dict[str, Any] = {
            "epoch": self.epoch,
            "step": self.step,
            "lr": lr,
            "train_loss": train_loss,
            **evaluated,
            **self.comm.ledger.columns(),
            **self.clock.columns(self.comm.local_workers == 1),
            **self.network.columns(self.comm, self.models_overlap),
            **(dict.fromkeys(UNMEASURED) if self.ddp else {}),
            **self.meter.columns(),
            **(self.loss_scale.columns() if self.loss_scale else {}),
            "plan": plan_record(plan, self.ladder),
            "decisions": decisions,
            **self.decisions.measured(),
        }
        if self.task.metric.better(metric, self.best):
            self.best = metric
        target = self.cfg["target"]
        if target is not None and self.task.metric.reaches(metric, target) and not self.to_target:
            self.to_target = {key: row[key] for key in ("seconds", "payload_bytes")}
        if self.comm.leader:
            self.folder.append_metrics(row)
            self.tracker.log(row)
            losses = train_loss, evaluated["test_loss"]
            log.info("epoch %d: losses %.4f %.4f, %s %.4f", self.epoch, *losses, name, metric)
        self.progress.epoch(self.task.metric, metric)
        self.epoch += 1
        self.step_in_epoch = 0

    @property
    def steps_left(self) -> int:
        """Optimizer steps to the end of the run, at the present batch size."""
        left = self.cfg["epochs"] - self.epoch
        return left * self.steps_per_epoch - self.step_in_epoch

    def checksum(self) -> int:
        """The bits of all parameters, summed: equal on all processes, or they have drifted apart."""
        bits = [value.reshape(-1).view(torch.int32).sum(dtype=torch.int64) for value in self.axis.shared]
        return int(torch.stack(bits).sum())

    def evaluate(self) -> dict[str, float]:
        """Evaluation columns of the consensus model; training state stays as it is."""
        return evaluate(self)

    def summary(self) -> dict[str, Any]:
        """summary.json: the final metric, the ledger and the clock."""
        row = self.folder.read_metrics()[-1] if self.comm.leader else {}
        name = self.task.metric.name
        kept = {k: v for k, v in row.items() if k not in (*OF_AN_EPOCH, name)}
        return {
            "metric_name": name,
            "metric": row.get(name),
            "best_metric": self.best,
            "steps": self.step,
            "epochs": self.epoch,
            "parameters": sum(spec.numel for spec in self.axis.specs),
            "workers": self.comm.workers,
            "processes": self.comm.processes,
            "test_size": self.data.test_size,
            **kept,
            "seconds_to_target": self.to_target.get("seconds"),
            "payload_bytes_to_target": self.to_target.get("payload_bytes"),
        }

    def save(self) -> Path | None:
        """Write a checkpoint; None where what it lacks would make it another run."""
        if self.ddp and not self.ddp.resumable:
            return None
        return checkpoint.save(self.folder.path, self)
