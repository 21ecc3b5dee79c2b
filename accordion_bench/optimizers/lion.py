"""Lion: sign of an interpolated momentum, with steps of equal size in every coordinate."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from accordion_bench.optimizers.adamw import MATRICES, NO_GROWTH, decaying_groups
from accordion_bench.options import checks
from accordion_bench.options.option import Choice, option, with_options


@with_options
class Lion(torch.optim.Optimizer):
    """u = sgn(b1 m + (1 - b1) g);  m <- b2 m + (1 - b2) g;  x <- x - lr lambda x - lr u, with sgn 0 = 0.

    Args:
        params: trained parameters.

    Class attributes:
        decaying: see `AdamW`.

    Raises:
        ConfigError: a value breaks a rule.

    Source: Chen et al. 2023 (arXiv 2302.06675).
    """

    decaying = "accordion_bench.optimizers.adamw.Decay"
    chosen_as = {
        "lion": Choice(
            "sign of a momentum, with steps of equal size in every coordinate (Chen et al. 2023)",
            {"lr": 3e-4, "weight_decay": 0.03},
            brings={"schedule.lr_scaling": ("sqrt", NO_GROWTH)},
        )
    }

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = option(
            "learning rate of one worker, a third to a tenth of AdamW's; the schedule scales it", default=1e-4, above=0
        ),
        betas: Sequence[float] = option("larger = longer memory", default=(0.9, 0.99)),
        weight_decay: float = option(
            "decoupled from the gradient, three to ten times AdamW's; 0 = none", default=0.0, at_least=0
        ),
        decay_on: str | None = option(MATRICES, default=None, choices=("matrices",)),
    ) -> None:
        defaults = {"lr": lr, "betas": checks.betas(betas, [0.9, 0.99]), "weight_decay": weight_decay}
        super().__init__(decaying_groups(params, decay_on), defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            gradients, (b1, b2) = [param.grad for param in params], group["betas"]
            for param in params:
                self.state[param].setdefault("exp_avg", torch.zeros_like(param))
            momenta = [self.state[param]["exp_avg"] for param in params]
            updates = torch._foreach_lerp(gradients, momenta, b1)
            torch._foreach_sign_(updates)
            torch._foreach_lerp_(momenta, gradients, 1 - b2)
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-group["lr"])
