"""Requests: which statistics of buckets they are, how checkpoints spell them, in which order they are sent."""

import pytest

from accordion_bench.plan import (
    BucketMoments,
    CoordinateHistogram,
    GradientNoise,
    PooledMoments,
    Probe,
    RecentMean,
    TrainingLoss,
    statistic_named,
)
from accordion_bench.signals.statistics import in_order

NAMES = {
    "histogram:squared": CoordinateHistogram("squared"),
    "histogram:squared:differ": CoordinateHistogram("squared", "differ"),
    "largest_buckets:20:squared:any": BucketMoments(20),
    "largest_buckets:5:first:equal": BucketMoments(5, "first", "equal"),
    "pooled_moments": PooledMoments(),
}


@pytest.mark.parametrize(("name", "statistic"), NAMES.items())
def test_checkpoints_name_statistics(name, statistic):
    assert statistic.name == name and statistic_named(name) == statistic


@pytest.mark.parametrize("name", ["probe:3", "bucket_moments:20"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ValueError, match=name):
        statistic_named(name)


def test_statistics_are_sent_in_the_order_of_their_names():
    others = {Probe(0), RecentMean(), GradientNoise(), TrainingLoss()}
    assert in_order(others | set(NAMES.values())) == [NAMES[name] for name in sorted(NAMES)]
