"""Worker axis: one model per process, with a row of gradients and buffers for each of its W workers."""

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.graphs import WORKERS, CapturedWork, CaptureStage, eagerly
from accordion_bench.comm.on_device import copy_on_cpu, restore_
from accordion_bench.comm.replicas import Replicas, pooled_buffers
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.same_shape import Blocks, as_kind_of, as_real


class Passed(NamedTuple):
    """Result of a worker's passes: the detached loss of its batch, and the gradients [1, ...] of a single local worker.

    With several local workers the gradients are in their rows.
    """

    loss: Tensor
    gradients_W: list[Tensor]


class Batch(NamedTuple):
    """A batch of one local worker, and how it is computed."""

    losses: Callable[[int], Tensor]  # function from a micro-batch number to its share of the mean loss of the batch
    micro_batches: int = 1  # number of micro-batches
    scale: float = 1.0  # factor of the loss, and so of the gradients
    # called before the last backward pass, during which `taken` may be called
    before_last: Callable[[], object] = lambda: None
    key: Hashable = None  # equal for batches of equal shapes at the same addresses
    lane: int = 0  # lane of the worker's passes if they may be captured; 0 = the stream of the training


class WorkerAxis(Replicas):
    """Runs the model for each of the local workers in turn.

    Args:
        model: model on its device; the local workers share its parameters.
        seed: seed of dropout, with (step, worker, micro-batch) as key.
        bn: BatchNorm statistics for evaluation: `pooled` mean and variance over all workers, `average` (pooled without
            the variance between the workers' means), `recompute` (pooled, after re-estimation on training batches),
            `rank0` (those of worker 0), `local` (each worker evaluates its share with its own).

    Attributes:
        replicas: parameters of each local worker after `fork`, as views into one storage per shape.
        buffers_W: buffers of each local worker, [W, ...].
        loss_W: loss of the last batch of each local worker, [W].
        loss_sum_W: sum of these losses over steps, weighted by samples, float64 [W]; reset by the caller.
    """

    def __init__(
        self, model: nn.Module, comm: Comm, seed: int, bn: str = "pooled", tables: Collection[str] = ()
    ) -> None:
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        super().__init__(trained, comm, tables)
        self.model, self.seed, self.bn = model, seed, bn
        rows = comm.local_workers
        # gradients of a single worker are not copied
        self._storage = Blocks(self.specs, rows, self.like).tensors if rows > 1 else []
        self._rows = [[x_W[row] for x_W in self._storage] for row in range(rows)]  # views, made once
        self.loss_W = torch.zeros(rows, device=self.params[0].device)
        self.loss_sum_W = torch.zeros(rows, dtype=torch.float64, device=self.params[0].device)
        self._losses, self._loss_sums = list(self.loss_W), list(self.loss_sum_W)  # views, made once
        self._taken: dict[int, Tensor] = {}
        self._current: int | None = None
        buffers = model.named_buffers()
        self.buffers_W = {name: x.detach().expand(rows, *x.shape).clone() for name, x in buffers}
        self._homes = {name: _home(model, name) for name in self.buffers_W}
        self._buffers = [{name: x_W[row] for name, x_W in self.buffers_W.items()} for row in range(rows)]

    def _use_buffers(self, buffers: dict[str, Tensor]) -> None:
        for name, buffer in buffers.items():
            module, attribute = self._homes[name]
            module._buffers[attribute] = buffer

    def _use_values(self, values: Sequence[Tensor]) -> None:
        # the parameter objects must not change: recurrent layers hold references
        for param, value in zip(self.params, values, strict=True):
            param.data = as_kind_of(value, param)

    def become(self, row: int) -> None:
        """Switch the model to the buffers, and to the replica if there is one, of one local worker."""
        if self._current != row:
            self._use_buffers(self._buffers[row])
            if self.replicas:
                self._use_values(self.values(row))
            self._current = row

    @torch.no_grad()
    def fork(self) -> None:
        storage_W = Blocks(self.specs, self._W, self.like).tensors
        for x_W, value in zip(storage_W, self.shared, strict=True):
            x_W.copy_(value)
        paired = list(zip(storage_W, self.params, strict=True))
        self.replicas = [[nn.Parameter(as_kind_of(x_W[row], param)) for x_W, param in paired] for row in range(self._W)]
        self._current = None

    def share(self) -> None:
        self._use_values(self.shared)
        self._current = None

    def backward(self, row: int, step: int, batch: Batch, do: Callable[[CapturedWork], Passed] = eagerly) -> Tensor:
        """Compute the gradients of one worker's step, and store them in its row.

        Return the detached loss of the batch, which the worker's next step overwrites. `step` is the key of dropout;
        `do` runs the passes, of which each micro-batch is a stage.
        """
        if self.comm.local_workers == 1:
            self.gradients_W = []  # otherwise gradients of two steps would be in memory

        def stage(micro: int) -> CaptureStage:
            seed = functools.partial(self.seed_dropout, "dropout", step, row, micro)
            return CaptureStage(seed, functools.partial(self._pass, row, micro, batch))

        key = (row, batch.key, batch.micro_batches, batch.scale, bool(self.replicas))
        stages = [stage(micro) for micro in range(batch.micro_batches)]
        changes = [*self._buffers[row].values(), *self._rows[row], self._loss_sums[row]]
        passed = do(CapturedWork(WORKERS, key, stages, lambda: changes, batch.lane))
        self.gradients_W = self._storage or passed.gradients_W
        return passed.loss

    def _pass(self, row: int, micro: int, batch: Batch) -> Passed:
        """Run forward and backward pass of one micro-batch; collect the gradients after the last one."""
        last, total = micro == batch.micro_batches - 1, self._losses[row]
        if micro == 0:
            self.become(row)
            total.zero_()
            for param in self.params:
                param.grad = None
        loss = batch.losses(micro)
        if last:
            batch.before_last()
        (loss if batch.scale == 1 else loss * batch.scale).backward()
        total += loss.detach()
        if last:
            weights_W = self.comm.weights_W
            self._loss_sums[row] += total if weights_W is None else total * weights_W[row]
        return Passed(total, self._collected(row) if last else [])

    def _collected(self, row: int) -> list[Tensor]:
        """Return the gradients of a single local worker, or store those of one of several in its row."""
        taken, self._taken = self._taken, {}
        # a parameter without a gradient counts as having a zero gradient
        left = {i: _gradient_of(p) for i, p in enumerate(self.params) if i not in taken}
        if self.comm.local_workers == 1:
            taken.update({i: gradient.contiguous()[None] for i, gradient in left.items()})
            return [taken[i] for i in range(len(self.params))]
        if left:
            torch._foreach_copy_([self._rows[row][i] for i in left], list(left.values()))
        return []

    @torch.no_grad()
    def taken(self, i: int) -> Tensor:
        assert self.params[i].grad is not None and self._current is not None
        gradient = _gradient_of(self.params[i])
        if self.comm.local_workers == 1:
            self._taken[i] = gradient.contiguous().unsqueeze(0)
        else:
            self._rows[self._current][i].copy_(gradient)
            self._taken[i] = self._storage[i]
        return self._taken[i]

    def seed_dropout(self, purpose: str, step: int, row: int, batch: int) -> None:
        """Seed the default generator for dropout of one batch of a local worker; the caller restores it."""
        seed = keyed_rng.key(self.seed, purpose, step, self.comm.first_worker + row, batch)
        device = self.params[0].device
        cuda = device.type == "cuda"
        (torch.cuda.default_generators[device.index or 0] if cuda else torch.default_generator).manual_seed(seed)

    @torch.no_grad()
    def consensus_buffers(self) -> list[dict[str, Tensor]]:
        """Return the buffers of each local worker for evaluation by the rule `bn`, without changing the training."""
        rows = [{name: buffer_W[row].clone() for name, buffer_W in self.buffers_W.items()} for row in range(self._W)]
        if self.bn == "local" or not rows[0]:
            return rows
        if self.bn == "rank0":
            self.comm.broadcast_(list(rows[0].values()), "eval")
            return [rows[0]] * self._W
        return [pooled_buffers(self.buffers_W, self.comm, between=self.bn != "average")] * self._W

    @property
    def _W(self) -> int:
        return self.comm.local_workers

    @torch.no_grad()
    def recompute_buffers(
        self, values: Sequence[Tensor], forward: Callable[[int, int], Any], batches: int
    ) -> list[Tensor]:
        """Re-estimate BatchNorm statistics as averages over training batches; return the old ones, for `restore`.

        `forward` runs the model with these parameter values on a batch, given its row and number.
        """
        kept = [buffer_W.clone() for buffer_W in self.buffers_W.values()]
        norms: list[Any] = [m for m in self.model.modules() if getattr(m, "track_running_stats", False)]
        momenta = [norm.momentum for norm in norms]
        self.model.train()
        for row in range(self._W):
            self.become(row)
            self._use_values(values)
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a cumulative average
            for batch in range(batches):
                forward(row, batch)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        self._current = None
        return kept

    @torch.no_grad()
    def restore(self, kept: Iterable[Tensor]) -> None:
        """Restore the workers' buffers in place to those before `recompute_buffers`."""
        for buffer_W, before_W in zip(self.buffers_W.values(), kept, strict=True):
            buffer_W.copy_(before_W)

    def evaluate_with(self, values: Sequence[Tensor], buffers: dict[str, Tensor]) -> None:
        """Switch the model to these parameters and buffers until the next `become`."""
        self._use_buffers(buffers)
        self._use_values(values)
        self._current = None

    def weights(self, values: Sequence[Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict of the model with these parameters and buffers, copied to the CPU."""
        self.evaluate_with(values, buffers)
        copies = {name: copy_on_cpu(value) for name, value in self.model.state_dict().items()}
        self.evaluate_with(self.shared, {})
        return copies

    def worker_state(self, row: int) -> dict[str, Any]:
        """Return the buffers of one local worker."""
        return {"buffers": {name: copy_on_cpu(buffer_W[row]) for name, buffer_W in self.buffers_W.items()}}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Restore the buffers of one local worker from `worker_state()`."""
        for name, buffer in state["buffers"].items():
            restore_(self.buffers_W[name][row], buffer)


def _gradient_of(param: nn.Parameter) -> Tensor:
    return as_real(torch.zeros_like(param) if param.grad is None else param.grad)


def _home(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
