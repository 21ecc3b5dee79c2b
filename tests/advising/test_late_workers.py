"""--simulate on made-up methods."""

from dataclasses import replace

from accordion_bench.advising.advice import advise
from accordion_bench.advising.cluster import Cluster
from accordion_bench.advising.simulation import Wanted
from accordion_bench.network.link_model import Network
from tests.advising.made_up_costs import ALL, LOCAL, times


def test_only_methods_with_a_quorum_go_on_without_late_workers():
    cluster, wanted = Cluster(Network(1e9, 0.0), 4), Wanted(["slow=1:9.0", "spread=0", "sync.quorum=3"])
    for quorum in (True, False):
        costs = [*ALL[:-1], replace(LOCAL, quorum=quorum)]
        found = wanted.run(times(), costs, cluster, advise(times(), costs, cluster))
        left_out = {late.row.method: late.found.left_out.any() for late in found}
        assert left_out["local SGD"] == quorum and sum(left_out.values()) == quorum
