"""Outer optimizers: what becomes of the consensus z when the workers' mean difference D = mean(z - x_w) is known."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accordion_bench.comm.on_device import copy_on_cpu, restored
from accordion_bench.optimizers.torch_optim import without_dynamo
from accordion_bench.options import checks


class Average:
    """z <- z - D, the mean of the workers' parameters: local SGD (Stich 2019)."""

    def step(self, z: Sequence[Tensor], differences: Sequence[Tensor], lr: float) -> None:
        """One outer step, in place.

        Args:
            z: the consensus [...], per tensor.
            differences: D.
            lr: the inner learning rate of this round.
        """
        torch._foreach_sub_(list(z), list(differences))

    def buffers(self, z: Sequence[Tensor]) -> list[Tensor]:
        """What it keeps from one step to the next, zeros before the first one; may be overwritten in place."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Copies of the buffers on the CPU, in the order of the parameters."""
        return {}

    def load_state_dict(self, state: dict[str, Any], z: Sequence[Tensor]) -> None:
        """Continue from `state_dict()`."""


class SlowMo(Average):
    """u <- beta u + D / gamma;  z <- z - alpha gamma u, with gamma the inner learning rate at the start of the round.

    While gamma is 0 nothing is divided: z <- z - D, and u stays.

    Args:
        alpha: slow learning rate; 1 = the paper's.
        beta: slow momentum in [0, 1); higher = longer memory, the paper's runs have 0.4 to 0.8.

    Source: Wang et al., ICLR 2020 (arXiv 1910.00643).
    """

    def __init__(self, alpha: float = 1.0, beta: float = 0.5) -> None:
        self.alpha = checks.number("alpha", alpha, above=0, instead=1)
        self.beta = checks.number("beta", beta, at_least=0, below=1, instead=0.5)
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

    def state_dict(self) -> dict[str, Any]:
        return {"u": list(map(copy_on_cpu, self.u))} if self.u else {}

    def load_state_dict(self, state: dict[str, Any], z: Sequence[Tensor]) -> None:
        if "u" in state:
            self.u = [restored(value, u) for u, value in zip(state["u"], z, strict=True)]


class OuterSGD(Average):
    """z <- SGD(z, gradient D), torch's own: DiLoCo's outer step with Nesterov momentum.

    Args:
        outer_lr: its learning rate, not scheduled; DiLoCo 0.7.
        outer_momentum: in [0, 1); DiLoCo 0.9.
        outer_nesterov: look ahead.

    Source: Douillard et al. 2023 (arXiv 2311.08105).
    """

    def __init__(self, outer_lr: float = 0.7, outer_momentum: float = 0.9, outer_nesterov: bool = True) -> None:
        checks.number("outer_lr", outer_lr, above=0, instead=0.7)
        checks.number("outer_momentum", outer_momentum, at_least=0, below=1, instead=0.9)
        checks.boolean("outer_nesterov", outer_nesterov)
        if outer_nesterov and not outer_momentum:
            raise checks.ValueRefused("outer_nesterov", "false where outer_momentum is 0", True, False)
        self.options: dict[str, Any] = {"lr": outer_lr, "momentum": outer_momentum, "nesterov": outer_nesterov}
        self.sgd: torch.optim.Optimizer | None = None

    def _begin(self, z: Sequence[Tensor]) -> torch.optim.Optimizer:
        self.parameters = [nn.Parameter(value) for value in z]  # they share z's storage
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
        for parameter in self.parameters:  # torch's first step leaves the same in a buffer of zeros as in none
            state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))
        return [state[parameter]["momentum_buffer"] for parameter in self.parameters]

    def state_dict(self) -> dict[str, Any]:
        if self.sgd is None or not self.options["momentum"]:
            return {}
        return {"momentum": [copy_on_cpu(self.sgd.state[p]["momentum_buffer"]) for p in self.parameters]}

    def load_state_dict(self, state: dict[str, Any], z: Sequence[Tensor]) -> None:
        if "momentum" not in state:
            return
        sgd = self._begin(z)
        for parameter, buffer in zip(self.parameters, state["momentum"], strict=True):
            if buffer is not None:
                sgd.state[parameter]["momentum_buffer"] = restored(parameter.data, buffer)


OUTER: dict[str, type[Average]] = {"none": Average, "slowmo": SlowMo, "sgd": OuterSGD}
