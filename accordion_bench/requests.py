"""What policies may ask of one exchange, see `Policy.needs_at`; nothing else is computed."""

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
    """In an exchange that is due: squared norms of the gradients and of their mean, see `signals/gradient_sums.py`."""


@dataclass(frozen=True)
class TrainingLoss(Request):
    """In an exchange that is due: the training loss since it was last read."""


class BucketStatistic(Request):
    """A statistic of a quantiser's buckets, see `signals/bucket_statistics.py`.

    Args:
        lengths: collected in exchanges whose buckets are all `equal` in length, where they `differ`, or in `any`.
    """

    lengths: str

    @property
    def name(self) -> str:
        """As checkpoints spell it; statistics are collected and sent in the order of their names."""
        raise NotImplementedError


@dataclass(frozen=True)
class BucketMoments(BucketStatistic):
    """Mean, standard deviation and weight of the coordinates in some buckets: of each length those of largest norm.

    A bucket weighs its length times its norm; those of one length together as much as all buckets of that length do.

    Args:
        count: so many buckets of each length.
        weight: the norm enters `squared`, in its `first` power, or not (`none`).
    """

    count: int
    weight: str = "squared"
    lengths: str = "any"

    @property
    def name(self) -> str:
        return f"largest_buckets:{self.count}:{self.weight}:{self.lengths}"


@dataclass(frozen=True)
class PooledMoments(BucketStatistic):
    """Sums over all buckets, from which mean and variance of all coordinates follow."""

    lengths: str = "any"

    @property
    def name(self) -> str:
        return "pooled_moments"


@dataclass(frozen=True)
class CoordinateHistogram(BucketStatistic):
    """Histogram of the coordinates' magnitudes.

    Args:
        weight: a coordinate counts with its bucket's norm `squared`, its `first` power, or `none`.
    """

    weight: str
    lengths: str = "any"

    @property
    def name(self) -> str:
        return f"histogram:{self.weight}" if self.lengths == "any" else f"histogram:{self.weight}:{self.lengths}"


def statistic_named(name: str) -> BucketStatistic:
    """The statistic of a checkpoint.

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
    raise ValueError(f"no statistic of buckets is called {name}")
