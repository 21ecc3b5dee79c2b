"""torch's own optimizers, without the seconds that their first use spends on importing its compiler; one of ours."""

import inspect
from typing import Any

import torch

from accordion_bench.options import checks


def without_dynamo(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The same class with the methods that torch marks as invisible to torch.compile unwrapped.

    The marks import torch._dynamo on first call (4 s of the 5 s that a run may take to its first step), and mean
    nothing to an optimizer that is not compiled. `step` is wrapped there in no_grad too, which is kept.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    methods["step"] = torch.no_grad()(inspect.unwrap(optimizer.step))
    return type(optimizer.__name__, (optimizer,), methods)


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
            rule = "false, because g + v takes its place"
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
