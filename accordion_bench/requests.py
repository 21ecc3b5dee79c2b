"""Requests of policies to an exchange, see `Policy.needs_at`; only requested values are computed."""

from dataclasses import dataclass


class Request:
    """Base class of requests."""


@dataclass(frozen=True)
class Probe(Request):
    """Cost and loss of a level for the tensors that worker 0 sends, including the residual.

    Args:
        level: index into the ladder.
    """

    level: int


@dataclass(frozen=True)
class RecentMean(Request):
    """Add this exchange to a mean. With a `Probe`, a later `RecentMean` probes this mean instead and resets it."""


@dataclass(frozen=True)
class GradientNoise(Request):
    """When an exchange is due: squared norms of the gradients and of their mean, see `signals/statistics.py`."""


@dataclass(frozen=True)
class TrainingLoss(Request):
    """When an exchange is due: mean training loss since the previous read."""


class BucketStatistic(Request):
    """Statistic of a quantiser's buckets, see `signals/statistics.py`.

    Args:
        lengths: collect in exchanges whose buckets are all `equal` in length, whose lengths `differ`, or in `any`.
    """

    lengths: str

    @property
    def name(self) -> str:
        """Name in checkpoints; statistics are collected and sent in the order of their names."""
        raise NotImplementedError


@dataclass(frozen=True)
class BucketMoments(BucketStatistic):
    """Mean, standard deviation and weight of the coordinates of the largest buckets by norm, for each length.

    The weight of a bucket is its length times its norm, scaled so that a length has the weight of all its buckets.

    Args:
        count: number of buckets of each length.
        weight: whether the norm enters `squared`, in its `first` power, or not (`none`).
    """

    count: int
    weight: str = "squared"
    lengths: str = "any"

    @property
    def name(self) -> str:
        return f"largest_buckets:{self.count}:{self.weight}:{self.lengths}"


@dataclass(frozen=True)
class PooledMoments(BucketStatistic):
    """Sums over all buckets that determine mean and variance of all coordinates."""

    lengths: str = "any"

    @property
    def name(self) -> str:
        return "pooled_moments"


@dataclass(frozen=True)
class CoordinateHistogram(BucketStatistic):
    """Histogram of the magnitudes of the coordinates.

    Args:
        weight: weight of a coordinate by its bucket's norm: `squared`, its `first` power, or `none`.
    """

    weight: str
    lengths: str = "any"

    @property
    def name(self) -> str:
        return f"histogram:{self.weight}" if self.lengths == "any" else f"histogram:{self.weight}:{self.lengths}"


def statistic_named(name: str) -> BucketStatistic:
    """Return the statistic with a name from a checkpoint.

    Raises:
        ValueError: no statistic has this name.
    """
    kind, *arguments = name.split(":")
    match kind:
        case "largest_buckets":
            return BucketMoments(int(arguments[0]), *arguments[1:])
        case "pooled_moments":
            return PooledMoments()
        case "histogram":
            return CoordinateHistogram(*arguments)
    raise ValueError(f"no statistic of buckets has the name {name}")
