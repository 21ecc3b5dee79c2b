"""No compression: the dense baseline."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Context, Exchanged, State, subtract_
from accordion_bench.compressors.traits import Traits
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, with_options
from accordion_bench.plan import TensorSpec


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
