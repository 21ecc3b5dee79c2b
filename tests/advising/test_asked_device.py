"""`gpu` and `compute_ms`: what may be typed, and how it is refused."""

import pytest

from accordion_bench.advising.gpus import AskedDevice, asked_device, measured_gpu, named, split
from accordion_bench.options.checks import ConfigError


def test_what_is_typed():
    assert split(["workers=4", "gpu=a100"]) == (AskedDevice(named("a100")), ["workers=4"])
    assert split(["compute_ms=12.5", "model=lstm"]) == (AskedDevice(compute=0.0125), ["model=lstm"])
    assert split(["model=lstm"]) == (AskedDevice(), ["model=lstm"]) and not AskedDevice()
    assert asked_device("4090").codecs_of == named("4090")
    assert asked_device(compute_ms=12).codecs_of == AskedDevice().codecs_of == measured_gpu()


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("gpu=h1000", "gpu must be one of a100, h100, h200, l40s, 4090, got h1000; type gpu=h100"),
        ("gpu=", "gpu must be one of a100, h100, h200, l40s, 4090, got "),
        (
            "gpu=a100 compute_ms=12",
            "gpu must stand without compute_ms, got a100 and 12; type gpu=a100, or compute_ms=12",
        ),
        ("compute_ms=0", "compute_ms must be a number above 0, got 0.0; type compute_ms=12"),
        ("compute_ms=-3", "compute_ms must be a number above 0, got -3.0; type compute_ms=12"),
        ("compute_ms=inf", "compute_ms must be a number above 0, got inf; type compute_ms=12"),
        ("compute_ms=nan", "compute_ms must be a number above 0, got nan; type compute_ms=12"),
        ("compute_ms=12ms", "compute_ms must be a number above 0, got 12ms; type compute_ms=12"),
        ("gpu=a100 gpu=h100", "gpu must be typed once, got gpu=a100 and gpu=h100; type gpu=h100"),
    ],
)
def test_refusals_are_one_sentence(typed, sentence):
    with pytest.raises(ConfigError) as refused:
        split(typed.split())
    assert str(refused.value).startswith(sentence) and "\n" not in str(refused.value)
