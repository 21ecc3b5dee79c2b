"""Costs of methods on a GPU that is not here: messages as they were made here, codecs as they were timed on a GPU.

What only moves memory (dense gradients, differences and outer steps of local methods, optimizers) is timed here and
scaled by the speed of a copy. Error feedback, which the timed codecs lack, moves 24 bytes for each number.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.advising.arms import Arm
from accordion_bench.advising.gpus import CodecTime, Gpu, codec_times
from accordion_bench.advising.method_cost import BucketCost, MethodCost
from accordion_bench.plan import TensorSpec

DENSE = "none"
FEEDBACK = 24  # bytes: both tensors are read and the sum written; then it and what was decoded, and the residual
COPIED = 8  # bytes that a copy of one number moves
COPIES = 5  # that are timed


def costs_on(
    gpu: Gpu, costs: Sequence[MethodCost], arms: Sequence[Arm], specs: Sequence[TensorSpec], longer: float
) -> tuple[list[MethodCost], dict[str, str]]:
    """The costs of methods on a GPU, estimated.

    Args:
        gpu: of the table.
        costs: measured here.
        arms: that they are of.
        specs: the trained tensors.
        longer: times as long as here that what only moves memory takes there, see `times_as_long`.

    Returns:
        (the costs, and by name why others cannot be estimated).
    """
    compressors = {arm.name: _compressor(arm) for arm in arms}
    feedback = {arm.name: bool(arm.chosen.compressor.get("error_feedback")) for arm in arms}
    found, left_out = [], {}
    for cost in costs:
        name = compressors[cost.name]
        if name == DENSE:
            found.append(cost.scaled(longer))
        elif name in codec_times():
            moved = FEEDBACK / gpu.copies if feedback[cost.name] else 0.0
            found.append(_timed(cost, codec_times()[name], gpu, specs, moved, longer))
        else:
            left_out[cost.name] = "nobody has timed its codec on a GPU, so that it cannot be estimated"
    return [replace(cost, repetitions=()) for cost in found], left_out


def times_as_long(gpu: Gpu, tensors: Sequence[Tensor]) -> float:
    """How many times as long as here a copy of these tensors takes on a GPU: below 1 where that is faster."""
    copied = [torch.empty_like(tensor) for tensor in tensors]
    wait = torch.cuda.synchronize if tensors[0].is_cuda else lambda: None
    taken = []
    for _ in range(1 + COPIES):
        wait()
        began = time.perf_counter()
        for ours, theirs in zip(copied, tensors, strict=True):
            ours.copy_(theirs)
        wait()
        taken.append(time.perf_counter() - began)
    there = COPIED * sum(tensor.numel() for tensor in tensors) / gpu.copies
    return there / statistics.median(taken[1:])


def _timed(
    cost: MethodCost, codec: CodecTime, gpu: Gpu, specs: Sequence[TensorSpec], moved: float, longer: float
) -> MethodCost:
    """Each bucket takes what the codec takes for its tensors; how that divides is as it was here.

    Args:
        moved: seconds for each number beside the codec.
        longer: times as long, of what lies beside the exchange.
    """

    def timed(bucket: BucketCost) -> BucketCost:
        numbers = sum(specs[i].numel for i in bucket.members)
        wanted = codec.on(gpu, len(bucket.members), numbers) + moved * numbers if numbers else 0.0
        here = bucket.encode + sum(bucket.decode)
        return bucket.scaled(wanted / here) if here else bucket

    buckets, crowded = (tuple(map(timed, few)) for few in (cost.buckets, cost.crowded))
    return replace(cost, buckets=buckets, crowded=crowded, extra=longer * cost.extra)


def _compressor(arm: Arm) -> str:
    """The name of its YAML file."""
    typed: Mapping[str, str] = dict(word.split("=", 1) for word in arm.overrides)
    return typed.get("compressor", DENSE)
