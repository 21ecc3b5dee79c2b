"""Whether gradients are exchanged during the backward pass, and in how large buckets."""

import math
from dataclasses import dataclass

from accordion_bench.compressors.assemble import Wrapped
from accordion_bench.plan import WHOLE_MODEL

DEFAULT_BUCKETS = (1.0, 25.0)  # MB, as DistributedDataParallel: a small first one, so that something leaves early
DEFAULT_GRADIENTS = 25.0  # MB


@dataclass(frozen=True)
class ExchangeOptions:
    """What of a run decides how and when gradients are exchanged.

    Args:
        engine: `exchange`, or `ddp`: stock DistributedDataParallel with its own hooks.
        overlap: exchanges have a thread of their own; None = between processes.
        bucket_cap_mb: MB of messages that are exchanged together; None = 1, then 25, and at most 25 MB of gradients on
            a device, of casts everywhere.
        float16: the loss is scaled, so that all gradients are looked at before any is used.
        clips: each worker's gradients are clipped, by the norm of all of them.
        elastic: workers come and go: an exchange that is repeated begins with all gradients.
    """

    engine: str = "exchange"
    overlap: bool | None = None
    bucket_cap_mb: float | None = None
    float16: bool = False
    clips: bool = False
    elastic: bool = False

    def overlaps(self, processes: int) -> bool:
        """Whether exchanges have a thread of their own: between processes, unless `comm.overlap` says otherwise."""
        return self.engine != "ddp" and (processes > 1 if self.overlap is None else self.overlap)

    def after_backward(self, wrapped: Wrapped, processes: int) -> str:
        """Why gradients are exchanged after the backward pass in this run; "" = they need not be."""
        if self.engine == "ddp":
            return "comm.engine=ddp does so itself"
        if not self.overlaps(processes):
            return "all workers share a process" if self.overlap is None else "comm.overlap=false"
        if wrapped.scope == WHOLE_MODEL:
            return "compressor.scope=model"
        return self.looks_first(wrapped)

    def looks_first(self, wrapped: Wrapped) -> str:
        """Why gradients may not be handed over before all of them are there; "" = they may."""
        if self.float16:
            return "precision=float16 looks at all gradients first"
        if self.clips:
            return "clip_norm needs all gradients first"
        if self.elastic:
            return "sync.elastic repeats an exchange from its beginning"
        traits = wrapped.compressor.traits
        if "momentum" in traits.optimizer.owns and traits.optimizer.weight_decay_mode == "in_gradient":
            return "weight decay enters the gradients first"
        return ""

    @property
    def bucket_mb(self) -> tuple[float, float]:
        """MB of the first bucket and of the others."""
        return DEFAULT_BUCKETS if self.bucket_cap_mb is None else (self.bucket_cap_mb, self.bucket_cap_mb)

    @property
    def gradient_mb(self) -> float:
        """MB of gradients at which a bucket is full on a device, and of casts everywhere, however little is sent.

        There the exchange of a bucket hides behind the rest of the backward pass, and takes no core from it. Casts take
        as much in one bucket as in several.
        """
        return DEFAULT_GRADIENTS if self.bucket_cap_mb is None else math.inf
