"""What policies may ask of one exchange, see `Policy.needs_at`; nothing that nobody asks for is computed."""

from dataclasses import dataclass


class Request:
    """One thing to look at."""


@dataclass(frozen=True)
class Probe(Request):
    """What a level would cost and lose of what worker 0 sends, residual included.

    Args:
        level: index into the ladder.
    """

    level: int


@dataclass(frozen=True)
class RecentMean(Request):
    """This exchange counts into a mean, at which a later `RecentMean` with a `Probe` looks instead, and forgets it."""


@dataclass(frozen=True)
class GradientNoise(Request):
    """In an exchange that is due: squared norms of the gradients and of their mean, see `signals/square_norms.py`."""


@dataclass(frozen=True)
class TrainingLoss(Request):
    """In an exchange that is due: the training loss since it was last read."""


class BucketStatistic(Request):
    """A statistic of a quantiser's buckets, see `signals/bucket_statistics.py`."""

    @property
    def name(self) -> str:
        """As checkpoints spell it; statistics are collected and sent in the order of their names."""
        raise NotImplementedError


@dataclass(frozen=True)
class BucketMoments(BucketStatistic):
    """Norm, mean and standard deviation of the coordinates in some buckets.

    Args:
        count: the buckets of largest norm.
    """

    count: int

    @property
    def name(self) -> str:
        return f"bucket_moments:{self.count}"


@dataclass(frozen=True)
class PooledMoments(BucketStatistic):
    """Sums over all buckets, from which mean and variance of all coordinates follow."""

    @property
    def name(self) -> str:
        return "pooled_moments"


@dataclass(frozen=True)
class CoordinateHistogram(BucketStatistic):
    """Histogram of the coordinates' magnitudes.

    Args:
        weight: a bucket counts with its norm `squared`, its `first` power, or `none`.
    """

    weight: str

    @property
    def name(self) -> str:
        return f"histogram:{self.weight}"


def statistic_named(name: str) -> BucketStatistic:
    """The statistic of a checkpoint.

    Raises:
        ValueError: no statistic has this name.
    """
    kind, _, argument = name.partition(":")
    match kind:
        case "bucket_moments":
            return BucketMoments(int(argument))
        case "pooled_moments":
            return PooledMoments()
        case "histogram":
            return CoordinateHistogram(argument)
    raise ValueError(f"no statistic of buckets is called {name}")
