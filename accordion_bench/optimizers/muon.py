"""Muon: orthogonalised momentum for hidden matrices, AdamW for all other parameters."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from accordion_bench.codecs.orthonormal import PRECISIONS, orthogonalise
from accordion_bench.optimizers.elementwise import NO_GROWTH
from accordion_bench.optimizers.inner import MATRIX, TABLE, VECTOR, is_matrix, parameter_kinds
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.options.units import counted

ADAMW_EPS = 1e-8


@with_options
class Muon(torch.optim.Optimizer):
    """B <- mu B + g;  O = NewtonSchulz(g + mu B);  x <- (1 - eta lambda) x - s eta O, for every hidden matrix [n, m].

    A tensor with more dimensions is the matrix [first dimension, all others]. Matrices of one shape are orthogonalised
    together. A step changes a matrix by about s eta in each direction, independent of the gradient's size. Tables
    (embeddings, output layer) and vectors are updated by AdamW, with the learning rate `adamw_factor` eta.

    Args:
        params: trained parameters.
        nesterov: whether g + mu B is orthogonalised; otherwise B.
        adjust_lr_fn: s: `original`, sqrt(max(1, n / m)); `match_rms_adamw`, 0.2 sqrt(max(n, m)).
        kinds: kind of each parameter, see `parameter_kinds`; None = matrix, if the shape allows it.

    Raises:
        ConfigError: a value breaks a rule, or there is no hidden matrix.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; `match_rms_adamw`: Liu et al.
    2025 (arXiv 2502.16982).
    """

    chosen_as = {
        "muon": Choice(
            "orthogonalised momentum for hidden matrices, AdamW for the rest; a run prints which parameters are which",
            brings={"schedule.lr_scaling": ("sqrt", NO_GROWTH)},
        )
    }

    def __init__(
        self,
        params: Any,
        lr: float = option("learning rate of one worker, for matrices; the schedule scales it", default=0.02, above=0),
        momentum: float = option("0 = none", default=0.95, at_least=0, below=1),
        nesterov: bool = option("Nesterov's momentum", default=True),
        weight_decay: float = option("decoupled from the gradient; 0 = none", default=0.01, at_least=0),
        decay_on: str | None = option(
            "decay only matrices, not biases and norms; null = all", default="matrices", choices=("matrices",)
        ),
        adjust_lr_fn: str = option(
            "original; match_rms_adamw: updates of AdamW's size, so that its lr (1e-3) and decay (0.1) apply",
            default="original",
            choices=("original", "match_rms_adamw"),
        ),
        ns_steps: int = option(
            "Newton-Schulz steps; more = closer to orthogonal, and slower", default=5, at_least=1, at_most=99, instead=5
        ),
        ns_precision: str | None = option(
            "bfloat16: precision of its products; null = that of the parameters",
            default="bfloat16",
            choices=("bfloat16",),
        ),
        adamw_factor: float = option(
            "AdamW's learning rate as a multiple of lr; 1 with match_rms_adamw", default=0.05, above=0
        ),
        betas: Sequence[float] = option("betas of AdamW", default=(0.9, 0.95)),
        kinds: Sequence[str] | None = None,
    ) -> None:
        betas = checks.betas(betas, [0.9, 0.95])
        params = list(params)
        if kinds is None:
            kinds = [MATRIX if is_matrix(param) else VECTOR for param in params]
        if MATRIX not in kinds:
            raise ConfigError(
                "model must have a matrix besides embedding and output layer where optimizer=muon, got none; type "
                "optimizer=adamw"
            )
        groups = []
        for kind in dict.fromkeys(kinds):
            own = [param for param, its in zip(params, kinds, strict=True) if its == kind]
            decay = 0.0 if kind == VECTOR and decay_on else weight_decay
            groups.append({"params": own, "kind": kind, "weight_decay": decay})
        options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "kind": MATRIX}
        options |= {"adjust_lr_fn": adjust_lr_fn, "ns_steps": ns_steps, "ns_precision": ns_precision}
        super().__init__(groups, {"lr": lr, "adamw_factor": adamw_factor, "betas": betas, **options})

    @staticmethod
    def describe_split(model: nn.Module) -> str:
        """Return one line that states which parameters are orthogonalised, and which AdamW updates."""
        kinds, sizes = parameter_kinds(model), {name: param.numel() for name, param in model.named_parameters()}
        matrices, tables, vectors = ([name for name in kinds if kinds[name] == k] for k in (MATRIX, TABLE, VECTOR))
        rest = [*tables, *([counted(len(vectors), "vector")] if vectors else [])]
        sums = [f"{sum(sizes[name] for name in names):,} parameters" for names in (matrices, [*tables, *vectors])]
        taken = "1 matrix" if len(matrices) == 1 else f"{len(matrices)} matrices"
        return f"Muon takes {taken} ({sums[0]}), AdamW the rest ({sums[1]}): {', '.join(rest) or 'nothing'}"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            given = [(param, param.grad) for param in group["params"] if param.grad is not None]
            params, gradients = [param for param, _ in given], [gradient for _, gradient in given]
            if group["kind"] != MATRIX:
                self._adamw_step(params, gradients, group)
            elif params:
                self._muon_step(params, gradients, group)

    def _muon_step(self, params: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        buffers = [self._buffer(param, "momentum_buffer") for param in params]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, gradients)
        directions: Sequence[Tensor] = buffers
        if group["nesterov"]:
            directions = torch._foreach_add(gradients, buffers, alpha=group["momentum"])
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        by_shape: dict[torch.Size, list[int]] = {}
        for i, param in enumerate(params):
            by_shape.setdefault(param.shape, []).append(i)
        for shape, members in by_shape.items():
            matrices = torch.stack([directions[i].reshape(shape[0], -1) for i in members])
            found = orthogonalise(matrices, group["ns_steps"], PRECISIONS[group["ns_precision"]])
            rate = group["lr"] * scale_of(matrices.shape[1], matrices.shape[2], group["adjust_lr_fn"])
            torch._foreach_add_([params[i] for i in members], [x.reshape(shape) for x in found], alpha=-rate)

    def _adamw_step(self, params: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        adamw(
            params,
            gradients,
            [self._buffer(param, "exp_avg") for param in params],
            [self._buffer(param, "exp_avg_sq") for param in params],
            [],
            [self.state[param].setdefault("step", torch.tensor(0.0)) for param in params],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["adamw_factor"] * group["lr"],
            weight_decay=group["weight_decay"],
            eps=ADAMW_EPS,
            maximize=False,
        )

    def _buffer(self, param: Tensor, key: str) -> Tensor:
        state = self.state[param]
        if key not in state:
            state[key] = torch.zeros_like(param)
        buffer: Tensor = state[key]
        return buffer


def scale_of(rows: int, columns: int, rule: str) -> float:
    """Return s, the factor of the learning rate of a matrix, by a rule of `adjust_lr_fn`."""
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))
