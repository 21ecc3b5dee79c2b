"""Optimizers that update each coordinate by itself: SGD with the gradient added twice, AdamW, and Lion."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
        for group, params, gradients in _with_gradients(self):
            if group["weight_decay"]:
                gradients = list(torch._foreach_add(gradients, params, alpha=group["weight_decay"]))
            buffers = _buffers(self, params, "momentum_buffer")
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, gradients)
            torch._foreach_add_(params, gradients, alpha=-group["lr"])
            torch._foreach_add_(params, buffers, alpha=-group["lr"])


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

    decaying = "accordion_bench.optimizers.elementwise.Decay"
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
        for group, params, _ in _with_gradients(self):
            if group["weight_decay"]:
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

    decaying = "accordion_bench.optimizers.elementwise.Decay"
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
        for group, params, gradients in _with_gradients(self):
            b1, b2 = group["betas"]
            momenta = _buffers(self, params, "exp_avg")
            updates = torch._foreach_lerp(gradients, momenta, b1)
            torch._foreach_sign_(updates)
            torch._foreach_lerp_(momenta, gradients, 1 - b2)
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-group["lr"])


def _with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], list[Tensor], list[Tensor]]]:
    """Yield each group with its parameters that have a gradient, and these gradients; skip groups without any."""
    for group in optimizer.param_groups:
        params = [param for param in group["params"] if param.grad is not None]
        if params:
            yield group, params, [param.grad for param in params]


def _buffers(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], name: str) -> list[Tensor]:
    """Return a buffer of each parameter, zeros at first."""
    for param in params:
        optimizer.state[param].setdefault(name, torch.zeros_like(param))
    return [optimizer.state[param][name] for param in params]
