"""What `ab.attach` and `ab.local` return."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accordion_bench.attaching import rows, state
from accordion_bench.attaching.attachment import Attachment
from accordion_bench.attaching.own_parameters import plain_name, reshard
from accordion_bench.attaching.timeline import Timeline
from accordion_bench.comm.dealing import Deal
from accordion_bench.comm.replicas import is_dense, pooled_buffers
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.tensors.real_view import as_kind_of


class Attached(Attachment):
    """A training loop whose gradients, or differences of parameters, are exchanged by a method of this package.

        join()            gradients are the exchanged ones from here on, and may be clipped
        no_sync()         around all backward passes of a step but the last
        note(loss)        the loss of this step, for policies that look at it
        end_epoch()       policies that decide by epoch do so now
        consensus()       parameters and buffers to evaluate; evaluating(): the model has them within
        metrics(**own)    a row for the report;  print(comm): the same in short
        timeline()        records steps for advice on other links
        state_dict()      of this rank;  load_state_dict(state)
        detach()          the end; a `with` block does so, too

    See `Attachment`.
    """

    # ---- during training

    def note(self, loss: Tensor) -> None:
        """The loss of this step, for policies that look at it; the mean over this worker's samples."""
        self.loss_sum += self.comm.weighted(loss.detach().double().reshape(1))[0]
        self.step.losses += 1

    def end_epoch(self, next_lr: float | None = None) -> None:
        """An epoch is over: policies that decide by epoch do so now. All processes call it.

        Args:
            next_lr: learning rate with which the next epoch starts; None = as scheduled, else what is set now.
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
        """Numbers of the samples of this worker in the coming step, [batch_size], of a data set of so many.

        Each pass over the data has an order of its own, keyed by `seed`; every sample of it is dealt once. Where
        workers come and go (`elastic=True`), what a lost one has computed since the last average goes back, and is
        dealt first to those who are left.

            while local.position.step < 1000:
                x, y = data[local.samples(len(data))]
        """
        checks.integer("size", size, at_least=1, instead=1000)
        if self.deal is None:
            self.deal = Deal(size, self.setting.batch_size, self.setting.step.seed, self.comm.workers)
        if self.deal.size != size:
            raise ConfigError(f"size must stay {self.deal.size}, got {size}; pass the same in every step")
        return self.deal.samples(self.comm.rank, self.step.steps)

    @torch.no_grad()
    def consensus(self) -> dict[str, Tensor]:
        """Parameters and buffers to evaluate or to save, by name: those that all workers have in common.

        BatchNorm's statistics are pooled over the workers. Training goes on as if nothing had been asked. All
        processes call it.
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
        """Within, the model has the consensus; after it what it had. All processes enter it."""
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
        """After the last step: leave one model behind, unless `final` is false, and detach. All processes call it."""
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

    # ---- rows, timelines, state

    def metrics(self, **own: Any) -> dict[str, Any]:
        """The columns of a bench run's metrics.jsonl, for a file with one JSON object per line and epoch.

        Bytes are of one worker, cumulative; of groups that exchange side by side, what this process has seen since the
        last `end_epoch`. Times are of this process. `modelled_` columns put the training on the link `network`.

        Args:
            own: further columns, such as accuracy=0.91, train_loss=0.3; `seed`, `model`, `dataset`, `batch_size` and
                `epochs` tell reports of the training, before what `attach` was passed.
        """
        return rows.metrics_row(self, own)

    def __str__(self) -> str:
        return rows.told(self)

    def timeline(self, steps: int = 20, path: str | Path | None = "timeline.json") -> None:
        """Record the coming steps; the leader writes a JSON file after the last of them.

        For each tensor when its gradient is ready, for each bucket what its exchange took, for a step its parts;
        medians in seconds.

        Args:
            steps: to record, after the one that is running.
            path: of the file.
        """
        checks.integer("steps", steps, at_least=1, instead=20)
        recording = Timeline(self.clock, steps, Path(path) if path is not None and self.comm.leader else None)

        def recorded() -> None:
            found = recording.found(self.axis.specs, rows.description(self), rows.bucket_rows(self))
            recording.write(found)

        self.recording, self.when_recorded = recording, recorded

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on bit for bit, besides its model and optimizer; every rank saves its own.

        Residuals and factors by parameter name, the scheme, the policies, the plan, bytes and times so far. It loads
        with `torch.load(..., weights_only=True)`. Training goes on as if nothing had been asked.

        Raises:
            ConfigError: gradients of a step are under way.
        """
        return state.state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on from `state_dict()`: of this rank, or a list of all ranks' where the number of workers has changed.

            comm = ab.attach(model, optimizer, ...)    # or ab.local; a plain module gets rank 0's parameters here
            model.load_state_dict(...)                 # this rank's own where workers take local steps
            optimizer.load_state_dict(...)
            comm.load_state_dict(...)

        Raises:
            ConfigError: it is of other methods, another model or another rank.
        """
        state.put_state(self, state_dict)
