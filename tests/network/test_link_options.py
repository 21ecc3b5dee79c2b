"""A measured link as a modelled one."""

import shlex

import pytest

from accordion_bench.network.collective_costs import KINDS, Hop
from accordion_bench.network.link_model import Network
from accordion_bench.network.links import LinkCost, MeasuredLink, network_options, to_type
from tests.kit import tiny

KINDS_COST = {kind: LinkCost(1e-3 / n, 1e8 / n, 125_000.0, 1e-9 * n, 0.03) for n, kind in enumerate(KINDS, start=1)}
FAST = {kind: LinkCost(1e-5, 1e11) for kind in KINDS}
FLAT = MeasuredLink(4, 4, "gloo", "cpu", KINDS_COST)
LAYERED = MeasuredLink(8, 2, "gloo", "cpu", FAST, inside=FAST, between=FAST, between_together=KINDS_COST)


def test_the_modelled_link_takes_what_the_measured_one_has_taken():
    network = Network(**network_options(FLAT))
    for kind, cost in KINDS_COST.items():
        line = cost.latency * 6 + 8 * 1e6 / cost.bandwidth
        assert network.seconds(1e6, 6, 4, kind) == pytest.approx(line)
        assert network.cost(kind).cpu == cost.cpu
    assert network.burst == 125_000


def test_machines_share_the_link_that_their_workers_used_together():
    network = Network(**network_options(LAYERED))
    assert (network.workers_per_machine, network.bandwidth, network.inner) == (4, 1e8, Hop(1e-5, 1e11))
    assert network.cost("all_to_all").bandwidth == pytest.approx(1e8 / 3)


def test_machines_of_one_worker_have_what_one_worker_of_each_has_used_alone():
    network = Network(**network_options(LAYERED, workers_each=1))
    assert (network.workers_per_machine, network.bandwidth) == (1, 1e11)
    assert network_options(FLAT, workers_each=1) == network_options(FLAT)


@pytest.mark.parametrize("link", [FLAT, LAYERED])
def test_what_to_type_is_understood(link, tmp_path):
    typed = tiny.cfg(tmp_path, *shlex.split(to_type(link)), "workers=8")["network"]
    exact = network_options(link)
    assert {key: typed[key] for key in exact if key not in ("kinds", "inside")} == pytest.approx(
        {key: value for key, value in exact.items() if key not in ("kinds", "inside")}, rel=1e-3
    )
    for kind, numbers in exact["kinds"].items():
        assert typed["kinds"][kind] == pytest.approx(numbers, rel=1e-3)
    assert "inside" not in exact or typed["inside"] == exact["inside"]
