"""Inner optimizers: the common one, and since workers have parameters of their own, one for each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from accordion_bench.comm.graphs import UPDATE, CapturedWork, CaptureStage, eagerly
from accordion_bench.comm.on_device import copy_on_cpu, restore_
from accordion_bench.comm.replicas import Replicas
from accordion_bench.tensors.real_view import as_kind_of

MATRIX, TABLE, VECTOR = "matrix", "table", "vector"
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
TABLE_NAMES = ("embed", "position")  # of embeddings that are plain parameters, such as `pos_embed`


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """Name -> kind of all trained parameters, in the model's order.

    A matrix has two dimensions or more, and at least two rows and two columns when the first dimension is taken as
    rows and all others as columns. It is a table where a token or a class has a row of its own: the parameters of
    embeddings, those named so, and the matrices of the last module that has any, the output layer. All else is a
    vector: biases, norms, scales.
    """
    modules = list(model.modules())
    tables = {id(param) for module in modules if isinstance(module, EMBEDDINGS) for param in _matrices(module)}
    tables |= {id(param) for param in next(filter(None, map(_matrices, reversed(modules))), [])}
    kinds = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            named = any(word in name.rpartition(".")[2].lower() for word in TABLE_NAMES)
            is_table = named or id(param) in tables
            kinds[name] = VECTOR if not is_matrix(param) else TABLE if is_table else MATRIX
    return kinds


def tables_of(model: nn.Module) -> set[str]:
    """Names of the trained embeddings, and of the output layer."""
    return {name for name, kind in parameter_kinds(model).items() if kind == TABLE}


def is_matrix(param: Tensor) -> bool:
    """Whether first dimension by all others has at least two rows and two columns."""
    return param.ndim >= 2 and param.shape[0] >= 2 and param.numel() >= 2 * param.shape[0]


def _matrices(module: nn.Module) -> list[Tensor]:
    """Those that a module has itself, not its children."""
    return [param for param in module.parameters(recurse=False) if is_matrix(param)]


Optimizer = torch.optim.Optimizer


class OptimizerLike(Protocol):
    """What schemes read of an optimizer, or of several of one model."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameters and options."""

    @property
    def state(self) -> Any:
        """Of which `get(parameter, default)` and `clear()` are used."""


class Optimizers(Protocol):
    """What schemes need: the optimizer of the shared parameters, and since `fork` one for each local replica."""

    axis: Replicas

    @property
    def common(self) -> OptimizerLike:
        """Of the shared parameters."""

    @property
    def of_replicas(self) -> Sequence[OptimizerLike]:
        """Of each local worker."""

    def fork(self) -> None:
        """Every local replica gets an optimizer in the state of the common one."""


def is_sgd(optimizer: OptimizerLike) -> bool:
    """Whether the optimizer, or all of several, are torch's SGD."""
    return all(isinstance(own, torch.optim.SGD) for own in getattr(optimizer, "optimizers", [optimizer]))


class InnerOptimizers:
    """The optimizer of the parameters that all workers share; since `fork`, one for each local replica.

    Args:
        axis: whose parameters are trained.
        build: makes the common optimizer for some parameters.
        build_for_replica: makes one for a replica.

    Attributes:
        common: the optimizer of the shared parameters.
        of_replicas: one per local worker, since `fork`.
    """

    def __init__(
        self,
        axis: Replicas,
        build: Callable[[list[nn.Parameter]], Optimizer],
        build_for_replica: Callable[[list[nn.Parameter]], Optimizer],
    ) -> None:
        self.axis, self.build_for_replica = axis, build_for_replica
        self.common = build(axis.params)
        self.of_replicas: list[Optimizer] = []
        self._lr: Tensor | None = None  # on the device, where updates are captured
        self._rate: float | None = None  # that it holds
        self._state_count = -1  # tensors of state after the last step

    def fork(self) -> None:
        """One optimizer for each replica, in the state of the common one, which is given up."""
        for replica in self.axis.replicas:
            optimizer = self.build_for_replica(replica)
            for mine, common in zip(replica, self.axis.params, strict=True):
                state = self.common.state.get(common, {})
                optimizer.state[mine] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            self.of_replicas.append(optimizer)
        self.common.state.clear()

    def step(self, lr: float, do: Callable[[CapturedWork], object] | None = None) -> None:
        """x <- optimizer(x, g) of the shared parameters; since `fork`, of each local worker's.

        Args:
            lr: learning rate.
            do: does the update where all optimizers are fused, so that it may be captured; None = it is done at once.
        """
        optimizers = self.of_replicas or [self.common]
        for row, replica in enumerate(self.axis.replicas if self.of_replicas else []):
            for x, gradient_W in zip(replica, self.axis.gradients_W, strict=True):
                x.grad = None if row in self.axis.resting else as_kind_of(gradient_W[row], x)
        if all(optimizer.defaults.get("fused") for optimizer in optimizers):
            lr = float(np.float32(lr))  # as a kernel reads it from the device, so that captured updates are the same
            if do is not None:
                self._step_fused(optimizers, lr, do)
                return
        self._set(optimizers, lr)
        for optimizer in optimizers:
            optimizer.step()

    def _step_fused(self, optimizers: Sequence[Optimizer], lr: float, do: Callable[[CapturedWork], object]) -> None:
        """A step that may be captured, unless it makes state anew: a capture would make it, and compute nothing."""
        if len(_states(optimizers)) == self._state_count:
            do(self._update(optimizers, lr))
        else:
            eagerly(self._update(optimizers, lr))
        self._state_count = len(_states(optimizers))

    def _update(self, optimizers: Sequence[Optimizer], lr: float) -> CapturedWork:
        """The step of fused optimizers, which read the learning rate from the device.

        Its memory is that of gradients and state: a momentum that has been given up makes it another work.
        """
        if self._lr is None:
            self._lr = torch.zeros((), device=self.axis.like.device)
        cell = self._lr

        def prepare() -> None:
            if self._rate != lr:
                cell.fill_(lr)
            self._rate = lr
            self._set(optimizers, cell)

        def run() -> None:
            for optimizer in optimizers:
                optimizer.step()

        def changes() -> list[Tensor]:
            return [*(x.data for x in trained), *_states(optimizers)]

        trained = [x for optimizer in optimizers for group in optimizer.param_groups for x in group["params"]]
        gradients = [x.grad for x in trained if x.grad is not None]
        where = tuple(x.data_ptr() for x in (*gradients, *changes()))
        return CapturedWork(UPDATE, (bool(self.of_replicas), where), [CaptureStage(prepare, run)], changes)

    @staticmethod
    def _set(optimizers: Sequence[Optimizer], lr: float | Tensor) -> None:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """The common optimizer's state by parameter name."""
        state, named = self.common.state, zip(self.axis.specs, self.axis.params, strict=True)
        return {"optimizer": {spec.name: _on_cpu(state[param]) for spec, param in named}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`; replicas have states of their own."""
        if not self.of_replicas:
            self._load(self.common, self.axis.params, state["optimizer"])

    def worker_state(self, row: int) -> dict[str, Any]:
        """One local worker's replica and its optimizer's state."""
        if not self.of_replicas:
            return {"replica": {}}
        named = [(spec.name, x) for spec, x in zip(self.axis.specs, self.axis.replicas[row], strict=True)]
        state = self.of_replicas[row].state
        return {
            "replica": {
                "parameters": {name: copy_on_cpu(x) for name, x in named},
                "optimizer": {name: _on_cpu(state.get(x, {})) for name, x in named},
            }
        }

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Continue from `worker_state()`."""
        replica = state["replica"]
        if not replica:
            return
        own = self.axis.replicas[row]
        for spec, x in zip(self.axis.specs, own, strict=True):
            restore_(x, replica["parameters"][spec.name])
        self.of_replicas[row].state.clear()
        self._load(self.of_replicas[row], own, replica["optimizer"])

    def _load(self, optimizer: Optimizer, params: Sequence[nn.Parameter], state: dict[str, Any]) -> None:
        for spec, param in zip(self.axis.specs, params, strict=True):
            for key, value in state[spec.name].items():
                if isinstance(value, Tensor) and not _belongs_to(value, param):
                    raise ValueError(f"{key} of {spec.name} has the shape {list(value.shape)}")
                # Adam counts its steps on the CPU, unless one kernel does everything
                on_device = isinstance(value, Tensor) and (key != "step" or optimizer.defaults.get("fused"))
                optimizer.state[param][key] = value.to(param.device) if on_device else value


def _states(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """All tensors of their states."""
    values = (value for optimizer in optimizers for own in optimizer.state.values() for value in own.values())
    return [value for value in values if isinstance(value, Tensor)]


def _belongs_to(value: Tensor, param: Tensor) -> bool:
    """Whether an optimizer can keep it of a parameter: one number, its shape, or sums along some of its dimensions."""
    if value.ndim == 0 or value.shape == param.shape:
        return True
    pairs = list(zip(value.shape, param.shape, strict=False))
    return value.ndim == param.ndim and value.numel() > 1 and all(own in (1, size) for own, size in pairs)


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter's state; what is on the CPU is not copied."""
    return {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}
