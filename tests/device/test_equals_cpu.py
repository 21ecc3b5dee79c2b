"""Every compressor takes the device's branch with real numbers, and gives what the CPU's gives."""

import pytest

from accordion_bench import conformance
from accordion_bench.conformance.placement import check_devices
from accordion_bench.conformance.pretend_device import DEVICE, pretended
from tests.kit.helpers import yaml_names


def test_an_owner_of_nothing():
    """`server=literal`: one worker owns all pieces, so the others' answers are empty."""
    with pretended():
        check_devices(conformance.from_yaml("distefblocksgd", server="literal"), device=str(DEVICE))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", yaml_names("compressor"))
def test_every_compressor(name):
    with pretended():
        check_devices(conformance.from_yaml(name), device=str(DEVICE))
