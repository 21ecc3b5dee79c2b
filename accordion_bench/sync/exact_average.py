"""The exact average, which leaves one model behind."""

import torch

from accordion_bench.comm.replicas import Replicas


@torch.no_grad()
def exact_average(axis: Replicas) -> None:
    """z <- mean x_w, uncompressed; x_w <- z."""
    everyone = range(axis.comm.local_workers)
    means = axis.comm.all_reduce_mean(axis.differences(axis.shared, everyone))
    axis.comm.ledger.paper_count(sum(mean.numel() for mean in means))
    torch._foreach_sub_(axis.shared, means)
    axis.restart(axis.shared, everyone)
    axis.comm.clock.lap("exposed")
