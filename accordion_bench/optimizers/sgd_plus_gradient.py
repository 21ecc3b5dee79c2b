"""SGD in which a gradient counts once more in its own step: the language model of Accordion's official code."""

from typing import Any

import torch

from accordion_bench.options import checks


class SGDPlusGradient(torch.optim.SGD):
    """v <- mu v + g;  x <- x - lr (g + v): a gradient counts once more in its own step than with SGD.

    Args:
        params: what is trained.
        nesterov: must be false.
        options: those of torch.optim.SGD.

    Source: the language model of Accordion's official code (Agarwal et al., MLSys 2021, arXiv 2010.16248); there all
    but the first v start from uninitialised memory, here from 0.
    """

    def __init__(self, params: Any, nesterov: bool = False, **options: Any) -> None:
        if nesterov:
            rule = "{false}, because g + v takes its place"
            raise checks.ValueRefused("nesterov", rule, nesterov, False)
        super().__init__(params, **options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step from the gradients."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            gradients = [param.grad for param in params]
            if group["weight_decay"]:
                gradients = list(torch._foreach_add(gradients, params, alpha=group["weight_decay"]))
            for param in params:
                self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
            buffers = [self.state[param]["momentum_buffer"] for param in params]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, gradients)
            torch._foreach_add_(params, gradients, alpha=-group["lr"])
            torch._foreach_add_(params, buffers, alpha=-group["lr"])
