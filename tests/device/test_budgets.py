"""Launches and waits of every compressor are those of the table in docs/performance.md, or fewer."""

import pytest

from scripts.launches import NETWORKS, row, stated
from tests.kit.helpers import compressor, yaml_names
from tests.kit.paths import ROOT

STATED = stated((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"))
CONSTANT = {"none", "bf16", "fp16"}  # whatever the number of tensors


@pytest.mark.sample(19)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", yaml_names("compressor")[::-1])  # AdaComp, which takes longest, is not first
def test_no_more_than_stated(name, network):
    counts = row(name, network)
    assert sum(counts.launches.values()) <= STATED[name, network][0], counts.launches.most_common(8)
    assert sum(counts.waits.values()) <= STATED[name, network][1], counts.waits


@pytest.mark.parametrize("name", yaml_names("compressor"))
def test_budgets(name):
    """The look of the whole step whether all is finite is one of the waits; data of no fixed size cost one more."""
    launches, waits = zip(*(STATED[name, network] for network in NETWORKS), strict=True)
    assert max(waits) <= (1 if compressor(name).compressor.traits.fixed_size else 2)
    assert name not in CONSTANT or max(launches) <= 12


def test_the_table_has_every_compressor():
    assert {name for name, _ in STATED} == set(yaml_names("compressor"))
