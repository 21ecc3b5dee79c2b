"""The loop: one training step reads from top to bottom."""

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.graphs import EXCHANGE, UPDATE, Graphs, graphs_of
from accordion_bench.comm.worker_axis import Batch, WorkerAxis
from accordion_bench.compressors.base import NonFinite
from accordion_bench.config import capture_rules, ddp_rules
from accordion_bench.config.components import Components, build_components, build_model, build_optimizer
from accordion_bench.datasets.loader import Sampler
from accordion_bench.exchange.ddp import UNMEASURED, DDPExchange
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.finite import Look
from accordion_bench.exchange.overlap import Overlap
from accordion_bench.exchange.runner import ExchangeRunner
from accordion_bench.forward.compile import compiled
from accordion_bench.forward.precision import LossScale, autocast
from accordion_bench.forward.task import Task, task_of
from accordion_bench.network.link_model import Network
from accordion_bench.network.meter import Meter
from accordion_bench.optimizers.inner import InnerOptimizers
from accordion_bench.optimizers.parameter_kinds import parameter_kinds, tables_of
from accordion_bench.options.instantiate import build
from accordion_bench.plan import plan_record
from accordion_bench.position import Position, StepInfo
from accordion_bench.processes.interrupt import Interrupted, Stopper
from accordion_bench.processes.waiting import Waiting
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import checkpoint
from accordion_bench.runs.checkpoint import GlobalGenerator, Owners
from accordion_bench.runs.folder import RunFolder, log
from accordion_bench.runs.manifest import Manifest, Trained
from accordion_bench.runs.metrics import OF_AN_EPOCH, not_learned
from accordion_bench.runs.reuse import decisive
from accordion_bench.runs.weights import BEST, FINAL, save_weights
from accordion_bench.signals.policy_runner import PolicyRunner
from accordion_bench.sync.base import SyncContext
from accordion_bench.sync.state import SyncState
from accordion_bench.tensors.keyed_rng import kept_rng, key, seeded
from accordion_bench.trackers.base import Tracker
from accordion_bench.training import codec_kernels
from accordion_bench.training.dense_notes import DenseNotes
from accordion_bench.training.evaluation import Evaluation
from accordion_bench.training.feed import Feed, Own
from accordion_bench.training.profiler import profiled
from accordion_bench.training.progress import Progress
from accordion_bench.training.replayed import Replayed
from accordion_bench.training.saver import Saver
from accordion_bench.training.score import Score


class Trainer:
    """Trains one configuration; every process of a run has one.

    Args:
        config: the configuration.
        comm: this process's view of all workers.
        folder: the run folder; only the leader writes there, except for checkpoints.
        stopper: says when to stop early.

    Attributes, by role:
        what is trained: axis (model, gradients, buffers), inner (optimizers), task, data, chance (the metric of a
            guess), sampler, feed (of batches), evaluation, loss_scale (in float16), memory_format (of images), forward
            (what is called as the model)
        what is exchanged: sync (with its exchanges), runner, overlap, comm, ddp (in the place of an exchange)
        what adapts: ladder, policy_runner (with the policies and what they want to know)
        where it stands: position (epoch, step, plan), score, last_row (of metrics, with which it will be summed up)
        what is told: clock, network, meter, waiting (for cores), folder, progress, dense_notes, tracker, stopper
        what is saved: owners, and when: saver
    """

    def __init__(
        self,
        config: RunConfig,
        comm: Comm,
        folder: RunFolder,
        stopper: Stopper | None = None,
        parts: Components | None = None,
    ) -> None:
        self.config, self.comm, self.folder, self.stopper = config, comm, folder, stopper or Stopper()
        self.device, self.clock = comm.device, comm.clock
        tell = _say if comm.leader else _say_nothing
        parts, seed = parts or build_components(config, comm.workers), config.seed
        self.sync, self.ladder = parts.sync, parts.ladder
        self.kernels = codec_kernels.computed_with(comm.device.type, parts)

        self.chance = parts.dataset.chance
        self.data = parts.dataset.load(config.paths.data, seed, self.device)
        train, validation = parts.dataset.split(self.data.train_size, seed)
        self.task: Task = task_of(parts.dataset, self.device, validation)
        train_size = self.data.train_size if train is None else len(train)
        indexed_on = getattr(self.data, "indexed_on", "cpu")
        self.sampler = Sampler(train_size, comm.workers, seed, parts.dataset.sharding, train, indexed_on)
        with seeded(key(seed, "model")):
            model = build_model(config.model, parts.dataset, config.chosen("model"), config.chosen("dataset"))
        self.memory_format = torch.channels_last if config.channels_last else torch.preserve_format
        model = model.to(self.device).to(memory_format=self.memory_format)
        comm.broadcast_([*model.parameters(), *model.buffers()], "setup")
        kinds = parameter_kinds(model)
        self.axis = WorkerAxis(model, comm, seed, config.bn, tables_of(model))
        self.inner = InnerOptimizers(
            self.axis,
            lambda params: build_optimizer(config.optimizer, parts.wrapped.compressor, params, kinds),
            lambda params: build_optimizer(config.optimizer, parts.differences().compressor, params, kinds),
        )
        self.loss_scale = LossScale() if config.precision == "float16" else None

        chosen_by = self.task.selected_by, self.task.tested
        self.last_row: dict[str, Any] = {}
        self.score = Score(self.task.metric, config.target, config.target_every, self.axis.loss_sum_W, *chosen_by)
        specs, like, run = self.axis.specs, self.axis.like, parts.run
        plan = parts.plan_for(specs)
        self.position = Position(plan, config.optimizer["lr"], parts.schedule, config.epochs, self.sampler.steps)
        sampler, position = self.sampler, self.position  # who kept this object would keep its data's readers
        self.policy_runner = PolicyRunner(
            parts.policies,
            specs,
            comm,
            like,
            self.ladder,
            self.position,
            self.axis.loss_sum_W,
            lambda: len(sampler.batch(comm.first_worker, position.step_in_epoch)),
            run.warmup_epochs,
            dataclasses.asdict(config.measure),
        )
        leave_early = not parts.exchange.after_backward(parts.wrapped, comm.processes)
        self.overlap = Overlap(self.axis, comm, parts.exchange.overlaps(comm.processes), leave_early)
        # in processes of their own they would, unless something forbids it; a lone worker's go nowhere
        self.models_overlap = comm.workers > 1 and not parts.exchange.after_backward(
            parts.wrapped, max(2, comm.processes)
        )
        if parts.sync.gradient_exchange and (leave_early or self.models_overlap):
            self.overlap.listen()
        self.ddp: DDPExchange | None = None
        if config.comm.engine == "ddp":
            cap = config.comm.bucket_cap_mb
            hook = ddp_rules.foreign_hook(config)
            self.ddp = DDPExchange(self.axis, config.compressor, self.ladder, comm, seed, cap, hook)
            if warning := ddp_rules.unsaved(config, self.ddp):
                tell(f"warning: {warning}")
        self.runner = ExchangeRunner(
            self.axis,
            self.position,
            self.overlap,
            self.policy_runner,
            self.ladder,
            parts.wrapped,
            parts.differences,
            seed,
            parts.exchange.bucket_mb,
            parts.exchange.gradient_mb,
            self.ddp,
        )

        resumable = self.ddp is None or self.ddp.resumable
        self.saver = Saver(config.checkpoint, comm, self.stopper.store, resumable)
        self.progress = Progress(comm.leader, self.sampler.per_worker)
        self.dense_notes = DenseNotes(comm.leader)
        self.tracker: Tracker = build(config.tracker, "tracker")
        self.step_losses: list[Tensor] = []  # of this epoch, for a tracker that wants them
        self.network: Network = build(config.network, "network")
        self.meter, self.waiting = Meter(config.comm.interface, comm), Waiting()
        decay = config.optimizer.get("weight_decay", 0)
        clip_mean = config.clip_norm if config.clip_at == "after" else None
        trained, told = (self.axis, self.position, self.runner, self.inner), self.stopper.store
        self.sync.begin(SyncContext(*trained, run, decay, clip_mean, told))
        self.forward = compiled(self.ddp.module if self.ddp else self.axis.model, config.compile)
        eager = capture_rules.stays_eager(config, parts, comm.processes)
        self.graphs = self.clock.graphs = Graphs() if set(eager) == capture_rules.ALL else graphs_of(self.device)
        self.replayed = Replayed(self.graphs, (comm.ledger, self.clock, self.runner.finite), tell, eager)
        self.clock.at_once = config.workers_at_once > 1
        if self.graphs.captures:
            self.runner.do = self.replayed
        self.feed = Feed(self.data, self.sampler, comm, self.replayed, self.memory_format)
        self.evaluation = Evaluation(self.axis, self.task, self.data, self.sampler, self.position, self.replayed)

    # ---- one step

    def train_step(self) -> None:
        """One optimizer step of all workers."""
        comm, lr = self.comm, self.position.lr()
        info = self.position.info()
        self.clock.in_force(info.plan.batch_size, self.exchange.predicted_bytes(info))
        self.dense_notes.note(self.exchange.goes_dense(info), info.step)
        with kept_rng(self.device):
            for row, own in enumerate(self.feed.step()):
                self.clock.lap("data")
                self._backward(row, own)
                if self.clock.sampled:  # one after another, so that a worker's times are its own
                    self.graphs.join()
                self.clock.lap("compute")
        self.graphs.join()
        loss_W = self.axis.loss_W
        if self.tracker.by_step and comm.leader:
            self.step_losses.append(loss_W.mean())
        self.clock.lap("compute")
        try:
            self.refuse_non_finite(loss_W)
            if self.loss_scale is None or self._undo(self.loss_scale):
                self._step(lr)
            self.runner.finite.refuse()  # where no exchange has read it
        except NonFinite as bad:
            position = self.position
            raise NonFinite(
                f"step {position.step} (epoch {position.epoch}): {bad}; try a smaller optimizer.lr, now {lr:g} after "
                "schedule and scaling"
            ) from None
        self.position.step_taken()
        self.clock.step_over(own.samples)
        self.clock.warm = True

    def _step(self, lr: float) -> None:
        """From this step's gradients to parameters, and to what is decided of them."""
        axis = self.axis
        if self.config.clip_norm and self.config.clip_at != "after":
            axis.clip(self.config.clip_norm)
            self.clock.lap("compute")
        self.policy_runner.epoch_sums.add_gradients(axis.gradients_W)
        self.clock.lap("policy")
        self.comm.ledger.dense_step(self.exchange.numel)
        axis.in_place = self.replayed.captures(UPDATE) and not self.replayed.captures(EXCHANGE)
        before = self.sync.before_step(lr)
        self.inner.step(lr, self.replayed if self.graphs.captures else None)
        after = self.sync.after_step(lr)
        completed = before if after is None else after
        if completed is not None:
            self.policy_runner.after_exchange(completed, self.sync.averaging)
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
        if overflow:
            self.runner.finite.refuse()  # no exchange follows that would read the loss
        if overflow and scale.value <= 1:
            bad = self.exchange.non_finite(gradients_W, "gradient") or "a gradient of another process"
            raise NonFinite(f"{bad} is not finite, at a loss scale of {scale.value:g}")
        if overflow and self.ddp:
            self.ddp.charge(self.position.info())
            self.comm.ledger.dense_step(self.exchange.numel)
        scale.update(overflow)
        return not overflow

    @property
    def exchange(self) -> Exchange:
        """The exchange of all workers that is in force now."""
        return self.sync.exchange

    def _backward(self, row: int, own: Own) -> None:
        size = self.config.micro_batch_size or own.samples
        count = math.ceil(own.samples / size)
        parts: list[tuple[Tensor, Tensor]] = []  # that the first micro-batch reads for all of them

        def share_of_loss(i: int) -> Tensor:
            if i == 0:
                parts[:] = zip(*(values.split(size) for values in own.read()), strict=True)
            x, y = parts[i]
            only_add_up = self.ddp.no_sync() if self.ddp and i < count - 1 else contextlib.nullcontext()
            with only_add_up, autocast(self.config.precision, self.device):
                loss = self.task.loss(self.forward, x, y, row, i)
                return loss if count == 1 else loss * (len(y) / own.samples)

        last = row == self.comm.local_workers - 1
        arms = self._arms() if last else None
        key = (own.key, id(arms))
        scale = self.loss_scale.value if self.loss_scale else 1.0
        lane = 1 + row % self.config.workers_at_once if self.clock.at_once else 0
        batch = Batch(share_of_loss, count, scale, lambda: self._arm(arms), key, lane)
        self.axis.backward(row, self.position.step, batch, self.replayed)
        if last:
            self.overlap.complete()

    def _arms(self) -> Exchange | None:
        """The exchange whose buckets may leave as they fill in this step; None where a policy looks first."""
        looked_at = self.ddp is not None or self.policy_runner.looks()
        return self.sync.gradients_go_to() if self.overlap.notes and not looked_at else None

    def _arm(self, exchange: Exchange | None) -> None:
        """Let the buckets of this step's exchange of gradients leave as they fill."""
        if exchange is not None:
            info = self.position.info(self.position.lr())
            self.overlap.arm(exchange, exchange.begin(info) if self.overlap.allowed else None)

    def refuse_non_finite(self, loss_W: Tensor) -> None:
        """Stop before anything is exchanged; on a device, before anything of the exchange is applied.

        Raises:
            NonFinite: naming the worker, its loss and the first parameter.
        """
        if self.runner.finite.late:
            self.runner.finite.note(Look(loss_W, self._loss_is))
        else:
            for row, value in enumerate(loss_W.tolist()):
                if not math.isfinite(value):
                    raise NonFinite(self._loss_is(row, value))

    def _loss_is(self, row: int, value: float) -> str:
        """What is wrong with the loss of a local worker."""
        gradient = self.exchange.non_finite(self.axis.gradients_W, "gradient")
        bad = f"the loss of worker {self.comm.first_worker + row} is {value}"
        return bad + (f", and {gradient} is not finite" if gradient else "")

    # ---- the run

    def fit(self) -> dict[str, Any]:
        """Train to the end; returns the summary."""
        position, epochs = self.position, self.config.epochs
        start = max(position.step, self.exchange.start_step)
        plans = (position.plan, self.exchange.weakest())
        self.dense_notes.predict(self.exchange.goes_dense(StepInfo(plan, start, epoch=epochs)) for plan in plans)
        if self.comm.leader:
            self.tracker.begin(self.config.to_dict(), self.folder.path)
        self.runner.preload()
        self.saver.begin(position.step)
        recording = profiled(self.config.profile * self.comm.leader, self.folder, self.clock)
        with self.graphs.training(), contextlib.closing(self.progress), recording as profile_step:
            self.progress.begin(position.step + position.steps_left, position.step)
            while position.epoch < epochs:
                self.begin_epoch()
                while position.step_in_epoch < position.steps_per_epoch:
                    self.train_step()
                    profile_step()
                    self.progress.step(position, self.axis.loss_sum_W, self.comm)
                    if self.score.due(position.step_in_epoch, position.steps_per_epoch):
                        self.look()
                    stop = self.stopper.due(position.step)
                    if self.saver.due_after_step(position.step) or stop:
                        self.pause()
                        saved = self.save()
                        self.go_on()
                    if stop:
                        raise Interrupted(position.step if saved else None, self.stopper.signum or 0)
                last = position.epoch + 1 == epochs
                self.pause()
                if self.saver.due_after_epoch(position.step, last):
                    self.save()
                self.go_on()
                if last:
                    self.sync.finish()
                self.end_epoch()
        summary = self.summary()
        if self.comm.transport is not None:
            self.comm.transport.close()
        if self.comm.leader:
            self.tracker.finish(summary)
        return summary

    def look(self) -> None:
        """Has the target been reached within the epoch? On no clock."""
        self.pause()
        evaluated = self.evaluate()
        self.axis.model.train()
        self.comm.settle()
        self.score.look({**evaluated, "step": self.position.step, **self._spent()})
        self.go_on()

    def pause(self) -> None:
        """Training stops for a while: what is under way arrives, and counts as training."""
        self.sync.land()
        self.clock.step_over()
        self.meter.stop()

    def go_on(self) -> None:
        """Training goes on: what was done meanwhile is in no measured time or traffic, and has arrived everywhere."""
        self.comm.barrier()
        self.meter.start()
        self.clock.start()

    def begin_epoch(self) -> None:
        """Draw the epoch's order; a resumed epoch goes on where it stood."""
        position = self.position
        if position.step_in_epoch == 0:
            self.policy_runner.begin_epoch()
            self.axis.loss_sum_W.zero_()
            self.task.begin_epoch()
        self.sampler.begin_epoch(position.epoch, position.plan.batch_size)
        steps = range(position.step_in_epoch, position.steps_per_epoch)
        self.feed.begin_epoch(position.epoch, steps)
        self.axis.model.train()
        self.progress.begin_epoch(position)
        self.go_on()

    def end_epoch(self) -> None:
        """Decide, evaluate, write the row."""
        position, name = self.position, self.task.metric.name
        plan, lr = position.plan, position.lr(0)
        self.pause()
        decisions = self.policy_runner.end_epoch()
        self.clock.lap("policy")
        self.clock.event("end of epoch")
        self.clock.step_over()
        self.comm.agree(self.checksum(), "the parameters")
        # the plan, and with it the steps per epoch, may be the next epoch's already
        losses = self.comm.sum_(self.axis.loss_sum_W.sum(), "eval")
        train_loss = float(losses / (position.step_in_epoch * self.comm.workers))
        values = self.sync.consensus()
        evaluated, buffers = self.evaluation(values)
        metric = evaluated[name]
        self.comm.settle()
        row: dict[str, Any] = {
            "epoch": position.epoch,
            "step": position.step,
            "lr": lr,
            "train_loss": train_loss,
            **evaluated,
            **self._spent(),
            **self.meter.columns(),
            **(self.loss_scale.columns() if self.loss_scale else {}),
            **self.sync.columns(),
            "plan": plan_record(plan, self.ladder),
            "decisions": decisions,
            **self.policy_runner.measured(),
            **({"looks": self.score.looks} if self.score.looks else {}),
        }
        best, self.last_row = self.score.note(row), row
        if self.comm.leader:
            self.keep_weights(values, buffers, best)
            self.folder.append_metrics(row)
            if self.step_losses:
                self.tracker.log_losses(position.step, torch.stack(self.step_losses).tolist())
                self.step_losses.clear()
            self.tracker.log(row)
            told = train_loss, evaluated["test_loss"], name, metric
            log.info("epoch %d: losses %.4f %.4f, %s %.4f", position.epoch, *told)
        position.epoch_over()
        self.progress.epoch_over(self.task.metric, metric, train_loss, position, self.comm)

    def _spent(self) -> dict[str, Any]:
        """Columns of bytes and time until now."""
        return {
            **self.comm.ledger.columns(),
            **self.clock.columns(self.comm.local_workers == 1),
            **self.network.columns(self.comm, self.models_overlap),
            **(dict.fromkeys(UNMEASURED) if self.ddp else {}),
        }

    def checksum(self) -> int:
        """The bits of all parameters, summed: equal on all processes, or they have drifted apart."""
        bits = [value.reshape(-1).view(torch.int32).sum(dtype=torch.int64) for value in self.axis.shared]
        return int(torch.stack(bits).sum())

    def evaluate(self) -> dict[str, float]:
        """Evaluation columns of the consensus model; training state stays as it is."""
        return self.evaluation(self.sync.consensus())[0]

    def keep_weights(self, values: Sequence[Tensor], buffers: dict[str, Tensor], best: bool) -> None:
        """Write the weights that were evaluated, where they are the last ones, or the best of a run that keeps these.

        Args:
            values, buffers: that the model was evaluated with.
            best: whether no earlier epoch was better.
        """
        last = self.position.epoch + 1 == self.config.epochs
        names = [FINAL] * last + [BEST] * (best and self.config.checkpoint.best)
        weights = self.axis.weights(values, buffers) if names else {}
        for name in names:
            self.score.files[name] = save_weights(self.folder.path / name, weights)

    def summary(self) -> dict[str, Any]:
        """summary.json: the final metric, the ledger and the clock."""
        rows = self.folder.read_metrics() if self.comm.leader else []
        row, judged = self.last_row, self.task.metric
        name, losses = judged.name, [row["train_loss"] for row in rows]
        kept = {k: v for k, v in row.items() if k not in (*OF_AN_EPOCH, name)}
        return {
            "metric_name": name,
            "metric": row.get(name),
            "best_metric": self.score.best,
            "not_learned": not_learned(judged, row[name], losses, self.chance, self.data.test_size) if row else None,
            "best_epoch": self.score.best_epoch,
            "selected_by": self.task.selected_by,
            "test_at_best": self.score.test_at_best,
            "steps": self.position.step,
            "epochs": self.position.epoch,
            "parameters": sum(spec.numel for spec in self.axis.specs),
            "workers": self.comm.workers,
            "processes": self.comm.processes,
            "test_size": self.data.test_size,
            **kept,
            "went_dense": dict(self.dense_notes.steps),
            "waited_for_cores": self.waiting.share(self.comm),
            "files": self.score.files,
            "seconds_to_target": self.score.to_target.get("seconds"),
            "payload_bytes_to_target": self.score.to_target.get("payload_bytes"),
        }

    @property
    def owners(self) -> Owners:
        """Everybody who has state: schemes first, because they may give replicas to the others."""
        own_scale = [self.loss_scale] if self.loss_scale else []
        own_hook = [self.ddp] if self.ddp else []
        exchanges, ledger = SyncState(self.sync, self.comm), self.comm.ledger
        return Owners(
            of_all=[
                *(self.axis, exchanges, self.inner, self.position, self.policy_runner, self.score, ledger, self.clock),
                *own_scale,
                self.dense_notes,
            ],
            of_each=[
                *(self.axis, self.inner, exchanges, self.task, self.policy_runner, self.meter, self.score),
                self.waiting,
                GlobalGenerator(self.device),
                *own_hook,
            ],
        )

    def save(self) -> Path | None:
        """Write a checkpoint; None where what it lacks would make it another run."""
        if not self.saver.resumable:
            return None
        position, began = self.position, time.monotonic()
        trained = Trained(position.epoch, position.step, position.step_in_epoch, position.steps_per_epoch)
        config = decisive({**self.config.to_dict(), "workers": self.comm.workers})
        computed = {"threads": torch.get_num_threads(), "kernels": self.kernels}
        begun = Manifest(trained, config, {}, computed)
        path = checkpoint.save(self.folder.path, begun, self.comm, self.owners, self.saver.keep)
        self.saver.saved(position.step, began)
        return path

    def load(self, path: Path) -> None:
        """Go on from a checkpoint; nothing has been trained yet."""
        checkpoint.load(path, self.comm, self.owners)

    def load_newest(self) -> tuple[Path | None, list[str]]:
        """As `load`, from the newest checkpoint of the run folder that can be read; see `checkpoint.load_newest`."""
        return checkpoint.load_newest(self.folder.path, self.comm, self.owners)


def _say(sentence: str) -> None:
    """Say on the terminal and in run.log what a reader of the run must know."""
    log.warning(sentence)
    print(sentence, file=sys.stderr, flush=True)


def _say_nothing(sentence: str) -> None:
    """What another process says."""
