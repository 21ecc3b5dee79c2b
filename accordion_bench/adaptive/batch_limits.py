"""What all policies of the batch size share: exact numbers, scaling of the learning rate, what fits the data."""

import math
import struct

from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import RunFacts

LR_SCALINGS = ("linear", "sqrt", "none")
LARGEST = 2**24 - 1  # plans travel in float32


def float32(value: float) -> float:
    """The nearest number that a plan can hold."""
    return struct.unpack("f", struct.pack("f", value))[0]


def scaled(lr_scaling: str, ratio: float) -> float:
    """The learning rate's factor for a batch that is `ratio` times the first: `linear` ratio, `sqrt`, `none` 1."""
    return float32({"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[lr_scaling])


def most(run: RunFacts) -> int:
    """The largest batch that means anything: all samples that a worker sees per epoch."""
    return min(run.per_worker, LARGEST)


def refuse_full(name: str, run: RunFacts) -> None:
    """Refuse a first batch that cannot grow.

    Raises:
        ConfigError: with a batch size that can.
    """
    limit = most(run)
    if run.batch_size >= limit:
        raise ConfigError(
            f"batch_size must be below {limit}, the samples that a worker sees per epoch, for adaptive.{name} to "
            f"enlarge it, got {run.batch_size}",
            {"batch_size": max(limit // 20, 1)},
        )
