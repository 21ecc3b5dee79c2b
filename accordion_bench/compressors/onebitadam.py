"""1-bit Adam: Adam for some steps; then the variance is frozen, and the momentum is exchanged as signs.

Tensor suffixes: W local workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import rate_of_each, rates_of
from accordion_bench.codecs.engine import MomentumSteps
from accordion_bench.codecs.engines import engine_for
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context, Exchanged, State
from accordion_bench.compressors.description import OptimizerPart, Traits
from accordion_bench.compressors.error_feedback import ErrorFeedback
from accordion_bench.compressors.sign import Sign
from accordion_bench.compressors.two_way import TwoWay
from accordion_bench.compressors.wrapper import Wrapper
from accordion_bench.options import checks
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import RunFacts, TensorSpec
from accordion_bench.tensors.same_shape import Blocks

WARM_UP = 0.15  # share of the steps of a run
ALIVE = "alive"  # state key of the mask of coordinates with gradients


class AdamSigns(ErrorFeedback):
    """CA(a x_w): signs of a x_w + e_w to the owners, signs of their mean + e~ back; the errors remain in e_w and e~.

    The scale is ||u||_2 / sqrt(d) on both sides, and sgn 0 = +1. A sign cannot represent 0. Dead coordinates (see
    `declare_dead`) are decoded as 0 and have no residual, which would otherwise follow the scale indefinitely.

    With a momentum factor b, b m is added to every a x_w. m is stored in the state of tensors that send signs.

    Args:
        weight: a.
        momentum: b.

    Source: Tang et al. 2021 (arXiv 2102.02888); Lu et al. 2022 (arXiv 2202.06009).
    """

    def __init__(self, weight: float = 1.0, momentum: float = 0.0) -> None:
        super().__init__(TwoWay(Sign("l2"), residual=True))
        self.weight, self.momentum = weight, momentum

    def scales(self, ctx: Context) -> Sequence[float]:
        return [self.weight] * len(ctx.specs)

    def masks(self, ctx: Context, state: State) -> Sequence[Tensor | None]:
        return [state.get(spec.name, {}).get(ALIVE) for spec in ctx.specs]

    def momenta(self, ctx: Context, state: State) -> tuple[Sequence[Tensor | None], float]:
        if not self.momentum:
            return (), 0.0
        pairs = zip(ctx.specs, ctx.levels, strict=True)
        return [None if level is None else state[spec.name]["momentum"] for spec, level in pairs], self.momentum

    def exchange_signs(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        """Exchange signs without masking: the values of dead coordinates are undefined."""
        return super().exchange(xs_W, ctx, state, comm)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        out = self.exchange_signs(xs_W, ctx, state, comm)
        pairs = zip(out.update, self.masks(ctx, state), strict=True)
        if alive := [(update, mask) for update, mask in pairs if mask is not None]:
            torch._foreach_mul_([update for update, _ in alive], [mask for _, mask in alive])
        return out


def declare_dead(state: State, variances: Mapping[str, Tensor]) -> None:
    """Store in a state of `AdamSigns` which coordinates have never had a gradient: those whose variance is 0.

    The mask `alive` is 0 there and 1 elsewhere. A tensor that is dead as a whole needs no mask, because the scale of
    zeros is 0, nor does one that is alive as a whole. On a GPU all tensors get one, because a check would synchronise.

    Args:
        state: changed in place.
        variances: [...], by name of the tensor.
    """
    for name, v in variances.items():
        own, living = state.setdefault(name, {}), v > 0
        own.pop(ALIVE, None)
        if not engine_for([v]).checks_input or 0 < int(living.sum()) < v.numel():
            own[ALIVE] = living.to(v.dtype)


def inverse_root(variance: Tensor, eps: float) -> Tensor:
    """Return 1 / (sqrt v + eps), or 0 where v is 0, so that such a coordinate does not move."""
    return torch.where(variance > 0, (variance.sqrt() + eps).reciprocal(), 0)


@with_options
class OneBitAdam(Wrapper):
    """T_w steps of Adam on mean_w g_w; then v is frozen, and CA, two-way signs with residuals, carries the momentum.

        t <= T_w:  m <- b1 m + (1 - b1) mean g_w;   v <- b2 v + (1 - b2) (mean g_w)^2        dense
        t > T_w:   m_w <- b1 m + (1 - b1) g_w;      m <- CA(m_w)                             signs
        both:      update = eta m / (sqrt v + eps);   x <- x - eta lambda x - update

    There is no bias correction. The optimizer, AdamW, only applies weight decay. Coordinates without any gradient in
    the first T_w steps (v = 0) do not move. Tensors that are always exchanged dense follow the first line throughout.

    Source: Tang et al. 2021 (arXiv 2102.02888).
    """

    inner: AdamSigns = field(init=False)
    freeze_step: int | None = option(
        "dense steps of Adam before the first signs; null = 15 % of the run", default=None, at_least=1, instead=100
    )
    betas: Sequence[float] = option(default=(0.9, 0.999), shown=False)
    eps: float = option(default=1e-8, shown=False)

    chosen_as = {
        "onebitadam": Choice(
            "Adam; from `freeze_step` on its variance is frozen, and its momentum is exchanged as two-way signs (Tang "
            "et al. 2021); optimizer=adamw"
        )
    }

    description = replace(
        Wrapper.description,
        display_names={"onebitadam": "1-bit Adam"},
        collective_reason="owners average its momentum, and compress the result",
        no_error_feedback="it already has error feedback for its signs",
        kernels=("cpu", "cuda"),
        requires={"optimizer": "adamw"},
        smoke_options=lambda options, knob: {"freeze_step": 2},
    )

    traits = Traits(
        reduces="other",
        whole_model=True,
        collectives=("two_way",),
        optimizer=OptimizerPart(
            frozenset({"momentum", "lr"}), "parameter", fits=("AdamW",), takes=frozenset({"betas"})
        ),
        replays=True,
    )

    def __post_init__(self) -> None:
        self.betas = tuple(self.betas)
        self.inner = AdamSigns(1 - self.betas[0], self.betas[0])
        super().__post_init__()
        self.start_step = self.freeze_step or 1
        self.required_facts = frozenset() if self.freeze_step else frozenset({"epochs", "steps_per_epoch"})

    def fit_to(self, run: RunFacts) -> None:
        self.start_step = warm_up_steps("freeze_step", self.freeze_step, run)

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        state = self.inner.init(specs, comm, like)
        for key in ("momentum", "variance"):
            for spec, zeros in zip(specs, Blocks(specs, 1, like).tensors, strict=True):
                state.setdefault(spec.name, {})[key] = zeros[0]
        return state

    @torch.no_grad()
    def compressor_input(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        """Return the gradient during the dense steps, then m_w + e_w."""
        fed_W = self.inner.compressor_input(xs_W, ctx, state, workers)
        for i, (spec, level) in enumerate(zip(ctx.specs, ctx.levels, strict=True)):
            fed_W[i] = xs_W[i] if level is None else fed_W[i] + self.betas[0] * state[spec.name]["momentum"]
        return fed_W

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        own = [state[spec.name] for spec in ctx.specs]
        frozen = [i for i, level in enumerate(ctx.levels) if level is not None]
        warm = [i for i, level in enumerate(ctx.levels) if level is None]
        self._freeze([ctx.specs[i].name for i in frozen], state)
        out = self.inner.exchange_signs(xs_W, ctx, state, comm)
        steps: dict[int, Tensor] = {}
        if frozen:
            momenta, inverses = ([own[i][key] for i in frozen] for key in ("momentum", "inverse_root"))
            masks, rates = [own[i].get(ALIVE) for i in frozen], rate_of_each(ctx, xs_W[0], frozen)
            signs = [out.update[i] for i in frozen]
            taken = engine_for(xs_W).momentum_steps(MomentumSteps(momenta, signs, inverses, masks, rates))
            steps |= zip(frozen, taken, strict=True)
        if warm:
            steps |= zip(warm, self._adam([own[i] for i in warm], [out.update[i] for i in warm]), strict=True)
            for rate, ids in rates_of(ctx, warm, xs_W[0]):
                torch._foreach_mul_([steps[i] for i in ids], rate)
        return Exchanged([steps[i] for i in range(len(xs_W))], out.subtract_sent_)

    def _adam(self, own: Sequence[dict[str, Any]], weighted: Sequence[Tensor]) -> list[Tensor]:
        """Update momentum and variance by (1 - b1) times the mean gradients [...], and return m / (sqrt v + eps)."""
        b1, b2 = self.betas
        momenta, variances = [entries["momentum"] for entries in own], [entries["variance"] for entries in own]
        torch._foreach_mul_(momenta, b1)
        torch._foreach_add_(momenta, list(weighted))
        means = torch._foreach_div(list(weighted), 1 - b1)
        torch._foreach_mul_(variances, b2)
        torch._foreach_addcmul_(variances, means, means, 1 - b2)
        roots = torch._foreach_sqrt(variances)
        torch._foreach_add_(roots, self.eps)
        return list(torch._foreach_div(momenta, roots))

    def _freeze(self, names: Sequence[str], state: State) -> None:
        """Replace the variance by its inverse root, before the first signs."""
        variances = {name: v for name in names if (v := state[name].pop("variance", None)) is not None}
        variances = {name: v for name, v in variances.items() if "inverse_root" not in state[name]}
        if variances:
            declare_dead(state, variances)
        for name, variance in variances.items():
            state[name]["inverse_root"] = inverse_root(variance, self.eps)


def warm_up_steps(key: str, value: int | None, run: RunFacts) -> int:
    """Return the number of steps before a variance is frozen; null = 15 % of the run.

    Raises:
        ValueRefused: the run would end before that.
    """
    share = max(1, round(WARM_UP * run.steps))
    if value is not None and value >= run.steps > 1:
        rule = f"below {run.steps}, the steps of the run, or no sign would ever be sent"
        raise checks.ValueRefused(key, rule, value, share)
    return share if value is None else value
