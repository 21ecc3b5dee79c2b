"""Options of SGD, and SGD that adds the gradient twice, for the language model of Accordion's code."""

from typing import Any

import torch

from accordion_bench.options import checks
from accordion_bench.options.option import Choice, option, with_options


@with_options
class SGDPlusGradient(torch.optim.SGD):
    """v <- mu v + g;  x <- x - lr (g + v): in its own step a gradient counts twice.

    Args:
        params: trained parameters.
        nesterov: must be false; the other options are also those of torch.optim.SGD.

    Source: the language model of Accordion's official code (Agarwal et al., MLSys 2021, arXiv 2010.16248). There all
    but the first v start from uninitialised memory; here v starts from 0.
    """

    chosen_as = {
        "sgd": Choice(
            "with momentum. ${brought:X} is X, unless another choice, such as sync=slowmo, brings its own default; "
            "typed values take precedence",
            {"weight_decay": 1e-4},
            target="torch.optim.SGD",
        ),
        "sgd_plus_gradient": Choice(
            "SGD whose step adds the gradient and the momentum: the language model of Accordion's code"
        ),
    }

    def __init__(
        self,
        params: Any,
        lr: float = option(
            "learning rate per worker; schedule.lr_scaling raises it", default=0.1, above=0, brought=True
        ),
        momentum: float = option("0 = none", default=0.9, at_least=0, below=1, brought=True),
        nesterov: bool = option("Nesterov's momentum", default=False, brought=True),
        weight_decay: float = option("L2 penalty; 0 = none", default=0.0, at_least=0),
    ) -> None:
        if nesterov:
            rule = "{false}, because g + v takes its place"
            raise checks.ValueRefused("nesterov", rule, nesterov, False)
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
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
