"""Outer optimizers, treatment of the inner optimizers' buffers at an averaging, and the exact average at the end.

z   the consensus      x_w   parameters of worker w      D = mean(z - x_w)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.replicas import Replicas
from accordion_bench.compressors.uncoded import Dense
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.optimizers.inner import Optimizers, is_sgd, without_dynamo
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.option import check_options, option, with_options
from accordion_bench.plan import Ladder, TensorSpec
from accordion_bench.tensors.same_shape import as_real

BUFFERS = ("keep", "reset", "average")


class Average:
    """z <- z - D, the mean of the workers' parameters: local SGD (Stich 2019)."""

    def step(self, z: Sequence[Tensor], differences: Sequence[Tensor], lr: float) -> None:
        """Take an outer step of z [...] in place, given D and the inner learning rate at the start of this round."""
        torch._foreach_sub_(list(z), list(differences))

    def buffers(self, z: Sequence[Tensor]) -> list[Tensor]:
        """Return the state tensors, zeros before the first step; checkpoints are loaded into them."""
        return []

    def resets(self, inner: Optimizers) -> bool:
        """Return whether the paper resets the buffers of these inner optimizers at an averaging."""
        return False


@with_options
class SlowMo(Average):
    """u <- beta u + D / gamma;  z <- z - alpha gamma u, with gamma the inner learning rate at the start of the round.

    If gamma is 0, z <- z - D, and u is unchanged.

    Source: Wang et al., ICLR 2020 (arXiv 1910.00643).
    """

    alpha: float = option("slow learning rate", default=1.0, above=0)
    beta: float = option("slow momentum; 0.4 to 0.8 in the paper", default=0.5, at_least=0, below=1)

    def __post_init__(self) -> None:
        check_options(self)
        self.u: list[Tensor] = []

    def step(self, z: Sequence[Tensor], differences: Sequence[Tensor], lr: float) -> None:
        if lr == 0:
            super().step(z, differences, lr)
            return
        self.buffers(z)
        torch._foreach_mul_(self.u, self.beta)
        torch._foreach_add_(self.u, list(differences), alpha=1 / lr)
        torch._foreach_sub_(list(z), self.u, alpha=self.alpha * lr)

    def buffers(self, z: Sequence[Tensor]) -> list[Tensor]:
        self.u = self.u or [torch.zeros_like(value) for value in z]
        return self.u

    def resets(self, inner: Optimizers) -> bool:
        return is_sgd(inner.common)


@with_options
class OuterSGD(Average):
    """z <- SGD(z, gradient D) with torch.optim.SGD: the outer step of DiLoCo, with Nesterov momentum.

    Source: Douillard et al. 2023 (arXiv 2311.08105).
    """

    outer_lr: float = option("not scheduled", default=0.7, above=0)
    outer_momentum: float = option(default=0.9, at_least=0, below=1)
    outer_nesterov: bool = option(default=True)

    def __post_init__(self) -> None:
        check_options(self)
        if self.outer_nesterov and not self.outer_momentum:
            raise ValueRefused("outer_nesterov", "{false} where outer_momentum is 0", True, False)
        own = {"lr": self.outer_lr, "momentum": self.outer_momentum, "nesterov": self.outer_nesterov}
        self.options: dict[str, Any] = own
        self.sgd: torch.optim.Optimizer | None = None

    def _begin(self, z: Sequence[Tensor]) -> torch.optim.Optimizer:
        self.parameters = [nn.Parameter(value) for value in z]  # share the storage of z
        self.sgd = without_dynamo(torch.optim.SGD)(self.parameters, **self.options)
        return self.sgd

    def step(self, z: Sequence[Tensor], differences: Sequence[Tensor], lr: float) -> None:
        sgd = self.sgd or self._begin(z)
        for parameter, difference in zip(self.parameters, differences, strict=True):
            parameter.grad = difference
        sgd.step()
        for parameter in self.parameters:
            parameter.grad = None

    def buffers(self, z: Sequence[Tensor]) -> list[Tensor]:
        if not self.options["momentum"]:
            return []
        state = (self.sgd or self._begin(z)).state
        for parameter in self.parameters:  # a buffer of zeros gives the same first step as none
            state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))
        return [state[parameter]["momentum_buffer"] for parameter in self.parameters]


class HeavyBall(Average):
    """v <- mu v - eta D;  z <- z + v, with eta = `outer_lr` and mu = `outer_momentum`, as in NoLoCo."""

    def __init__(self, outer_lr: float, outer_momentum: float) -> None:
        self.lr, self.momentum = outer_lr, outer_momentum
        self.v: list[Tensor] = []

    def step(self, z: Sequence[Tensor], differences: Sequence[Tensor], lr: float) -> None:
        self.buffers(z)
        torch._foreach_mul_(self.v, self.momentum)
        torch._foreach_sub_(self.v, list(differences), alpha=self.lr)
        torch._foreach_add_(list(z), self.v)

    def buffers(self, z: Sequence[Tensor]) -> list[Tensor]:
        self.v = self.v or [torch.zeros_like(value) for value in z]
        return self.v


OUTER: dict[str, type[Average]] = {"none": Average, "slowmo": SlowMo, "sgd": OuterSGD}


# ---- the inner optimizers' buffers: momenta, second moments


def treat_buffers(inner: Optimizers, policy: str, rows: Iterable[int] | None = None) -> None:
    """Keep, reset (including Adam's step count) or average the inner optimizers' buffers.

    Args:
        inner, policy: the optimizers, and one of `BUFFERS`.
        rows: rows of the local workers that took part in the averaging, for `keep` and `reset`; None = all.
    """
    if policy == "reset":
        for row in range(len(inner.of_replicas)) if rows is None else rows:
            inner.of_replicas[row].state.clear()
    elif policy == "average":
        average_buffers(inner)


def averaged(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the buffers of one parameter that can be averaged."""
    return [key for key, value in state.items() if isinstance(value, Tensor) and key != "step"]


@torch.no_grad()
def average_buffers(inner: Optimizers, due: Callable[[str], bool] = lambda key: True) -> None:
    """Replace the buffers whose names are `due` by their means over all workers, uncompressed, except step counts."""
    rows = [
        [optimizer.state.get(x, {}) for x in replica]
        for optimizer, replica in zip(inner.of_replicas, inner.axis.replicas, strict=True)
    ]
    # the buffers of an optimizer may differ between parameters
    held = [(i, key) for i, own in enumerate(rows[0]) for key in averaged(own)]
    for key in filter(due, dict.fromkeys(key for _, key in held)):
        holders = [i for i, its in held if its == key]
        stacked = [torch.stack([as_real(row[i][key]) for row in rows]) for i in holders]
        inner.axis.comm.ledger.paper_count(sum(x_W[0].numel() for x_W in stacked))
        means = inner.axis.comm.all_reduce_mean([inner.axis.comm.weighted(x_W) for x_W in stacked])
        for i, mean in zip(holders, means, strict=True):
            for row in rows:
                as_real(row[i][key]).copy_(mean)
    inner.axis.comm.clock.lap("exposed")


def exchanges_of_buffers(inner: Optimizers, comm: Comm) -> dict[str, Exchange]:
    """Return, by name of the buffers, an exchange with the bytes of their average, for forecasts after a step."""
    axis = inner.axis
    optimizer, params = (inner.of_replicas[0], axis.replicas[0]) if axis.replicas else (inner.common, axis.params)
    states = [(spec.name, optimizer.state.get(param, {})) for spec, param in zip(axis.specs, params, strict=True)]
    found: dict[str, list[TensorSpec]] = {}
    for name, own in states:
        for key in averaged(own):
            found.setdefault(key, []).append(TensorSpec(f"{name}.{key}", tuple(as_real(own[key]).shape)))
    exchanges = {key: Exchange(Dense(), specs, Ladder(), comm, axis.like) for key, specs in found.items()}
    for exchange in exchanges.values():
        exchange.what = "buffer"
    return exchanges


@torch.no_grad()
def exact_average(axis: Replicas) -> None:
    """z <- mean x_w; x_w <- z, uncompressed."""
    everyone = range(axis.comm.local_workers)
    comm = axis.comm

    def average() -> list[Tensor]:
        return comm.all_reduce_mean([comm.weighted(x_W) for x_W in axis.differences(axis.shared, everyone)])

    means = comm.membership.together(average)
    comm.ledger.paper_count(sum(mean.numel() for mean in means))
    torch._foreach_sub_(axis.shared, means)
    axis.restart(axis.shared, everyone)
    comm.clock.lap("exposed")
