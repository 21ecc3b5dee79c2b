"""Times and costs by hand."""

from accordion_bench.advising.predict import BucketCost, Messages, MethodCost
from accordion_bench.advising.step_times import StepTimes
from accordion_bench.plan import TensorSpec

NUMEL = 1_000_000
SPECS = tuple(TensorSpec(f"layer{i}", (1000, 1000)) for i in range(4))


def times(**changed) -> StepTimes:
    """Four tensors of a million numbers, ready from the last to the first, in steps of 0.1 s."""
    told = {
        "specs": SPECS,
        "ready": (0.09, 0.07, 0.05, 0.03),
        "backward_end": 0.09,
        "update": 0.01,
        "steps": (0.1,) * 10,
        "batch_size": 8,
        "model": "made up",
        "device": "cpu",
        "source": "a trial here",
    }
    return StepTimes(**{**told, **changed})


def method(name: str, each: float, kind: str = "all_reduce", encode=0.0, decode=(0.0, 0.0), **options) -> MethodCost:
    """One bucket for each tensor, the last one first; `each` is the bytes of each bucket's message."""
    buckets = tuple(BucketCost((i,), encode, decode, {kind: Messages(each, 0.0, 1.0)}) for i in (3, 2, 1, 0))
    overrides = options.pop("overrides", (f"compressor={name}",))
    return MethodCost(name, overrides, buckets, **options)


FP32 = method("dense fp32", 4 * NUMEL, overrides=("compressor=none",))
BF16 = method("dense bf16", 2 * NUMEL, overrides=("compressor=bf16",), encode=1e-4)
SMALL = method("powersgd", 4 * 4000, encode=5e-3, decode=(5e-3, 0))
GATHERED = method("topk", 80_000, "all_gather", encode=3e-3, decode=(0.0, 1e-3))
LOCAL = method("local SGD", 4 * NUMEL, local=True, overlaps=False, overrides=("sync=local_sgd",))
ALL = [FP32, BF16, SMALL, GATHERED, LOCAL]
