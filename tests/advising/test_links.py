"""A probed link in the place of a preset."""

from dataclasses import replace

import pytest

from accordion_bench.advising import cluster
from accordion_bench.config.compose import compose
from accordion_bench.network.link_model import Network
from accordion_bench.network.links import LinkCost, MeasuredLink, network_options, write_measured_link
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import build

COSTS = {
    "all_reduce": LinkCost(2e-4, 9.5e7, 121_000.0, 8e-10, 0.02),
    "all_gather": LinkCost(3e-4, 9e7, 118_000.0, 1.5e-9, 0.03),
    "all_to_all": LinkCost(4e-4, 7.5e7, 110_000.0, 1.4e-9, 0.07),
}
LINK = MeasuredLink(4, 4, "gloo", "cpu", COSTS)


def test_a_run_behind_the_measured_link(tmp_path):
    """Through the file and Hydra's words, it is the link of the numbers themselves."""
    write_measured_link(tmp_path / "link.json", LINK, [])
    link = cluster.link_of(tmp_path / "link.json", ["model=lstm"])
    found = build(compose(cluster.words_of(link, 1))["network"], "network")
    theirs = Network(**network_options(LINK))
    for kind in ("all_reduce", "all_gather", "all_gather_uneven", "all_to_all"):
        assert found.seconds(1e6, 6, 4, kind) == theirs.seconds(1e6, 6, 4, kind)
        assert found.cost(kind) == theirs.cost(kind)
    assert found.seconds(1e6, 6, 4, "all_to_all") == pytest.approx(8e6 / 7.5e7 + 6 * 4e-4)
    assert (
        found.burst == 121_000 and cluster.error_of(link, 1) == pytest.approx(0.04) and cluster.error_of(None, 1) == 0
    )


def test_the_error_is_that_of_the_level_that_is_taken():
    """Machines of one worker have what one worker of each got; those of several what all got together."""
    one, together = ({kind: replace(cost, error=error) for kind, cost in COSTS.items()} for error in (0.2, 0.3))
    link = MeasuredLink(8, 2, "gloo", "cpu", COSTS, inside=COSTS, between=one, between_together=together)
    assert cluster.error_of(link, 1) == pytest.approx(0.2) and cluster.error_of(link, 4) == pytest.approx(0.3)


def test_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"--link must stand without network=10gbit, got both; type --link "):
        cluster.link_of(tmp_path / "link.json", ["network=10gbit"])
    with pytest.raises(ConfigError, match=r"--link must be a file that a probe of a link has written, got .*which"):
        cluster.link_of(tmp_path / "none.json", [])


@pytest.mark.parametrize(
    ("network", "typed", "backend", "algorithm"),
    [
        ({"algorithm": "ring"}, [], "gloo", "ring"),
        ({"algorithm": "ring"}, [], "nccl", "cheapest"),
        ({"algorithm": "ring", "inside": "pcie4", "workers_per_machine": 4}, [], "gloo", "cheapest"),
        ({"algorithm": "ring", "inside": "pcie4", "workers_per_machine": 1}, [], "gloo", "ring"),
        ({"algorithm": "ring", "inside": "pcie4", "workers_per_machine": None}, [], "gloo", "ring"),
        ({"algorithm": "ring", "workers_per_machine": 4}, ["network.algorithm=ring"], "nccl", "ring"),
    ],
)
def test_nccl_chooses_and_gloo_has_rings(network, typed, backend, algorithm):
    assert cluster.with_algorithm(network, typed, backend) == {**network, "algorithm": algorithm}
