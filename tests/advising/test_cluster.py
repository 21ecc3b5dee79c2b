"""Workers, machines, and rates: what the command takes, and how it refuses."""

import pytest

from accordion_bench.advising.cluster import Machines, split
from accordion_bench.options.checks import ConfigError


@pytest.mark.parametrize(
    ("typed", "machines"),
    [
        ("workers=16", Machines(16, 1)),
        ("machines=8 workers_per_machine=4", Machines(8, 4)),
        ("workers=32 workers_per_machine=4", Machines(8, 4)),
        ("workers=32 machines=8 workers_per_machine=4", Machines(8, 4)),
        ("machines=1 workers_per_machine=4", Machines(1, 4)),
        ("machines=3", Machines(3, 1)),
    ],
)
def test_clusters(typed, machines):
    assert split([*typed.split(), "network=10gbit"]) == (machines, ["network=10gbit"])


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("", "workers must be given, got none; type workers=16, or machines=4 workers_per_machine=4"),
        ("workers=1", "workers must be an integer of at least 2, got 1; type workers=16"),
        ("workers=0", "workers must be an integer of at least 2, got 0; type workers=16"),
        ("workers=many", "workers must be an integer of at least 2, got many; type workers=16"),
        ("workers=16,32", "workers must be an integer of at least 2, got 16,32; type workers=16"),
        ("machines=1", "machines must be at least 2 where each has one worker, got 1; type machines=2"),
        ("workers=7 workers_per_machine=4", "workers_per_machine must be a divisor of workers=7, got 4; type"),
        (
            "workers=16 network.workers_per_machine=4",
            "network.workers_per_machine must be left out here, got 4; type workers_per_machine=4",
        ),
        ("workers=9 machines=8", "workers must be machines x workers_per_machine = 8 x 1, got 9; type workers=8"),
        (
            "workers=4 network.bandwidth=10",
            "network.bandwidth must be a rate of at least 100kbit, with its unit, got 10;",
        ),
        (
            "workers=4 network.bandwidth=0",
            "network.bandwidth must be a rate of at least 100kbit, with its unit, got 0;",
        ),
        ("workers=4 network.bandwidth=0gbit", "network.bandwidth must be a rate of at least 100kbit"),
        ("workers=4 network.bandwidth=-1e9", "network.bandwidth must be a rate of at least 100kbit"),
        ("workers=4 network.bandwidth=nan", "network.bandwidth must be a rate of at least 100kbit"),
        ("workers=4 network.bandwidth=10Gb", "network.bandwidth must be a rate with its unit, got 10Gb; type"),
    ],
)
def test_refusals_are_one_sentence(typed, sentence):
    with pytest.raises(ConfigError) as refused:
        split(typed.split())
    assert str(refused.value).startswith(sentence) and "\n" not in str(refused.value)


@pytest.mark.parametrize("typed", ["network.bandwidth=20mbit", "network.bandwidth=2e7", "network.bandwidth=1.5 Gbit/s"])
def test_rates(typed):
    assert split(["workers=2", typed]) == (Machines(2, 1), [typed])
