"""Distributed Lion: each worker sends the signs of its local Lion step; the update is their majority or mean.

Tensor suffixes: W local workers.
"""

from collections.abc import Sequence
from dataclasses import field, replace

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Context, Exchanged, State, zeros_in_state
from accordion_bench.compressors.demo import signs_of
from accordion_bench.compressors.description import TRAVEL, OptimizerPart
from accordion_bench.compressors.sign import Sign
from accordion_bench.compressors.two_way import TwoWay
from accordion_bench.compressors.wrapper import Wrapper
from accordion_bench.options import checks
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec

VOTES = {"majority": "two_way", "mean": "all_gather"}


@with_options
class DistributedLion(Wrapper):
    """u_w = sgn(b1 m_w + (1 - b1) g_w);  m_w <- b2 m_w + (1 - b2) g_w;  update = majority or mean of u_w.

    x <- x - eta lambda x - eta update: the optimizer, Lion, only applies weight decay. Each worker sends one bit per
    coordinate. The majority is returned in one bit more, with a keyed coin for ties. A bit cannot represent 0: sgn 0 =
    +1 here, so that coordinates without any gradient drift. With one worker, all other coordinates move as under Lion.
    Tensors that are exchanged dense move by sgn of the mean of the values that would be signed, with sgn 0 = 0.

    Source: Liu et al. 2024, "Communication Efficient Distributed Training with Distributed Lion" (arXiv 2404.00438).
    """

    inner: Compressor = field(init=False)
    vote: str = option(
        "majority: of the workers' signs, by owners; mean: all signs are gathered",
        default="majority",
        choices=tuple(VOTES),
    )
    betas: Sequence[float] = option(default=(0.9, 0.99), shown=False)

    chosen_as = {
        "lion": Choice(
            "signs of each worker's Lion step, one bit each way (Distributed Lion, Liu et al. 2024); optimizer=lion",
            beside=TRAVEL,
            comments={"scope": "tensor, model: one message for all tensors, less padding"},
        )
    }

    description = replace(
        Wrapper.description,
        display_names={"lion": "Distributed Lion"},
        collective_reason="compressor.vote determines the collective",
        no_error_feedback="its momenta are local and do not depend on what was sent",
        kernels=("cpu", "cuda"),
        requires={"optimizer": "lion"},
    )

    traits = replace(
        Sign.traits,
        reduces="other",
        scaled=False,
        collectives=("two_way",),
        optimizer=OptimizerPart(frozenset({"momentum"}), fits=("Lion",), takes=frozenset({"betas"})),
    )

    def __post_init__(self) -> None:
        checks.choice("vote", self.vote, list(VOTES))
        self.betas = checks.betas(self.betas, [0.9, 0.99])
        self.inner = TwoWay(Sign()) if self.vote == "majority" else Sign()
        super().__post_init__()
        self.traits = replace(type(self).traits, collectives=(VOTES[self.vote],))

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        return zeros_in_state(self.inner.init(specs, comm, like), "momentum_W", specs, comm, like)

    @torch.no_grad()
    def compressor_input(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        """Return b1 m_w + (1 - b1) g_w."""
        return self._signed(xs_W, [state[spec.name]["momentum_W"] for spec in ctx.specs])

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        ms_W = [state[spec.name]["momentum_W"] for spec in ctx.specs]
        out = self.inner.exchange(self._signed(xs_W, ms_W), ctx, state, comm)
        if ms_W:
            torch._foreach_lerp_(ms_W, list(xs_W), 1 - self.betas[1])
        pairs = zip(out.update, ctx.levels, strict=True)
        update = [signs_of(mean) if level is None else mean for mean, level in pairs]
        return Exchanged(update, out.subtract_sent_)

    def _signed(self, xs_W: Sequence[Tensor], ms_W: Sequence[Tensor]) -> list[Tensor]:
        return list(torch._foreach_lerp(list(xs_W), list(ms_W), self.betas[0])) if ms_W else []
