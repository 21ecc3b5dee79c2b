"""Evaluation of the consensus model on the test data, distributed over the workers, and the best metric so far."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.graphs import EVALUATION, CapturedWork, CaptureStage
from accordion_bench.comm.on_device import copy_on_cpu
from accordion_bench.comm.worker_axis import WorkerAxis
from accordion_bench.datasets.dataset import Data
from accordion_bench.datasets.sampler import Sampler
from accordion_bench.forward.task import Task
from accordion_bench.position import Position
from accordion_bench.runs.metrics import Metric
from accordion_bench.tensors.keyed_rng import kept_rng
from accordion_bench.training.replayed import Replayed, Slots

RECOMPUTE_BATCHES = 128


class Evaluation:
    """Evaluates consensus models without changing the training state.

    If the evaluation of a batch is captured, parameters and buffers are copied to the same memory for each evaluation.

    Training batches (`data`, `sampler`) re-estimate BatchNorm statistics if `axis.bn` is `recompute`.
    """

    def __init__(
        self,
        axis: WorkerAxis,
        task: Task[Any],
        data: Data,
        sampler: Sampler,
        position: Position,
        replayed: Replayed,
    ) -> None:
        self.axis, self.task, self.data, self.sampler, self.position = axis, task, data, sampler, position
        self.replayed, self._slots = replayed, Slots(replayed, torch.preserve_format)
        self._values: list[Tensor] = []  # memory of a consensus that differs from the shared parameters
        self._buffers: dict[str, Tensor] = {}
        self._where: Hashable = None  # addresses of the parameters and buffers that the model reads now

    @torch.no_grad()
    def __call__(self, values: Sequence[Tensor]) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Return the evaluation columns of a consensus [...] per parameter, and the first local worker's buffers."""
        axis, comm, task = self.axis, self.axis.comm, self.task
        kept = self._recompute(values) if axis.bn == "recompute" and axis.buffers_W else None
        axis.model.eval()
        totals, evaluated_with = [], axis.consensus_buffers()
        values = self._in_place(values)
        for row, buffers in enumerate(evaluated_with):
            self._use(values, buffers)
            share = task.totals(axis.model, self.data, comm.first_worker + row, comm.workers, self._of_batch)
            totals.append(share.to(comm.device))
        if kept is not None:
            axis.restore(kept)
        axis.evaluate_with(axis.shared, {})
        return task.columns(comm.sum_(torch.stack(totals).sum(0), "eval").tolist()), evaluated_with[0]

    def _recompute(self, values: Sequence[Tensor]) -> list[Tensor]:
        axis, comm, position = self.axis, self.axis.comm, self.position
        count = min(RECOMPUTE_BATCHES, position.step_in_epoch)
        rows = range(comm.local_workers)
        # in the order of workers, unlike training
        order = (self.sampler.batch(comm.first_worker + row, batch) for row in rows for batch in range(count))
        batches = self.data.train_batches(position.epoch, order)

        def forward(row: int, batch: int) -> None:
            axis.seed_dropout("recompute", position.step, row, batch)
            axis.model(next(batches)[0])

        with kept_rng(comm.device):
            return axis.recompute_buffers(values, forward, count)

    def _in_place(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Copy the consensus to the memory that captured work reads; return it unchanged if nothing is captured."""
        shared = [x.data_ptr() for x in self.axis.shared]
        if not self.replayed.captures(EVALUATION) or [x.data_ptr() for x in values] == shared:
            return values
        self._values = self._values or [torch.empty_like(x) for x in values]
        torch._foreach_copy_(self._values, list(values))
        return self._values

    def _use(self, values: Sequence[Tensor], buffers: dict[str, Tensor]) -> None:
        if self.replayed.captures(EVALUATION):
            self._buffers = self._buffers or {name: torch.empty_like(x) for name, x in buffers.items()}
            for name, x in buffers.items():
                self._buffers[name].copy_(x)
            buffers = self._buffers
        self.axis.evaluate_with(values, buffers)
        self._where = tuple(x.data_ptr() for x in (*values, *buffers.values()))

    def _of_batch(self, compute: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Compute the task's sums for one batch; the next batch overwrites the result."""
        x, y = self._slots.filled(EVALUATION, 0, x, y)

        @torch.no_grad()  # needed because the comparison with a replay enables gradients
        def run() -> Tensor:
            return compute(x, y)

        key = (x.data_ptr(), y.data_ptr(), x.shape, y.shape, self._where)
        return self.replayed(CapturedWork(EVALUATION, key, [CaptureStage(lambda: None, run)], list))


KEPT = ("best", "best_epoch", "test_at_best", "to_target", "looks", "files")
SPENT = ("step", "seconds", "modelled_seconds", "payload_bytes")  # columns of a look besides the metric


class Score:
    """Best value of the metric, cost of reaching the target, and training loss of the current epoch.

    A look is an evaluation within an epoch, to find out when the target is reached.

    Args:
        target, every: value of the metric to reach, None = no target; interval between looks in epochs, at most 1.
        loss_sum_W: training loss of this epoch, summed over steps, of each local worker, float64 [W].
        selected_by, tested: its columns on the split that decides on target and best epoch, and on the test split.

    Attributes:
        best, best_epoch, test_at_best: value and number of the best epoch, and its metric on the test split.
    """

    def __init__(
        self,
        metric: Metric,
        target: float | None,
        every: float,
        loss_sum_W: Tensor,
        selected_by: str,
        tested: str,
    ) -> None:
        self.metric, self.target, self.every = metric, target, every
        self.selected_by, self.tested = selected_by, tested
        self.best = metric.worst
        self.best_epoch: int | None = None
        self.test_at_best: float | None = None
        self.to_target: dict[str, float] = {}  # cost when the target was first reached
        self.looks: list[dict[str, Any]] = []  # of this epoch, with the metric and the columns of SPENT
        self.files: dict[str, tuple[int, int]] = {}  # size and checksum of the weight files, by name
        self.loss_sum_W = loss_sum_W

    def note(self, row: dict[str, Any]) -> bool:
        """Record the metrics row of an epoch and return whether it is the best epoch so far."""
        value = row[self.selected_by]
        best = self.metric.better(value, self.best)
        if best:
            self.best, self.best_epoch, self.test_at_best = value, row["epoch"], row[self.tested]
        self._note_target(row)
        self.looks = []
        return best

    def due(self, step: int, steps: int) -> bool:
        """Whether a look is due after so many of the epoch's steps, because a target exists that is not reached.

        After the last step the row of the epoch is used.
        """
        if self.target is None or self.to_target or self.every >= 1:
            return False
        return step < steps and step in {round(k * self.every * steps) for k in range(1, math.ceil(1 / self.every))}

    def look(self, row: dict[str, Any]) -> None:
        """Record the metric and the cost so far of a look."""
        self._note_target(row)
        self.looks.append({key: row[key] for key in (self.selected_by, *SPENT)})

    def _note_target(self, row: dict[str, Any]) -> None:
        if self.target is not None and self.metric.reaches(row[self.selected_by], self.target) and not self.to_target:
            self.to_target = {key: row[key] for key in ("seconds", "payload_bytes")}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        return {key: getattr(self, key) for key in KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        for key in KEPT:
            setattr(self, key, state[key])

    def worker_state(self, row: int) -> dict[str, Any]:
        """Return the loss sum of one local worker."""
        return {"loss_sum": copy_on_cpu(self.loss_sum_W[row])}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Restore from `worker_state()`."""
        self.loss_sum_W[row] += state["loss_sum"].to(self.loss_sum_W.device)
