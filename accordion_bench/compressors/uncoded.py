"""`none` and the casts: gradients are summed as they are, or in 16 bits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.layout import Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Context, Exchanged, Kept, State, subtract_
from accordion_bench.compressors.description import KEPT, NO_EF21, Traits, with_claims
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.sixteen_bits import subtract_shares_

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
AROUND = ("error_feedback", "residual", *KEPT, "start_step")


@with_options
class Cast(Compressor):
    """All-reduce in a 16-bit type: update = sum_w cast(g_w / A).

    Quotients above 65,504, the largest float16, are clamped to that.
    """

    dtype: str = option(default="bfloat16", choices=("float16", "bfloat16"))

    chosen_as = {
        "fp16": Choice("all-reduce in 16 bits", {"dtype": "float16"}, AROUND, comments=NO_EF21),
        "bf16": Choice("all-reduce in 16 bits", beside=AROUND, comments=NO_EF21),
    }

    # the paper counts numbers of any width as one float
    description = replace(
        Compressor.description, kernels=("cpu",), paper_floats=lambda compressor, spec, level, workers: spec.numel
    )

    traits = Traits(whole_model=True, grouping="alone", replays=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.narrow = DTYPES[self.dtype]
        self.description = with_claims(self.description, sum_eps=torch.finfo(self.narrow).eps)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        cast = [level is not None for level in ctx.levels]
        narrow = iter(comm.all_reduce_mean([x for x, c in zip(xs_W, cast, strict=True) if c], dtype=self.narrow))
        whole = iter(comm.all_reduce_mean([x for x, c in zip(xs_W, cast, strict=True) if not c]))

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: target_W for i, target_W in targets_W.items() if not cast[i]}, xs_W)
            narrow_W = {i: target_W for i, target_W in targets_W.items() if cast[i]}
            subtract_shares_(list(narrow_W.values()), [xs_W[i] for i in narrow_W], comm.workers, self.narrow)

        return Exchanged([next(narrow if c else whole) for c in cast], subtract_sent_)

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        return [Transfer("all_reduce", 2 * spec.numel)]


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Compressor.description.idle(cls, options, context)
    yield "error_feedback", "nothing is lost"


@with_options
class Dense(Compressor):
    """Uncompressed all-reduce of the gradient: update = mean_w g_w."""

    chosen_as = {"none": Choice("the dense baseline: fp32 all-reduce")}

    description = replace(
        Compressor.description, idle=_idle, paper_floats=lambda compressor, spec, level, workers: spec.numel
    )

    traits = Traits(whole_model=True, unbiased=True, contracts=True, grouping="alone", replays=True)

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return False

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        return Exchanged(comm.all_reduce_mean(xs_W, may_alias=True), lambda targets_W: subtract_(targets_W, xs_W))
