"""AdamW with optional decay of matrices only, and its decay alone for methods that take the step themselves."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from accordion_bench.options import checks
from accordion_bench.options.option import Choice, option, with_options

NO_GROWTH = "its steps do not grow with the gradient"
MATRICES = "decay all parameters (null), or only matrices, not biases and norms, as usual for transformers"


@with_options
class AdamW(torch.optim.AdamW):
    """m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  x <- x - lr lambda x - lr m' / (sqrt(v') + eps).

    m' and v' are m / (1 - b1^t) and v / (1 - b2^t); everything else is torch.optim.AdamW's.

    Args:
        params: trained parameters; those with two dimensions or more, including embeddings, count as `matrices`.
        fused: whether one kernel updates many parameters, on a GPU.
        options: further options of torch.optim.AdamW.

    Class attributes:
        decaying: class that replaces it if a compressor or a scheme takes the step itself.

    Source: Loshchilov and Hutter 2019 (arXiv 1711.05101).
    """

    decaying = "accordion_bench.optimizers.adamw.Decay"
    chosen_as = {
        "adamw": Choice(
            "Adam with decoupled weight decay (Loshchilov and Hutter 2019)",
            brings={"schedule.lr_scaling": ("sqrt", f"{NO_GROWTH} (Malladi et al. 2022)")},
        )
    }

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = option("learning rate of one worker; the schedule scales it", default=1e-3, above=0),
        betas: Sequence[float] = option("larger = longer memory", default=(0.9, 0.999)),
        weight_decay: float = option("decoupled from the gradient; 0 = none", default=0.01, at_least=0),
        decay_on: str | None = option(MATRICES, default=None, choices=("matrices",)),
        fused: bool | None = None,
        **options: Any,
    ) -> None:
        kept: Any = {"lr": lr, "betas": checks.betas(betas, [0.9, 0.999]), "weight_decay": weight_decay, "fused": fused}
        super().__init__(decaying_groups(params, decay_on), **kept, **options)


class Decay(AdamW):
    """x <- x - lr lambda x: AdamW for gradients equal to 0, without its state. The arguments are those of `AdamW`."""

    decaying = ""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Decay every parameter that has a gradient; its value is ignored."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group["weight_decay"] and params:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        return loss


def decaying_groups(params: Iterable[nn.Parameter], decay_on: str | None) -> list[dict[str, Any]]:
    """Split parameters into groups with and without decay; see `decay_on` of `AdamW`."""
    everything = list(params)
    if decay_on is None:
        return [{"params": everything}]
    matrices, others = ([x for x in everything if (x.ndim > 1) == wanted] for wanted in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
