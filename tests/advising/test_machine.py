"""Machines like this one."""

from accordion_bench.advising.cluster import cluster_like_here
from accordion_bench.comm.stages import Stage
from accordion_bench.network.link_model import Network


def test_on_a_gpu_communication_takes_no_cores():
    """What gloo needs of a processor is not taken from the kernels of a GPU; the network itself stays as it is."""
    network, bucket = Network(1e10, 0.0, kinds={"all_reduce": {"cpu": 0.8e-9}}), Stage(0, 0, 0, 1e6, 0)
    assert cluster_like_here(network, 16, "cuda", 1).network.processor_seconds(bucket) == 0
    assert cluster_like_here(network, 16, "cpu", 1).network.processor_seconds(bucket) == 0.8e-3
    assert network.processor_seconds(bucket) == 0.8e-3
