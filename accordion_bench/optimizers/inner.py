"""Inner optimizers: one for the shared parameters, or one per replica once workers take local steps."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from accordion_bench.comm.graphs import UPDATE, CapturedWork, CaptureStage, eagerly
from accordion_bench.comm.on_device import copy_on_cpu, restore_
from accordion_bench.comm.replicas import Replicas
from accordion_bench.tensors.same_shape import as_kind_of

MATRIX, TABLE, VECTOR = "matrix", "table", "vector"
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
TABLE_NAMES = ("embed", "position")  # in names of embeddings that are plain parameters, such as `pos_embed`


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """Return the kind of each trained parameter by name, in the model's order.

    A matrix has at least two dimensions, and at least two rows and two columns, if the first dimension counts as rows
    and all others as columns. It is a table if each token or class has its own row: parameters of embeddings,
    parameters with such names, and the matrices of the last module that has any, the output layer. All others are
    vectors: biases, norms, scales.
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
    """Return the names of trained embeddings and of the output layer."""
    return {name for name, kind in parameter_kinds(model).items() if kind == TABLE}


def is_matrix(param: Tensor) -> bool:
    """Whether the view [first dimension, all others] has at least two rows and two columns."""
    return param.ndim >= 2 and param.shape[0] >= 2 and param.numel() >= 2 * param.shape[0]


def _matrices(module: nn.Module) -> list[Tensor]:
    """Return the matrices of a module itself, without those of its children."""
    return [param for param in module.parameters(recurse=False) if is_matrix(param)]


Optimizer = torch.optim.Optimizer


class OptimizerLike(Protocol):
    """Protocol of one optimizer, or of several of one model, as schemes read it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameters and options."""

    @property
    def state(self) -> Any:
        """State, of which `get(parameter, default)` and `clear()` are used."""


class Optimizers(Protocol):
    """Protocol that schemes need: the optimizer of the shared parameters, and after `fork` one per local replica."""

    axis: Replicas

    @property
    def common(self) -> OptimizerLike:
        """Optimizer of the shared parameters."""

    @property
    def of_replicas(self) -> Sequence[OptimizerLike]:
        """Optimizer of each local worker."""

    def fork(self) -> None:
        """Create an optimizer for every local replica, with a copy of the common one's state."""


def is_sgd(optimizer: OptimizerLike) -> bool:
    """Whether the optimizer, or each of several, is torch's SGD."""
    return all(isinstance(own, torch.optim.SGD) for own in getattr(optimizer, "optimizers", [optimizer]))


class InnerOptimizers:
    """Optimizer of the parameters shared by all workers; after `fork`, one per local replica.

    Args:
        axis: replicas that are trained.
        build: function that creates the common optimizer for a list of parameters.
        build_for_replica: function that creates the optimizer of a replica.

    Attributes:
        common: optimizer of the shared parameters.
        of_replicas: one per local worker, after `fork`.
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
        self._lr: Tensor | None = None  # learning rate on the device, for captured updates
        self._rate: float | None = None  # value of `_lr`
        self._state_count = -1  # number of state tensors after the last step

    def fork(self) -> None:
        """Create one optimizer per replica with a copy of the common one's state, and clear the common one's state."""
        for replica in self.axis.replicas:
            optimizer = self.build_for_replica(replica)
            for mine, common in zip(replica, self.axis.params, strict=True):
                state = self.common.state.get(common, {})
                optimizer.state[mine] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            self.of_replicas.append(optimizer)
        self.common.state.clear()

    def step(self, lr: float, do: Callable[[CapturedWork], object] | None = None) -> None:
        """x <- optimizer(x, g) of the shared parameters; after `fork`, of each local worker's.

        Args:
            lr: learning rate.
            do: executes the update if all optimizers are fused, possibly captured; None = execute it eagerly.
        """
        optimizers = self.of_replicas or [self.common]
        for row, replica in enumerate(self.axis.replicas if self.of_replicas else []):
            for x, gradient_W in zip(replica, self.axis.gradients_W, strict=True):
                x.grad = None if row in self.axis.resting else as_kind_of(gradient_W[row], x)
        if all(optimizer.defaults.get("fused") for optimizer in optimizers):
            lr = float(np.float32(lr))  # captured kernels read a float32, so that eager updates use the same value
            if do is not None:
                self._step_fused(optimizers, lr, do)
                return
        self._set(optimizers, lr)
        for optimizer in optimizers:
            optimizer.step()

    def _step_fused(self, optimizers: Sequence[Optimizer], lr: float, do: Callable[[CapturedWork], object]) -> None:
        """Take a step that may be captured, unless it creates state: a capture would only allocate it."""
        if len(_states(optimizers)) == self._state_count:
            do(self._update(optimizers, lr))
        else:
            eagerly(self._update(optimizers, lr))
        self._state_count = len(_states(optimizers))

    def _update(self, optimizers: Sequence[Optimizer], lr: float) -> CapturedWork:
        """Return the step of fused optimizers, which read the learning rate from the device.

        Its key has the addresses of parameters, gradients and state: a cleared momentum needs another capture.
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
        """Return the common optimizer's state by parameter name."""
        state, named = self.common.state, zip(self.axis.specs, self.axis.params, strict=True)
        return {"optimizer": {spec.name: _on_cpu(state[param]) for spec, param in named}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`; a no-op if replicas have their own optimizers."""
        if not self.of_replicas:
            self._load(self.common, self.axis.params, state["optimizer"])

    def worker_state(self, row: int) -> dict[str, Any]:
        """Return one local worker's replica and its optimizer's state."""
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
        """Restore from `worker_state()`."""
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
                # Adam's step count is on the CPU, unless the optimizer is fused
                on_device = isinstance(value, Tensor) and (key != "step" or optimizer.defaults.get("fused"))
                optimizer.state[param][key] = value.to(param.device) if on_device else value


def _states(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    values = (value for optimizer in optimizers for own in optimizer.state.values() for value in own.values())
    return [value for value in values if isinstance(value, Tensor)]


def _belongs_to(value: Tensor, param: Tensor) -> bool:
    """Whether a tensor can be the state of a parameter: a scalar, the same shape, or sums along some dimensions."""
    if value.ndim == 0 or value.shape == param.shape:
        return True
    pairs = list(zip(value.shape, param.shape, strict=False))
    return value.ndim == param.ndim and value.numel() > 1 and all(own in (1, size) for own, size in pairs)


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy one parameter's state to the CPU; tensors on the CPU are not copied."""
    return {key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()}


# ---- torch's optimizers without the import of torch._dynamo on first use, and fused on a GPU


def without_dynamo(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a subclass whose methods lack the decorators that hide them from torch.compile.

    On first call the decorators import torch._dynamo (4 s of the 5 s that a run may take to its first step). They have
    no effect on an optimizer that is not compiled. `step` keeps its no_grad decorator.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    methods["step"] = torch.no_grad()(inspect.unwrap(optimizer.step))
    return type(optimizer.__name__, (optimizer,), methods)


def fused(optimizer: type[torch.optim.Optimizer], device: torch.device) -> Any:
    """Return the optimizer with `fused=True` on a GPU, if it supports that: one kernel for many parameters.

    The results differ from torch's default in the last bits.
    """
    if device.type == "cpu" or "fused" not in inspect.signature(optimizer).parameters:
        return optimizer
    options: dict[str, Any] = {"fused": True}
    if "capturable" in inspect.signature(optimizer).parameters:
        options["capturable"] = True  # Adam checks it when its step is captured
    return functools.partial(optimizer, **options)
