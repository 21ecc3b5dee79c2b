"""`Attached`, the object that `ab.attach` and `ab.local` return."""

import contextlib
import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accordion_bench.attaching import state
from accordion_bench.attaching.attachment import Attachment
from accordion_bench.attaching.own_parameters import plain_name, reshard
from accordion_bench.attaching.users_optimizer import kind_of
from accordion_bench.comm import on_device
from accordion_bench.comm.membership import SampleAssignment
from accordion_bench.comm.replicas import is_dense, pooled_buffers
from accordion_bench.comm.stages import EXCLUSIVE
from accordion_bench.network.timeline_file import Timeline
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.units import counted, human_bytes
from accordion_bench.plan import plan_record
from accordion_bench.tensors.same_shape import as_kind_of


def metrics_row(attachment: Attachment, own: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of metrics.jsonl for this process with the user's `own`, and a description of the training."""
    comm, position = attachment.comm, attachment.position
    return {
        "epoch": max(position.epoch - 1, 0) if position.step_in_epoch == 0 else position.epoch,
        "step": position.step,
        "lr": position.step_lr,
        **own,
        **comm.ledger.columns(),
        **comm.clock.columns(True),
        **attachment.sync.columns(),
        **attachment.setting.network.columns(comm, attachment.overlap.allowed),
        "plan": plan_record(position.plan, attachment.methods.ladder),
        "decisions": attachment.decisions,
        "run": description(attachment),
    }


def description(attachment: Attachment) -> dict[str, Any]:
    """Return a description of methods, options, model and machine."""
    chosen, comm, model = attachment.setting.chosen, attachment.comm, attachment.model
    return {
        "name": attachment.setting.passed.name,
        "compressor": chosen.compressor_name,
        "adaptive": list(chosen.adaptive),
        "sync": chosen.sync_name,
        "options": {
            "compressor": dict(chosen.compressor),
            "adaptive": {name: dict(node) for name, node in chosen.adaptive.items()},
            "sync": dict(chosen.sync),
        },
        "workers": comm.workers,
        **({"batch_size": list(comm.samples)} if comm.samples else {}),
        "processes": comm.processes,
        "seed": attachment.setting.passed.seed,
        "network": attachment.setting.passed.network,
        "model": type(getattr(model, "_orig_mod", model)).__name__,
        "parameters": sum(spec.numel for spec in attachment.axis.specs),
        "optimizer": kind_of(attachment.optimizer),
        "versions": {name: _version(name) for name in ("accordion-bench", "torch")},
        "host": platform.node(),
        "processor": on_device.processor_name(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "started": attachment.started,
        "device": comm.device.type,
        "gpus": on_device.gpu_models(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def told(attachment: Attachment) -> str:
    """Return a text with bytes relative to dense exchange, time by part, and compression levels by layer."""
    comm, position = attachment.comm, attachment.position
    sent = comm.ledger.columns()
    chosen = attachment.setting.chosen
    names = [f"compressor={chosen.compressor_name}", *(f"adaptive={name}" for name in chosen.adaptive)]
    names += [f"sync={chosen.sync_name}"] if attachment.sync.local else []
    lines = [f"{' '.join(names)}, {counted(comm.workers, 'worker')}, {counted(position.step, 'step')}"]
    for what in ("payload", "wire"):
        spent, dense = sent[f"{what}_bytes"], sent["dense_bytes" if what == "payload" else "dense_wire_bytes"]
        ratio = f", {dense / spent:.3g} times fewer than dense fp32" if spent and dense else ""
        lines.append(f"{what}: {human_bytes(spent)} per worker{ratio}")
    spent_seconds = comm.clock.columns(True)
    steps = max(comm.clock.steps.timed, 1)  # the first step after each pause is not timed
    parts = ", ".join(f"{part} {1000 * (spent_seconds[f'{part}_seconds'] or 0) / steps:.3g}" for part in EXCLUSIVE[1:])
    lines.append(f"milliseconds per step: {parts}; encode, wait for others and decode run beside compute")
    levels = plan_record(position.plan, attachment.methods.ladder)["levels"]
    knob = attachment.methods.ladder.knob
    lines += [f"  {name}: {knob} {level:g}" for name, level in levels.items()]
    return "\n".join(lines)


def bucket_rows(attachment: Attachment) -> list[dict[str, Any]]:
    """Return for each bucket of the current exchange its tensors and medians of its times."""
    exchange, found = attachment.exchange, attachment.comm.clock.exchanges()
    latest = {kind._replace(plan=None): stages for kind, (*_, stages) in found.items()}
    stages = [stage for part in attachment.sync.parts for stage in latest.get(part.kind, [])]
    return [
        {
            "parameters": [exchange.specs[i].name for i in members],
            "numel": sum(exchange.specs[i].numel for i in members),
            "ready_seconds": stage.ready,
            "encode_seconds": stage.encode,
            "decode_seconds": stage.decode,
            "wire_bytes": stage.wire,
            "rounds": stage.rounds,
        }
        for members, stage in zip(exchange.members, stages, strict=False)
    ]


class Attached(Attachment):
    """Connection of a user's training loop to an exchange of gradients or of parameter differences.

        join()            wait for the exchanged gradients, e.g. to clip them
        no_sync()         context of all backward passes of a step except the last
        note(loss)        report the loss of this step to policies that need it
        end_epoch()       let policies decide that act once per epoch
        consensus()       return parameters and buffers to evaluate; evaluating(): context in which the model has them
        metrics(**own)    return a row for reports;  print(comm): a short form
        timeline()        record steps for advice on other links
        state_dict()      return the state of this rank;  load_state_dict(state)
        detach()          remove all hooks; a `with` block does so at its end

    See `Attachment`.
    """

    def note(self, loss: Tensor) -> None:
        """Report the loss of this step, the mean over this worker's samples, to policies that need it."""
        self.loss_sum += self.comm.weighted(loss.detach().double().reshape(1))[0]
        self.step.losses += 1

    def end_epoch(self, next_lr: float | None = None) -> None:
        """End an epoch, and let policies decide that act once per epoch. All processes must call it.

        Args:
            next_lr: learning rate at the start of the next epoch; None = that of the schedule, or the current one.
        """
        with self._told():
            self.pause()
            self.position.next_lr = self._first_rate() if next_lr is None else float(next_lr)
            self.decisions = self.policy_runner.end_epoch()
            self.comm.settle()
        self.position.epoch_over()
        self.position.next_lr = None
        self.policy_runner.begin_epoch()
        self.loss_sum.zero_()
        self._begin_step()
        self.clock.start()

    def samples(self, size: int) -> Tensor:
        """Return the indices of this worker's samples in the next step, [batch_size], for a data set of `size` samples.

        Each pass over the data has its own order, keyed by `seed`, and contains every sample once. In an elastic run
        (`elastic=True`) the samples of a lost worker since the last average are assigned to the survivors first.

            while local.position.step < 1000:
                x, y = data[local.samples(len(data))]
        """
        checks.integer("size", size, at_least=1, instead=1000)
        if self.deal is None:
            self.deal = SampleAssignment(
                size, self.setting.passed.batch_size, self.setting.step.seed, self.comm.workers
            )
        if self.deal.size != size:
            raise ConfigError(f"size must stay {self.deal.size}, got {size}; pass the same in every step")
        return self.deal.samples(self.comm.rank, self.step.steps)

    @torch.no_grad()
    def consensus(self) -> dict[str, Tensor]:
        """Return the common parameters and buffers of all workers by name, for evaluating or saving.

        BatchNorm statistics are pooled over the workers. The training state does not change. All processes must call
        it.
        """
        with self._told():
            self.pause()
            buffers = {plain_name(name): buffer.detach()[None] for name, buffer in self.model.named_buffers()}
            common, pooled = self.comm.membership.together(
                lambda: (self.sync.consensus(), pooled_buffers(buffers, self.comm))
            )
            values = [as_kind_of(value, param) for param, value in zip(self.axis.params, common, strict=True)]
            reshard(self.model)
            named = dict(zip((spec.name for spec in self.axis.specs), values, strict=True))
        rest = {plain_name(name): p for name, p in self.model.named_parameters() if plain_name(name) not in named}
        return {name: value.detach().clone() for name, value in {**rest, **named, **pooled}.items()}

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which the model has the consensus parameters and buffers. All processes must enter it."""
        held = {name: value.detach().clone() for name, value in self._tensors().items()}
        self._put(self.consensus())
        try:
            yield
        finally:
            self._put(held)
            self.clock.start()

    def _tensors(self) -> dict[str, Tensor]:
        reshard(self.model)
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {plain_name(name): value for name, value in named}

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, tensor in self._tensors().items():
            if is_dense(tensor):
                tensor.copy_(values[name])
        self.watch.note()

    def finish(self) -> None:
        """Average the models after the last step, unless `final` is false, and detach. All processes must call it."""
        with self._told():
            self.pause()
            self.sync.finish()
            if self.sync.local and self.sync.final:
                self._put(self.consensus())
        self.finished = True
        self.detach()

    def __enter__(self) -> "Attached":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.finish()
        else:
            self.detach()

    def metrics(self, **own: Any) -> dict[str, Any]:
        """Return the columns of a row of metrics.jsonl, a file with one JSON object per line and epoch.

        Bytes are cumulative, per worker; for groups that exchange concurrently, those of this process since the last
        `end_epoch`. Times are those of this process. Columns `modelled_...` are predictions for the link `network`.

        Args:
            own: further columns, such as accuracy=0.91, train_loss=0.3. Values of `seed`, `model`, `dataset`,
                `batch_size` and `epochs` describe the training in reports, and override the arguments of `attach`.
        """
        return metrics_row(self, own)

    def __str__(self) -> str:
        return told(self)

    def timeline(self, steps: int = 20, path: str | Path | None = "timeline.json") -> None:
        """Record the next steps; the leader writes a JSON file after the last of them.

        The file has medians in seconds: for each tensor the time at which its gradient is ready, for each bucket the
        duration of its exchange, and for a step its parts.

        Args:
            steps: number of steps to record, after the current one.
            path: path of the file; None = no file is written.
        """
        checks.integer("steps", steps, at_least=1, instead=20)
        recording = Timeline(self.clock, steps, Path(path) if path is not None and self.comm.leader else None)

        def recorded() -> None:
            found = recording.found(self.axis.specs, description(self), bucket_rows(self))
            recording.write(found)

        self.recording, self.when_recorded = recording, recorded

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to resume bit for bit, besides model and optimizer. Every rank saves its own.

        Contains residuals and factors by parameter name, the state of scheme and policies, the plan, bytes and times.
        Loads with `torch.load(..., weights_only=True)`. The training state does not change.

        Raises:
            ConfigError: an exchange of gradients is in progress.
        """
        return state.state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Restore the `state_dict()` of this rank, or a list of all ranks' if the number of workers has changed.

            comm = ab.attach(model, optimizer, ...)    # or ab.local; a plain module gets rank 0's parameters here
            model.load_state_dict(...)                 # this rank's own where workers take local steps
            optimizer.load_state_dict(...)
            comm.load_state_dict(...)

        Raises:
            ConfigError: the state belongs to other methods, another model or another rank.
        """
        state.put_state(self, state_dict)
