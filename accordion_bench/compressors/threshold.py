"""Threshold: all entries above a threshold, however many they are."""

import math
from dataclasses import replace
from typing import Any

from accordion_bench.codecs.bucket import Bucket
from accordion_bench.codecs.engine import Engine, Sampling, Selection
from accordion_bench.codecs.selection import kept_entries
from accordion_bench.compressors.sparse import Uneven
from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import TensorSpec


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from Uneven.description.idle(cls, options, context)
    if options.get("threshold") is not None:
        yield "sample_share", "compressor.threshold is set"
        yield "least", "compressor.threshold is set"


def _contraction(compressor: "Threshold", spec: TensorSpec, level: float) -> float | None:
    if compressor.threshold is not None:
        return None
    return math.ceil(compressor.least * kept_entries(spec.numel, level)) / max(1, spec.numel)


class Threshold(Uneven):
    """update = mean_w T(g_w), T(x)_i = x_i where |x_i| >= tau, else 0; tau for each worker and tensor.

    tau is estimated from a sample, so that about k = density x numel entries are kept, or given. The message is fp32
    values and indices in the smaller code of `index_codes`; its length says how many they are. At most `most` x k
    entries are sent, whatever the data: then `payload_bytes` is a bound.

    Args:
        density: share of entries kept, in (0, 1]; lower density = more compression.
        threshold: tau, absolute; density then only bounds the message, to the `most` x k largest. null = estimate it.
        sample_share: share of entries in the sample, evenly spaced, one further in every step; at least so many that 32
            of them are expected above tau. Where that is more than half of them, exactly the k largest are sent.
        least: tau is lowered until this many times k entries are found; 0 = the first estimate does.
        most: of more than this many times k entries exactly the k largest are sent, by magnitude.

    Source: Strom 2015 (absolute); Lin et al. 2018 (arXiv 1712.01887; sampled).
    """

    description = replace(
        Uneven.description,
        display_names={"threshold": "threshold"},
        kernels=("cpu",),
        collective_reason="every worker keeps other entries, a sum of sparse tensors is not sparse, "
        "and a server must know the size",
        idle=_idle,
        claims=replace(Uneven.description.claims, contraction=_contraction),
    )

    traits = replace(Uneven.traits, knob="density", pair=(0.10, 0.99), min_ndim=2, whole_model=True)

    def __init__(
        self,
        density: float = 0.1,
        threshold: float | None = None,
        sample_share: float = 0.01,
        least: float = 0.8,
        most: float = 1.3,
    ) -> None:
        self.density = self.check_level("density", density)
        self.threshold = None if threshold is None else checks.number("threshold", threshold, above=0, instead=0.001)
        self.sample_share = checks.number("sample_share", sample_share, above=0, at_most=1, instead=0.01)
        self.least = checks.number("least", least, at_least=0, at_most=1, instead=0.8)
        self.most = checks.number("most", most, at_least=1, instead=1.3)

    def check_level(self, key: str, value: Any) -> float:
        return checks.number(key, value, above=0, at_most=1, instead=0.1)

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return super().compresses(spec, level) and (self.threshold is not None or level != 1)

    def most_entries(self, spec: TensorSpec, level: float) -> int:
        """The largest number of entries that a message may hold."""
        return min(spec.numel, int(self.most * kept_entries(spec.numel, level)))

    def choose(self, engine: Engine, bucket: Bucket) -> Selection:
        pairs = list(zip(bucket.specs, bucket.levels, strict=True))
        if self.threshold is not None:
            most = [self.most_entries(spec, level) for spec, level in pairs]
            return engine.above(bucket.rows_W, self.threshold, most)
        sampling = Sampling(self.sample_share, self.least, self.most, offset=bucket.step)
        return engine.about(bucket.rows_W, [kept_entries(spec.numel, level) for spec, level in pairs], sampling)
