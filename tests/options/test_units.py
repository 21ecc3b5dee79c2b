"""Rates and times may be typed with their units."""

import math

import pytest

from accordion_bench.options.units import digits, human_bytes, rate, seconds, without_units
from tests.kit import composed


@pytest.mark.parametrize(
    "text, value",
    [("10gbit", 1e10), ("100mbit", 1e8), ("2.5 Gbit/s", 2.5e9), ("1e3kbit", 1e6), ("8bit", 8), ("20Mbps", 2e7)],
)
def test_rates(text, value):
    assert rate(text) == value


@pytest.mark.parametrize("text, value", [("5ms", 5e-3), ("50us", 5e-5), ("50µs", 5e-5), ("2s", 2.0), ("1.5e2ms", 0.15)])
def test_times(text, value):
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["fast", "10", "1e9", "gbit", "10gb", "1.2.3gbit", "10 parsecs", ""])
def test_anything_else_stays_for_others_to_refuse(text):
    assert rate(text) is None and seconds(text) is None
    assert without_units({"network": {"bandwidth": text}}) == {"network": {"bandwidth": text}}


def test_a_configuration_holds_numbers():
    options = {"network": {"bandwidth": "10gbit", "latency": "5ms", "jitter": None}, "bandwidth": 3, "name": "10gbit"}
    held = {"network": {"bandwidth": 1e10, "latency": 0.005, "jitter": None}, "bandwidth": 3, "name": "10gbit"}
    assert without_units(options) == held


def test_typed():
    from accordion_bench.config.compose import compose

    cfg = compose(["network.bandwidth=10gbit", "network.latency=20us"])
    assert cfg["network"] == {**composed.cfg("network=10gbit")["network"], "latency": 2e-5}


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (999, "999 B"), (999_700, "1 MB"), (1_234_567, "1.23 MB"), (1.5e15, "1,500 TB"), (math.nan, "nan TB")],
)
def test_bytes_are_no_powers(count, text):
    assert human_bytes(count) == text


def test_digits_are_no_powers():
    assert [digits(x) for x in (0.5, 1.024, 999.4, 999.7, 1024)] == ["0.5", "1.02", "999", "1,000", "1,024"]
    assert digits(120, 2) == "120" and digits(12.3, 2) == "12"
