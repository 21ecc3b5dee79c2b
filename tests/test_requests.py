"""Requests: which statistics of buckets they are, how checkpoints spell them, in which order they are sent."""

import pytest

from accordion_bench.requests import (
    BucketMoments,
    CoordinateHistogram,
    GradientNoise,
    PooledMoments,
    Probe,
    RecentMean,
    TrainingLoss,
    statistic_named,
)
from accordion_bench.signals.bucket_statistics import in_order

NAMES = {
    "bucket_moments:20": BucketMoments(20),
    "bucket_moments:5": BucketMoments(5),
    "histogram:squared": CoordinateHistogram("squared"),
    "pooled_moments": PooledMoments(),
}


@pytest.mark.parametrize(("name", "statistic"), NAMES.items())
def test_checkpoints_of_version_0_1_name_statistics(name, statistic):
    assert statistic.name == name and statistic_named(name) == statistic


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="probe:3"):
        statistic_named("probe:3")


def test_statistics_are_sent_in_the_order_of_their_names():
    others = {Probe(0), RecentMean(), GradientNoise(), TrainingLoss()}
    assert in_order(others | set(NAMES.values())) == [NAMES[name] for name in sorted(NAMES)]
