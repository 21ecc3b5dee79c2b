"""Encode and decode one tensor with a compressor of gathered messages, outside of an exchange."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Target
from accordion_bench.codecs.layout import Message
from accordion_bench.compressors.gathered import Gathered
from accordion_bench.plan import TensorSpec


def bucket_of(
    x_W: Tensor, shape: tuple[int, ...] = (), level: Any = 1, step: int = 0, codebooks: Mapping[int, Any] | None = None
) -> Bucket:
    """Return a bucket with one tensor of workers [W, N]; `shape` is the shape of the tensor, by default one row."""
    specs = [TensorSpec("x", shape or (1, x_W[0].numel()))]
    return Bucket(step, specs, [level], 0, [0.1], codebooks or {}, xs_W=[x_W], workers=range(len(x_W)))


def decoded(method: Gathered, message: Message, bucket: Bucket) -> Tensor:
    """Return the decoded message of each sender, float32 [S, N]."""
    target = Target([torch.zeros(len(message.rows), spec.numel, device=bucket.xs_W[0].device) for spec in bucket.specs])
    method.add_bucket_(target, message, bucket)
    return target.rows_R[0]


def coded(method: Gathered, x_W: Tensor, shape: tuple[int, ...] = (), **given: Any) -> tuple[Sequence[Tensor], Tensor]:
    """Return (messages, decoded) of rows [W, N]; assert that no message is longer than `message_bytes`."""
    bucket = bucket_of(x_W, shape, **given)
    message, promised = method.encode_bucket(bucket), method.message_bytes(bucket.specs[0], bucket.levels[0])
    for row in message.rows:
        assert len(row) == promised if method.traits.fixed_size else len(row) <= promised
    return message.rows, decoded(method, message, bucket)
