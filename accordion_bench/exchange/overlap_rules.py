"""Whether gradients are exchanged during the backward pass, and in how large buckets."""

from accordion_bench.compressors.assemble import Wrapped
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import WHOLE_MODEL


def overlaps(cfg: Config, processes: int) -> bool:
    """Whether exchanges have a thread of their own: between processes, unless `comm.overlap` says otherwise."""
    overlap = cfg["comm"].get("overlap")
    return cfg["comm"].get("engine") != "ddp" and (processes > 1 if overlap is None else overlap)


def after_backward(cfg: Config, wrapped: Wrapped, processes: int) -> str:
    """Why gradients are exchanged after the backward pass in this run; "" = they need not be."""
    if cfg["comm"].get("engine") == "ddp":
        return "comm.engine=ddp does so itself"
    if not overlaps(cfg, processes):
        return "all workers share a process" if cfg["comm"].get("overlap") is None else "comm.overlap=false"
    if wrapped.scope == WHOLE_MODEL:
        return "compressor.scope=model"
    if cfg.get("precision") == "float16":
        return "precision=float16 looks at all gradients first"
    if cfg.get("clip_norm") and cfg.get("clip_at") != "after":
        return "clip_norm needs all gradients first"
    traits = wrapped.compressor.traits
    if "momentum" in traits.owns and traits.weight_decay_mode == "in_gradient":
        return "weight decay enters the gradients first"
    return ""


DEFAULT_BUCKETS = (1.0, 25.0)  # MB, as DistributedDataParallel: a small first one, so that something leaves early


def bucket_mb(cfg: Config) -> tuple[float, float]:
    """MB of the first bucket and of the others, from the configuration of a run."""
    cap = cfg["comm"].get("bucket_cap_mb")
    return DEFAULT_BUCKETS if cap is None else (cap, cap)
