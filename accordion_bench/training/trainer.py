"""Training loop of a run: epochs of steps, evaluation, metrics and checkpoints."""

import functools
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.ledger import of_workers
from accordion_bench.comm.worker_axis import WorkerAxis
from accordion_bench.config.components import Components, build_components
from accordion_bench.exchange.ddp import UNMEASURED
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.loop.step import Hooks, SharedState
from accordion_bench.network.link_model import Network
from accordion_bench.network.meter import Meter
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import build
from accordion_bench.plan import plan_record
from accordion_bench.position import Position, StepInfo
from accordion_bench.processes.interrupt import Interrupted, Stopper
from accordion_bench.processes.waiting import Waiting
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import checkpoint, reuse
from accordion_bench.runs.background import Background
from accordion_bench.runs.checkpoint import GlobalGenerator, LoadOnlyOwner, Owners, SharedStateOwner
from accordion_bench.runs.folder import RunFolder, log
from accordion_bench.runs.metrics import OF_AN_EPOCH, not_learned
from accordion_bench.runs.reuse import decisive
from accordion_bench.runs.saving import BlockingWriter, Manifest, Saving, Trained
from accordion_bench.runs.weights import BEST, FINAL, OF_TORCH, SAFETENSORS, save_weights
from accordion_bench.sync.scheme import SyncState, renamed
from accordion_bench.trackers.tracker import Tracker, build_tracker
from accordion_bench.training import codec_kernels
from accordion_bench.training.evaluation import Evaluation, Score
from accordion_bench.training.profiler import profiled
from accordion_bench.training.progress import DenseNotes, Progress
from accordion_bench.training.saver import Saver
from accordion_bench.training.training_step import TrainingStep


class Trainer:
    """Trains one configuration from its first epoch to its summary; every process of a run has one.

    Args:
        config: the configuration.
        comm: communicator of all workers, from this process.
        folder: the run folder; only the leader writes to it, except for checkpoints.
        stopper: decides when to stop early.
        parts: components of the run; None = build them.

    Attributes, by role:
        training: step (model, data and exchange), evaluation, chance (metric of random guessing)
        progress: position (epoch, step, plan), score, last_row (metrics row used for the summary)
        reporting: clock, network, meter, waiting (time without a core), folder, progress, dense_notes, tracker, stopper
        checkpoints: owners (all that have state), saver (when to save), writer (how to save)
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
        parts = parts or build_components(config, comm.workers)
        self.chance, self.ladder = parts.dataset.chance, parts.ladder
        self.kernels = codec_kernels.computed_with(comm.device.type, parts)
        step = TrainingStep(config, comm, parts, self.stopper.store, _say if comm.leader else _say_nothing)
        self.step, self.position = step, step.position
        self.data, self.task, self.sampler = step.data, step.task, step.sampler
        self.axis, self.inner, self.loss_scale = step.axis, step.inner, step.loss_scale
        self.sync, self.policy_runner = step.sync, step.communicating.policies
        self.runner, self.ddp = step.communicating.runner, step.ddp

        chosen_by = self.task.selected_by, self.task.tested
        self.score = Score(self.task.metric, config.target, config.target_every, self.axis.loss_sum_W, *chosen_by)
        self.last_row: dict[str, Any] = {}
        self.evaluation = Evaluation(self.axis, self.task, self.data, self.sampler, self.position, step.replayed)
        resumable = self.ddp is None or self.ddp.resumable
        self.saver = Saver(config.checkpoint, comm, self.stopper.store, resumable)
        self.writer = (Background if config.checkpoint.background else BlockingWriter)(comm)
        self.progress = Progress(comm.leader, self.sampler.seen)
        self.dense_notes = DenseNotes(comm.leader)
        self.tracker: Tracker = build_tracker(config.trackers)
        self.step_losses: list[Tensor] = []  # of this epoch, for trackers that log every step
        self.network: Network = build(config.network, "network")
        self.held = ExitStack()  # lock of the run folder, in a process that becomes the leader
        self.meter, self.waiting = Meter(config.comm.interface, comm), Waiting()

    @property
    def exchange(self) -> Exchange:
        """The current exchange of all workers."""
        return self.sync.exchange

    def train_step(self) -> None:
        """Take one optimizer step of all workers and record it."""
        info = self.position.info()
        self.dense_notes.note(self.exchange.dense_warning(info), info.step)
        self.step.take()
        if self.tracker.by_step and self.comm.leader:
            self.step_losses.append(self.comm.weighted(self.axis.loss_W).mean())

    # ---- the run

    def fit(self) -> dict[str, Any]:
        """Train to the end and return the summary."""
        position, epochs, together = self.position, self.config.epochs, self.comm.membership.together
        start = max(position.step, self.exchange.start_step)
        plans = (position.plan, self.exchange.weakest())
        self.dense_notes.predict(self.exchange.dense_warning(StepInfo(plan, start, epoch=epochs)) for plan in plans)
        if self.comm.leader:
            if counts := self.sampler.label_counts():
                self.folder.write_json("labels.json", {"alpha": self.sampler.sharding.alpha, "samples": counts})
            self.tracker.begin(self.config.to_dict(), self.folder.path)
        self.runner.preload()
        self.saver.begin(position.step)
        recording = profiled(self.config.profile * self.comm.leader, self.folder, self.clock)
        ends = closing(self.progress), closing(self.writer)
        with self.step.graphs.training(), ends[0], ends[1], recording as profile_step, self.held:
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
                    if stop and self.comm.membership.elastic:  # the other processes continue without this one
                        raise Interrupted(None, self.stopper.signum or 0)
                    if self.saver.due_after_step(position.step) or stop:
                        self.pause()
                        saved = together(self.save)
                        self.go_on()
                    if stop:
                        self.writer.finish()
                        raise Interrupted(position.step if saved else None, self.stopper.signum or 0)
                last = position.epoch + 1 == epochs
                self.pause()
                self.writer.look()
                if together(functools.partial(self.saver.due_after_epoch, position.step, last)):
                    together(self.save)
                self.go_on()
                if last:
                    self.sync.finish()
                self.end_epoch()
        self.writer.finish()
        summary = self.summary()
        if self.comm.transport is not None:
            self.comm.transport.close()
        if self.comm.leader:
            self.tracker.finish(summary)
        return summary

    def look(self) -> None:
        """Check whether the target is reached within the epoch; the time is not measured."""
        self.pause()
        evaluated = self.comm.membership.together(self.evaluate)
        self.axis.model.train()
        self.comm.settle()
        self.score.look({**evaluated, "step": self.position.step, **self._spent()})
        self.go_on()

    def pause(self) -> None:
        """Stop the clock; pending communication is completed first and counts as training."""
        self.sync.land()
        self.clock.step_over()
        self.meter.stop()

    def go_on(self) -> None:
        """Restart the clock; time and traffic since `pause` are not measured. All processes wait for each other."""
        if not self.comm.membership.elastic:  # elastic workers enter between two steps without a barrier
            self.comm.barrier()
        self.meter.start()
        self.clock.start()

    def begin_epoch(self) -> None:
        """Draw the epoch's order of samples; a resumed epoch continues at its step."""
        self.step.begin_epoch()
        self.progress.begin_epoch(self.position)
        self.go_on()

    def end_epoch(self) -> None:
        """Run the policies, evaluate, and write the metrics row."""
        position, name = self.position, self.task.metric.name
        plan, lr = position.plan, position.lr(0)
        self.pause()
        decisions = self.policy_runner.end_epoch()
        self.clock.lap("policy")
        self.clock.event("end of epoch")
        self.clock.step_over()
        train_loss, values, (evaluated, buffers) = self.comm.membership.together(self._measured)
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

    def _measured(self) -> tuple[float, list[Tensor], tuple[dict[str, float], dict[str, Tensor]]]:
        """Return the epoch's training loss, the consensus, and its evaluation; all workers must call it."""
        self.comm.agree(self.checksum(), "the parameters")
        # the plan, and thus the steps per epoch, may already be that of the next epoch
        losses = self.comm.sum_(self.axis.loss_sum_W.sum(), "eval")
        train_loss = float(losses / (self.position.step_in_epoch * self.comm.workers))
        values = self.sync.consensus()
        return train_loss, values, self.evaluation(values)

    def _spent(self) -> dict[str, Any]:
        """Return the columns of bytes and time so far."""
        return {
            **self.comm.ledger.columns(),
            **self.clock.columns(self.comm.local_workers == 1),
            **self.network.columns(self.comm, self.step.models_overlap),
            **(dict.fromkeys(UNMEASURED) if self.ddp else {}),
        }

    def checksum(self) -> int:
        """Return the sum of the bits of all parameters; it differs between processes whose parameters have diverged."""
        bits = [value.reshape(-1).view(torch.int32).sum(dtype=torch.int64) for value in self.axis.shared]
        return int(torch.stack(bits).sum())

    def evaluate(self) -> dict[str, float]:
        """Return the evaluation columns of the consensus model; the training state is not changed."""
        return self.evaluation(self.sync.consensus())[0]

    def keep_weights(self, values: Sequence[Tensor], buffers: dict[str, Tensor], best: bool) -> None:
        """Write the evaluated weights if they are the final ones, or the best ones so far and the run keeps these."""
        last = self.position.epoch + 1 == self.config.epochs
        names = [FINAL] * last + [BEST] * (best and self.config.checkpoint.best)
        weights = self.axis.weights(values, buffers) if names else {}
        suffix = SAFETENSORS if self.config.checkpoint.safetensors else OF_TORCH
        for name in names:
            self.score.files[f"{name}{suffix}"] = save_weights(self.folder.path / f"{name}{suffix}", weights)

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json: final metric, ledger and clock."""
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
            "waited_for_cores": self.comm.membership.together(lambda: self.waiting.share(self.comm)),
            "files": self.score.files,
            **{f"{key}_to_target": self.score.to_target.get(key) for key in ("seconds", "payload_bytes")},
        }

    @property
    def owners(self) -> Owners:
        """All objects with state; schemes come first, because they may create replicas for the others."""
        own_scale, own_hook = [self.loss_scale] if self.loss_scale else [], [self.ddp] if self.ddp else []
        exchanges, ledger = SyncState(self.sync, self.comm), self.comm.ledger
        deal = self.sampler.deal
        own_deal: list[SharedStateOwner] = [deal, EpochLoss(self.axis, self.position)] if deal else []
        return Owners(
            of_all=[
                *(self.axis, exchanges, self.inner, self.position, self.policy_runner, self.score, ledger, self.clock),
                *own_scale,
                *own_deal,
                self.dense_notes,
            ],
            of_each=[
                *(self.axis, self.inner, exchanges, self.task, self.policy_runner, self.meter, self.score),
                self.waiting,
                GlobalGenerator(self.device),
                *own_hook,
            ],
        )

    def shared_state(self) -> SharedState:
        """Return the state that entering workers receive, with the hooks called when the workers change."""

        def state() -> dict[str, Any]:
            buffers = {name: x_W[0].clone() for name, x_W in self.axis.buffers_W.items()}
            return checkpoint.merged([*(owner.state_dict() for owner in self.owners.of_all), {"buffers": buffers}])

        def put(state: dict[str, Any]) -> None:
            for owner in self.owners.of_all:
                owner.load_state_dict(state)
            for name, x_W in self.axis.buffers_W.items():
                x_W.copy_(state["buffers"][name])

        hooks = Hooks(state, put, lambda: self.sampler.deal, self._workers_changed)
        self._led = self.comm.leader
        return SharedState(self.step.communicating, hooks)

    def _workers_changed(self, lost: Sequence[int], before: int) -> None:
        """Redistribute samples; a process that has become the leader starts to print and write."""
        comm, position, steps, W = self.comm, self.position, self.step.communicating, self.comm.local_workers
        gone = [rank * W + row for rank in lost for row in range(W)]
        assert self.sampler.deal is not None
        self.sampler.deal.change(comm.workers, gone, steps.steps)
        first = position.step_in_epoch + steps.under_way
        self.step.feed.begin_epoch(position.epoch, range(first, position.steps_per_epoch))
        if comm.leader and not self._led:
            self._led = self.dense_notes.leader = True
            with suppress(ConfigError):  # the launcher may hold it
                self.held.enter_context(reuse.hold(self.folder))
            self.folder.log_to_file()
            self.clock.raise_totals_to_row((self.folder.read_metrics() or [{}])[-1])
            self.progress.lead(position)
            self.tracker.begin(self.config.to_dict(), self.folder.path)
        if comm.leader:
            log.info("step %d: %d workers go on, %d are lost", steps.steps, comm.workers, len(gone))

    def save(self) -> Path | None:
        """Write a checkpoint; None if some state cannot be saved, so that a resumed run would differ."""
        if not self.saver.resumable:
            return None
        position, began = self.position, time.monotonic()
        trained = Trained(position.epoch, position.step, position.step_in_epoch, position.steps_per_epoch)
        config = decisive({**self.config.to_dict(), "workers": self.comm.workers})
        computed = {"threads": torch.get_num_threads(), "kernels": self.kernels}
        begun = Manifest(trained, config, {}, computed)
        saving = Saving(self.folder.path, begun, self.saver.keep)
        path = checkpoint.save(saving, self.comm, self.owners, self.writer)
        self.saver.saved(position.step, began)
        return path

    def load(self, path: Path) -> None:
        """Restore a checkpoint before the first step."""
        checkpoint.load(path, self.comm, self.owners)

    def load_newest(self) -> tuple[Path | None, list[str]]:
        """Restore the newest readable checkpoint of the run folder; see `checkpoint.load_newest`."""
        owners = Owners([LoadOnlyOwner(self._go_on_from)], []) if self.sync.elastic else self.owners
        return checkpoint.load_newest(self.folder.path, self.comm, owners)

    def _go_on_from(self, state: dict[str, Any]) -> None:
        """Restore the state common to all workers, for any number of them: the consensus, without residuals."""
        comm, position, deal = self.comm, self.position, self.sampler.deal
        assert deal is not None
        before = state["deal"]["workers"]
        counts = of_workers(state["ledger"], before, comm.workers)
        for owner in self.owners.of_all:
            owner.load_state_dict(renamed(state, before, comm.workers) | {"ledger": counts})
        self.sync.restart()
        deal.change(comm.workers, range(before), position.step)
        steps = math.ceil(math.ceil(deal.size / before) / deal.batch)  # steps of an epoch with `before` workers
        position.step_in_epoch = position.step_in_epoch * position.steps_per_epoch // steps
        EpochLoss(self.axis, position).load_state_dict(state)


class EpochLoss:
    """Training loss of this epoch in elastic runs: the mean per step of one worker, used for all."""

    def __init__(self, axis: WorkerAxis, position: Position) -> None:
        self.axis, self.position = axis, position

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints and for entering workers."""
        return {"epoch_loss": float(self.axis.loss_sum_W[0]) / max(self.position.step_in_epoch, 1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`, after the position was restored."""
        self.axis.loss_sum_W.fill_(state["epoch_loss"] * self.position.step_in_epoch)


def _say(sentence: str) -> None:
    """Print a sentence and write it to run.log."""
    log.warning(sentence)
    print(sentence, file=sys.stderr, flush=True)


def _say_nothing(sentence: str) -> None:
    """Ignore the sentence, in processes other than the leader."""
