"""TernGrad: three levels and one scale per tensor, shared by all workers."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from accordion_bench.codecs.bucket import Bucket
from accordion_bench.codecs.coding import LARGEST, Coding, to_levels
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Transfer, whole_layout
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Context, Exchanged, Kept, NonFinite, State, paying_levels
from accordion_bench.compressors.dense import NONE_FITTED, Codebooks, DenseCodes
from accordion_bench.compressors.description import KEPT, NO_EF21, TRAVEL, Traits, WhyDense
from accordion_bench.compressors.entropy import METHODS, check_entropy
from accordion_bench.compressors.probe import cheaper_than_dense
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.options.units import counted
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.kernels.dense_kernels import BlockRule
from accordion_bench.tensors.same_shape import joined

TERNARY = (-1.0, 0.0, 1.0)
CODING = to_levels(TERNARY, stream="TernaryCodes")


class TernaryCodes(DenseCodes):
    """Coordinates rounded at random to -s, 0 or s, after clamping to [-s, s]; the message is only codes, five per byte.

    Args:
        entropy: see `Quantiser`.

    Attributes:
        known: s per tensor name, 0-dimensional, the same on all workers.
    """

    stream = "TernaryCodes"

    def __init__(self, entropy: str) -> None:
        self.known: dict[str, Tensor] = {}
        self.entropy = entropy

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        return CODING

    def shared_scales(self, bucket: Bucket) -> Tensor:
        return joined([self.known[spec.name] for spec in bucket.specs])


def _why_dense(compressor: "TernGrad", spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    if compressor.pays(spec, level, workers):
        return None
    reason = f"an all-gather of codes from {counted(workers, 'worker')} would cost more than a dense all-reduce"
    return WhyDense(reason, ("fewer workers",))


@with_options
class TernGrad(Compressor):
    """C(v)_i = s sgn(v_i) with probability |v_i| / s, else 0;  s = max over workers of min(max |v_w|, clip sigma_w).

    Unbiased, except for what is clamped at s. The scale is shared by an all-reduce of 4 bytes per tensor, so that a
    worker's message contains only codes. Tensors for which that would cost more wire bytes than a dense all-reduce are
    exchanged dense, without rounding.

    `clip` limits the noise, at the price of a bias.

    The paper clamps each worker's tensor at its own clip sigma_w before the scale is shared. Here all tensors are
    clamped at s, which is never less. Source: Wen et al. 2017 (arXiv 1705.07878).
    """

    clip: float | None = option("standard deviations; null = no clipping, then unbiased", default=2.5, above=0)
    entropy: str = option("entropy code that the column entropy_bytes counts", default="none", choices=METHODS)

    chosen_as = {
        "terngrad": Choice(
            "ternary, one scale per tensor shared by all workers (Wen et al. 2017)",
            beside=("error_feedback", "residual", *KEPT, "collective", *TRAVEL),
            comments=NO_EF21,
        )
    }

    description = replace(
        Compressor.description,
        kernels=("cpu", "cuda"),
        collective_reason="all workers share one scale, with which an owner's mean cannot be encoded",
        why_dense=_why_dense,
        claims=replace(Compressor.description.claims, draws="worker"),
    )

    traits = Traits(contracts=False, replays=True, whole_model=True, collectives=("all_gather",))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.traits = replace(self.traits, unbiased=self.clip is None)
        self.codes = TernaryCodes(check_entropy(self.entropy))
        self.rule = LARGEST if self.clip is None else BlockRule("largest", ("linf", "l2", "sum"), clip=self.clip)

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        return [Transfer("all_reduce", 4), Transfer("all_gather", self.codes.message_bytes(spec, level))]

    pays = cheaper_than_dense

    def largest_of(self, bucket: Bucket) -> list[Tensor]:
        """Return the maximum over the local workers of min(max |v_w|, clip sigma_w), for each tensor."""
        if not bucket.specs:
            return []
        layout = whole_layout(bucket.numels)
        (largest_W,) = engine_for(bucket.rows_W).numbers(bucket, layout, self.rule)
        return list(largest_W[0] if len(largest_W) == 1 else largest_W.amax(0))

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        sent = list(paying_levels(self, ctx, comm.workers))
        shared = comm.all_reduce_max(self.largest_of(Bucket.of(xs_W, ctx, sent, comm.local)))
        checks = engine_for(xs_W).checks_input
        for i, scale in zip(sent, shared, strict=True):
            if checks and not scale.isfinite():
                raise NonFinite(f"the compressor input of some worker for {ctx.specs[i].name} is not finite")
        self.codes.known = {ctx.specs[i].name: scale for i, scale in zip(sent, shared, strict=True)}
        narrowed = replace(ctx, levels=[1 if i in set(sent) else None for i in range(len(ctx.specs))])
        return self.codes.exchange(xs_W, narrowed, state, comm)
