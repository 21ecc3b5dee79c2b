"""Threshold: send all entries above a threshold."""

import math
from dataclasses import replace
from typing import Any

from accordion_bench.codecs.bucket import Bucket
from accordion_bench.codecs.engine import Engine, Sampling, Selection
from accordion_bench.codecs.selection import kept_entries
from accordion_bench.compressors.description import FEEDBACK, TRAVEL
from accordion_bench.compressors.sparse import Uneven
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Uneven.description.idle(cls, options, context)
    if options.get("threshold") is not None:
        yield "sample_share", "compressor.threshold is set"
        yield "least", "compressor.threshold is set"


def _contraction(compressor: "Threshold", spec: TensorSpec, level: float) -> float | None:
    if compressor.threshold is not None:
        return None
    return math.ceil(compressor.least * kept_entries(spec.numel, level)) / max(1, spec.numel)


@with_options
class Threshold(Uneven):
    """update = mean_w T(g_w), T(x)_i = x_i where |x_i| >= tau, else 0; tau for each worker and tensor.

    tau is estimated from a sample, so that about k = density x numel entries are kept, or given as `threshold`;
    `density` then only bounds the message. It is fp32 values and indices in the smaller code of `index_codes`, of at
    most the `most` x k largest entries, and `payload_bytes` is that bound.

    The sample is evenly spaced, and is shifted by one entry in every step. It is large enough that 32 sampled entries
    are expected above tau; if that takes more than half of all entries, exactly the k largest are sent.

    Source: Strom 2015 (absolute); Lin et al. 2018 (arXiv 1712.01887; sampled).
    """

    density: float = option("approximate share kept; lower density = more compression", default=0.1, above=0, at_most=1)
    threshold: float | None = option(
        "absolute threshold; density then only bounds the message", default=None, above=0, instead=0.001
    )
    sample_share: float = option(
        "share of the entries from which the threshold is estimated", default=0.01, above=0, at_most=1
    )
    least: float = option(
        "the threshold is lowered until this many times density are found; 0 = use the first estimate",
        default=0.8,
        at_least=0,
        at_most=1,
    )
    most: float = option("at most this many times density are sent, the largest ones", default=1.3, at_least=1)

    chosen_as = {
        "threshold": Choice(
            "all entries above a threshold, estimated from a sample (Lin et al. 2018) or absolute (Strom 2015)",
            {"error_feedback": True},
            beside=(*FEEDBACK, "collective", *TRAVEL),
        )
    }

    description = replace(
        Uneven.description,
        display_names={"threshold": "threshold"},
        kernels=("cpu", "cuda"),
        collective_reason="every worker selects different entries, a sum of sparse tensors is not sparse, "
        "and a server must know the size",
        idle=_idle,
        claims=replace(Uneven.description.claims, contraction=_contraction),
    )

    traits = replace(Uneven.traits, knob="density", pair=(0.10, 0.99), min_ndim=2, whole_model=True)

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return super().compresses(spec, level) and (self.threshold is not None or level != 1)

    def most_entries(self, spec: TensorSpec, level: float) -> int:
        """Return the upper bound of the number of entries in a message."""
        return min(spec.numel, int(self.most * kept_entries(spec.numel, level)))

    def choose(self, engine: Engine, bucket: Bucket) -> Selection:
        pairs = list(zip(bucket.specs, bucket.levels, strict=True))
        if self.threshold is not None:
            most = [self.most_entries(spec, level) for spec, level in pairs]
            return engine.above(bucket.rows_W, self.threshold, most)
        sampling = Sampling(self.sample_share, self.least, self.most, offset=bucket.step)
        return engine.about(bucket.rows_W, [kept_entries(spec.numel, level) for spec, level in pairs], sampling)
