"""How much gradients of small batches scatter: measured in an exchange, where a policy asks for `GradientNoise`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.compressors.none import Dense
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.plan import SquareNorms


@torch.no_grad()
def square_norms(
    exchange: Exchange, gradients_W: Sequence[Tensor], updates: Sequence[Tensor], batch_size: int
) -> SquareNorms:
    """Mean over workers of |g_w|^2, and |mean_w g_w|^2; every process calls it, after the exchange.

    A dense exchange has just computed the mean; any other one does not know it, and one more dense all-reduce is
    charged to control_bytes. The squares themselves are 8 bytes.

    Args:
        exchange: of all workers.
        gradients_W: what was exchanged [W, ...].
        updates: what came of it [...].
        batch_size: samples behind each g_w.
    """
    comm = exchange.comm
    small = _square(gradients_W)
    if type(exchange.compressor) is Dense:
        mean = list(updates)
    else:
        total = torch.cat([g_W.sum(0).flatten() for g_W in gradients_W])
        mean = [comm.sum_(total, "control").div_(comm.workers)]
    of_workers, of_mean = torch.stack([comm.sum_(small, "control"), _square(mean)]).tolist()
    return SquareNorms(of_workers / comm.workers, of_mean, batch_size)


def _square(xs: Sequence[Tensor]) -> Tensor:
    """The sum of squares of all entries, in double precision."""
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in xs]
    return torch.stack(norms).square().sum()
