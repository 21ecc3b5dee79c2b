"""Rules for the exchange of gradients during the backward pass, and for the size of buckets."""

import math
from dataclasses import dataclass

from accordion_bench.compressors.assemble import CompressorSetup
from accordion_bench.plan import WHOLE_MODEL

DEFAULT_BUCKETS = (1.0, 25.0)  # MB, as DistributedDataParallel: a small first bucket is submitted early
DEFAULT_GRADIENTS = 25.0  # MB of gradients per bucket


@dataclass(frozen=True)
class ExchangeOptions:
    """Options of a run that determine how and when gradients are exchanged."""

    engine: str = "exchange"  # `exchange`, or `ddp`: stock DistributedDataParallel with its own hooks
    overlap: bool | None = None  # whether exchanges run in a separate thread; None = if there are several processes
    # MB of messages per bucket; None = 1, then 25, and at most 25 MB of gradients on a device, for casts everywhere
    bucket_cap_mb: float | None = None
    float16: bool = False  # whether the loss is scaled, so that all gradients are checked before any is used
    clips: bool = False  # whether each worker's gradients are clipped, by their global norm
    elastic: bool = False  # whether workers may join and leave, so that an exchange may be repeated with all gradients

    def overlaps(self, processes: int) -> bool:
        """Whether exchanges run in a separate thread: with several processes, unless `comm.overlap` overrides this."""
        return self.engine != "ddp" and (processes > 1 if self.overlap is None else self.overlap)

    def after_backward(self, wrapped: CompressorSetup, processes: int) -> str:
        """Return why gradients are exchanged after the backward pass in this run; "" = earlier exchange is possible."""
        if self.engine == "ddp":
            return "comm.engine=ddp does so itself"
        if not self.overlaps(processes):
            return "all workers share a process" if self.overlap is None else "comm.overlap=false"
        if wrapped.scope == WHOLE_MODEL:
            return "compressor.scope=model"
        return self.needs_all_gradients(wrapped)

    def needs_all_gradients(self, wrapped: CompressorSetup) -> str:
        """Return why all gradients must be available before any is submitted; "" = this is not required."""
        if self.float16:
            return "precision=float16 checks all gradients first"
        if self.clips:
            return "clip_norm needs all gradients first"
        if self.elastic:
            return "sync.elastic may repeat an exchange with all gradients"
        traits = wrapped.compressor.traits
        if "momentum" in traits.optimizer.owns and traits.optimizer.weight_decay_mode == "in_gradient":
            return "weight decay is added to the gradients first"
        return ""

    @property
    def bucket_mb(self) -> tuple[float, float]:
        """MB of the first bucket and of the others."""
        return DEFAULT_BUCKETS if self.bucket_cap_mb is None else (self.bucket_cap_mb, self.bucket_cap_mb)

    @property
    def gradient_mb(self) -> float:
        """MB of gradients at which a bucket is complete on a device, and for casts everywhere, for any payload.

        There the exchange of a bucket is hidden behind the rest of the backward pass without using a core. Casts take
        the same time in one bucket as in several.
        """
        return DEFAULT_GRADIENTS if self.bucket_cap_mb is None else math.inf
