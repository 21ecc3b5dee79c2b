"""Replicas: trained parameters of the local workers, shared by all of them or one copy per worker.

Local methods create a copy for each worker (`fork`), a replica; other methods share one copy.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accordion_bench.comm.collectives import Comm, split_like
from accordion_bench.comm.on_device import copy_on_cpu, restore_
from accordion_bench.options import checks
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.same_shape import as_kind_of, as_real


@torch.no_grad()
def pooled_buffers(buffers_W: Mapping[str, Tensor], comm: Comm, between: bool = True) -> dict[str, Tensor]:
    """Return the means of buffers over all workers, weighted by samples. Charged to `eval`.

    Integers and bools are those of worker 0. Buffers that are not dense are those of the first local worker. If
    `between`, a variance includes the variance of the workers' means.
    """
    pooled = {name: buffer_W[0].clone() for name, buffer_W in buffers_W.items()}
    dense = [name for name, buffer in pooled.items() if is_dense(buffer)]
    floats = [name for name in dense if pooled[name].is_floating_point() or pooled[name].is_complex()]
    comm.broadcast_([pooled[name] for name in dense if name not in floats], "eval")
    variances = [name for name in floats if name.endswith("running_var")] if between else []
    means_of = {name: name.removesuffix("var") + "mean" for name in variances}
    parts = [comm.weighted(as_real(buffers_W[name]).double()).sum(0) for name in floats]
    parts += [comm.weighted(buffers_W[means_of[name]].double().square()).sum(0) for name in variances]
    if not parts:
        return pooled
    total = comm.sum_(torch.cat([part.reshape(-1) for part in parts]), "eval") / comm.workers
    averages = split_like(total, parts)
    mean = dict(zip(floats, averages, strict=False))
    for name, square in zip(variances, averages[len(floats) :], strict=True):
        mean[name] = mean[name] + square - mean[means_of[name]].square()
    for name, value in mean.items():
        as_real(pooled[name]).copy_(value)
    return pooled


def is_dense(buffer: Tensor) -> bool:
    """Return whether a buffer is a strided tensor, which can be sent directly."""
    return buffer.layout == torch.strided and not buffer.is_nested


def dense_parts(buffer: Tensor) -> list[Tensor]:
    """Return the dense tensors that make up a sparse or nested tensor."""
    if buffer.is_nested:
        return list(buffer.unbind())
    if buffer.layout == torch.sparse_coo:
        buffer = buffer.coalesce()
        return [buffer.indices(), buffer.values()]
    by_row = buffer.layout in (torch.sparse_csr, torch.sparse_bsr)
    places = (buffer.crow_indices(), buffer.col_indices()) if by_row else (buffer.ccol_indices(), buffer.row_indices())
    return [*places, buffer.values()]


Tensors = Sequence[int] | None
"""Indices of trained tensors; None = all."""

T = TypeVar("T", bound=Tensor)


class Replicas:
    """Trainable parameters of a model, and the gradients of each of the W local workers.

    A complex parameter is represented by a real tensor [..., 2] of its real and imaginary parts.

    Args:
        named: names and parameters, in the model's order.
        tables: names of parameters that are embeddings or the output layer.

    Attributes:
        params: parameters of the model; after `fork` they refer to the values of different workers in turn.
        shared: values [...] that are equal on all workers: the parameters, or after `fork` the last consensus.
        gradients_W: gradients of this step, [W, ...], contiguous regardless of the memory format of the model.
        in_place: whether updates are passed to the optimizer at a fixed address, by a copy if necessary, as captured
            graphs require.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], comm: Comm, tables: Collection[str] = ()) -> None:
        self.comm = comm
        self.params = [param for _, param in named]
        self.shared = [as_real(param.data) for param in self.params]
        pairs = zip(named, self.shared, strict=True)
        self.specs = [TensorSpec(name, tuple(value.shape), name in tables) for (name, _), value in pairs]
        self.like = self.shared[0]  # has the dtype and device of exchanged tensors
        self.replicas: list[list[nn.Parameter]] = []  # parameters of each local worker, after `fork`
        self.gradients_W: list[Tensor] = []
        self.resting: set[int] = set()  # local workers whose optimizers do nothing in this step
        self.in_place = False
        self._laid_out: dict[nn.Parameter, Tensor] = {}  # updates in the memory format of the parameter

    def fork(self) -> None:
        """Create parameters for every local worker, equal to the shared ones."""
        raise NotImplementedError

    def share(self) -> None:
        """Set the model's parameters to the shared ones, which the optimizer of all workers steps."""
        raise NotImplementedError

    def taken(self, i: int) -> Tensor:
        """Take the gradients [W, ...] of one parameter once its last backward pass is complete."""
        raise NotImplementedError

    @torch.no_grad()
    def differences(self, anchor: Sequence[Tensor], rows: range, tensors: Tensors = None) -> list[Tensor]:
        """Return anchor - x of some local workers, [rows, ...], for some tensors or all. Overwrites their gradients."""
        parts_W = [g_W[rows.start : rows.stop] for g_W in _chosen(self.gradients_W, tensors)]
        for i, row in enumerate(rows):
            own = [part_W[i] for part_W in parts_W]
            torch._foreach_copy_(own, list(anchor))
            torch._foreach_sub_(own, self.values(row, tensors))
        return parts_W

    @torch.no_grad()
    def restart(self, anchor: Sequence[Tensor], rows: range, tensors: Tensors = None) -> None:
        """x <- anchor for some local workers; arguments as in `differences`."""
        for row in rows:
            torch._foreach_copy_(self.values(row, tensors), list(anchor))

    @torch.no_grad()
    def clip(self, norm: float) -> None:
        """Scale each worker's gradients down to a global L2 norm of at most `norm`."""
        for row in range(self.comm.local_workers):
            own = [g_W[row] for g_W in self.gradients_W]
            torch._foreach_mul_(own, clip_factor(own, norm))

    @torch.no_grad()
    def pull(self, anchor: Sequence[Tensor], alpha: float, tensors: Tensors = None) -> None:
        """x <- (1 - alpha) x + alpha anchor for every local worker; `anchor` and `tensors` as in `differences`."""
        for row in range(len(self.replicas)):
            torch._foreach_lerp_(self.values(row, tensors), list(anchor), alpha)

    def values(self, row: int, tensors: Tensors = None) -> list[Tensor]:
        """Return the parameters of a local worker, a tensor [...] per spec."""
        return [as_real(x.data) for x in _chosen(self.replicas[row], tensors)]

    @torch.no_grad()
    def mean_replica(self, account: str) -> list[Tensor]:
        """Return the exact mean of all workers' parameters in new tensors; charged to `account`."""
        return self.mean_over_workers(self.replicas, account)

    @torch.no_grad()
    def mean_over_workers(self, rows: Sequence[Sequence[Tensor]], account: str) -> list[Tensor]:
        """Return the mean over all workers of tensors of the local workers, one per spec; see `mean_replica`."""
        stacked = (torch.stack([as_real(x.data) for x in xs]) for xs in zip(*rows, strict=True))
        sums = [self.comm.weighted(x_W).sum(0) for x_W in stacked]
        total = torch.cat([x.flatten() for x in sums])
        mean = self.comm.sum_(total, account) / self.comm.workers
        parts = mean.split([spec.numel for spec in self.specs])
        return [part.view(spec.shape) for part, spec in zip(parts, self.specs, strict=True)]

    def apply(self, updates: Sequence[Tensor]) -> None:
        """Set the gradients of the shared parameters to the updates, in the parameters' memory format."""
        places, copied = [], []
        for param, update in zip(self.params, updates, strict=True):
            gradient = as_kind_of(update, param)
            if self.in_place or gradient.stride() != param.stride():
                if param not in self._laid_out:
                    self._laid_out[param] = torch.empty_like(param).detach()
                places.append(self._laid_out[param])
                copied.append(gradient)
                gradient = places[-1]
            param.grad = gradient
        if places:
            torch._foreach_copy_(places, copied)

    def state_dict(self) -> dict[str, Any]:
        """Return the values that are equal on all workers."""
        named = zip(self.specs, self.shared, strict=True)
        return {"parameters": {spec.name: copy_on_cpu(value) for spec, value in named}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values from `state_dict()`."""
        for spec, value in zip(self.specs, self.shared, strict=True):
            restore_(value, state["parameters"][spec.name])


def _chosen(values: Sequence[T], tensors: Tensors) -> Sequence[T]:
    return values if tensors is None else [values[i] for i in tensors]


def check_clipping(norm: object, at: object) -> None:
    """Check the options `clip_norm` and `clip_at`.

    Raises:
        ValueRefused: if one is invalid.
    """
    if norm is not None:
        checks.number("clip_norm", norm, above=0, instead=1.0)
    if at is not None:
        checks.choice("clip_at", at, ["before", "after"])


def clip_factor(xs: Sequence[Tensor], norm: float) -> Tensor:
    """Return the factor that reduces the global L2 norm of tensors to `norm`; 1 if it is at most that or non-finite."""
    # by row, because the third digit of one float32 sum over millions of entries would be wrong
    rows = [torch.linalg.vector_norm(x.flatten(1) if x.ndim > 1 else x, dim=-1).flatten() for x in xs]
    total = torch.cat(rows).norm()
    # non-finite tensors stay unchanged, so that the error names the right parameter
    return torch.where(total.isfinite(), (norm / total).clamp_max(1.0), 1.0)
