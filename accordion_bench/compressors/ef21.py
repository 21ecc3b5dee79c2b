"""EF21 with momentum: workers send the compressed difference between their momentum and a shared estimate of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Context, Exchanged, State, subtract_, zeros_in_state
from accordion_bench.compressors.tree import Tree
from accordion_bench.compressors.two_way import TwoWay
from accordion_bench.compressors.wrapper import Wrapper
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import option, with_options
from accordion_bench.plan import TensorSpec

RATE = 0.1


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    if options.get("error_feedback") != "ef21":
        yield "feedback_rate", "compressor.error_feedback is not ef21"


@with_options
class EF21(Wrapper):
    """v_w <- (1 - a) v_w + a g_w; c_w = C(v_w - h_w); h_w <- h_w + c_w; h <- h + mean_w c_w; the update is h.

    v_w is worker w's momentum, and h_w the estimate of it that is derived from what was sent; all start at 0. Hence
    h = mean_w h_w at all times, for every C whose update is the mean of what was sent. The step is x <- x - lr h: the
    optimizer has no momentum and only applies weight decay. A tensor that is not compressed at any level sends v_w.

    Instead of h_w, the gap e_w = v_w - h_w is stored and updated in place, which saves a third buffer per worker:
    e_w <- e_w + a (g_w - v_w), with v_w before its update, then e_w <- e_w - c_w.

    C must be a contraction: E||C(x) - x||^2 <= ||x||^2. A lower `feedback_rate` a is a longer memory.

    Raises:
        ValueRefused: C is not a contraction, or h would not be the mean of all h_w.

    Source: Fatkhullin, Tyurin, Richtarik 2023 (arXiv 2305.15155), EF21-SGDM, there with first estimates from a dense
    step (here `start_step=1`).
    """

    feedback_rate: float | None = option(
        "for ef21, in (0, 1]: the momentum is 1 - feedback_rate; null = 0.1",
        default=None,
        above=0,
        at_most=1,
        instead=RATE,
    )

    description = replace(Wrapper.description, idle=_idle)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rate = RATE if self.feedback_rate is None else self.feedback_rate
        if isinstance(self.inner, TwoWay | Tree):
            way, who = ("two_way", "owners") if isinstance(self.inner, TwoWay) else ("tree", "pairs of workers")
            rule = f"all_gather with error_feedback=ef21, because {who} compress the mean a second time"
            raise ValueRefused("collective", rule, way, "all_gather")
        if why := unfit(self.inner):
            raise ValueRefused("error_feedback", f"{{true}} or {{false}}, because {why}", "ef21", False)
        optimizer = self.inner.traits.optimizer
        self.traits = replace(
            self.inner.traits,
            reduces="estimate",
            collectives=tuple(way for way in self.inner.traits.collectives if way not in ("two_way", "tree")),
            optimizer=replace(optimizer, owns=optimizer.owns | {"momentum"}, weight_decay_mode="decoupled"),
        )
        reason = "EF21 needs the exact mean of the messages"
        self.description = replace(self.description, collective_reason=reason)

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        state = zeros_in_state(self.inner.init(specs, comm, like), "momentum_W", specs, comm, like)
        compressible = [spec for spec in specs if spec.ndim >= self.traits.min_ndim]
        for spec in compressible:
            state[spec.name]["estimate"] = torch.zeros(spec.shape, dtype=like.dtype, device=like.device)
        return zeros_in_state(state, "residual_W", compressible, comm, like)

    @torch.no_grad()
    def compressor_input(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        """Return v_w - h_w, including this gradient."""
        ps_W = []
        for spec, x_W in zip(ctx.specs, xs_W, strict=True):
            kept = state[spec.name]
            v_W: Tensor = kept["momentum_W"]
            behind_W: Tensor = kept.get("residual_W", v_W)
            ps_W.append(behind_W.add(x_W - v_W, alpha=self.rate))
        return self.inner.compressor_input(ps_W, ctx, state, workers)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        kept = [state[spec.name] for spec in ctx.specs]
        vs_W = [entries["momentum_W"] for entries in kept]
        gaps_W = {i: entries["residual_W"] for i, entries in enumerate(kept) if "residual_W" in entries}
        if gaps_W:
            gaps = list(gaps_W.values())
            torch._foreach_add_(gaps, [xs_W[i] for i in gaps_W], alpha=self.rate)
            torch._foreach_sub_(gaps, [vs_W[i] for i in gaps_W], alpha=self.rate)
        if vs_W:
            torch._foreach_lerp_(vs_W, list(xs_W), self.rate)
        out = self.inner.exchange([gaps_W.get(i, v_W) for i, v_W in enumerate(vs_W)], ctx, state, comm)
        if gaps_W:
            estimates = [kept[i]["estimate"] for i in gaps_W]
            # a separate tensor, because the next exchange changes the estimate in place
            grown = torch._foreach_add(estimates, [out.update[i] for i in gaps_W])
            torch._foreach_copy_(estimates, grown)
            for i, estimate in zip(gaps_W, grown, strict=True):
                out.update[i] = estimate
            out.subtract_sent_(gaps_W)
        for i in set(range(len(vs_W))) - gaps_W.keys():
            if out.update[i].data_ptr() == vs_W[i].data_ptr():  # with one worker the mean may alias its tensor
                out.update[i] = out.update[i].clone()

        def subtract_estimates_(targets_W: Mapping[int, Tensor]) -> None:
            """Subtract h_w = v_w - e_w, because h is the mean of what the workers sent over all steps."""
            subtract_(targets_W, vs_W)
            behind_W = {i: target_W for i, target_W in targets_W.items() if i in gaps_W}
            if behind_W:
                torch._foreach_add_(list(behind_W.values()), [gaps_W[i] for i in behind_W])

        return Exchanged(out.update, subtract_estimates_)


def unfit(inner: Compressor) -> str:
    """Return why EF21 must not be wrapped around a compressor; "" = it may be."""
    traits = inner.traits
    if traits.reduces != "mean":
        return "EF21 accumulates means, and this compressor's update is not a mean"
    if not traits.is_contraction:
        return "EF21 needs a contraction, and this compressor's error may exceed its input"
    if inner.description.claims.sum_eps:
        return "EF21 accumulates messages, and sums that are rounded on the wire would drift from the workers' own"
    return ""
