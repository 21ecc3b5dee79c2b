"""No compression: the dense baseline."""

from collections.abc import Sequence

from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.base import Compressor, Context, Exchanged, State, subtract_
from accordion_bench.compressors.traits import Traits
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import TensorSpec


class Dense(Compressor):
    """All-reduce of the gradient as it is: update = mean_w g_w."""

    traits = Traits(whole_model=True, unbiased=True, contracts=True, by_coordinate=True, replays=True)

    @classmethod
    def idle(cls, options: Config, around: Surroundings) -> Idle:
        yield from super().idle(options, around)
        yield "error_feedback", "nothing is lost"

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return False

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        return Exchanged(comm.all_reduce_mean(xs_W, may_alias=True), lambda targets_W: subtract_(targets_W, xs_W))

    def paper_floats(self, spec: TensorSpec, level: float | None, workers: int) -> int:
        return spec.numel
