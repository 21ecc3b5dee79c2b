"""A cluster of machines like this one."""

import os

from accordion_bench.advising.pipeline import Cluster
from accordion_bench.network.link_model import Network


def cluster_like_here(network: Network, workers: int, device: str, threads: int) -> Cluster:
    """Machines with as many cores as this one, which their workers share.

    The threads that compute count as one. On a GPU codecs take their time from computing, because kernels of the
    backward pass fill it; communication takes nothing.

    Args:
        network: its links, with the workers of a machine.
        workers: A.
        device: on which steps compute.
        threads: that computed when a step was timed.
    """
    if device != "cpu":
        return Cluster(network.without_cpu(), workers, 1.0)
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = min(network.workers_per_machine, workers) * threads
    return Cluster(network, workers, here / each)
