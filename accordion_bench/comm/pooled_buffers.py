"""BatchNorm statistics, and whatever else is a buffer, pooled over all workers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.tensors.real_view import as_real


@torch.no_grad()
def pooled_buffers(buffers_W: Mapping[str, Tensor], comm: Comm, between: bool = True) -> dict[str, Tensor]:
    """Mean over all workers; of integers and bools, which have none, worker 0's. Charged to `eval`.

    What is not dense, such as the edges of a graph, stays the first local worker's.

    Args:
        buffers_W: by name, [W, ...].
        comm: of all workers.
        between: a variance also gets the variance of the workers' means.
    """
    pooled = {name: buffer_W[0].clone() for name, buffer_W in buffers_W.items()}
    dense = [name for name, buffer in pooled.items() if is_dense(buffer)]
    floats = [name for name in dense if pooled[name].is_floating_point() or pooled[name].is_complex()]
    comm.broadcast_([pooled[name] for name in dense if name not in floats], "eval")
    variances = [name for name in floats if name.endswith("running_var")] if between else []
    means_of = {name: name.removesuffix("var") + "mean" for name in variances}
    parts = [as_real(buffers_W[name]).double().sum(0) for name in floats]
    parts += [buffers_W[means_of[name]].double().square().sum(0) for name in variances]
    if not parts:
        return pooled
    total = comm.sum_(torch.cat([part.reshape(-1) for part in parts]), "eval") / comm.workers
    averages = [
        value.view(part.shape) for value, part in zip(total.split([p.numel() for p in parts]), parts, strict=True)
    ]
    mean = dict(zip(floats, averages, strict=False))
    for name, square in zip(variances, averages[len(floats) :], strict=True):
        mean[name] = mean[name] + square - mean[means_of[name]].square()
    for name, value in mean.items():
        as_real(pooled[name]).copy_(value)
    return pooled


def is_dense(buffer: Tensor) -> bool:
    """Whether a buffer can be sent as it lies in memory."""
    return buffer.layout == torch.strided and not buffer.is_nested


def dense_parts(buffer: Tensor) -> list[Tensor]:
    """The dense tensors that one that is not dense is made of."""
    if buffer.is_nested:
        return list(buffer.unbind())
    if buffer.layout == torch.sparse_coo:
        buffer = buffer.coalesce()
        return [buffer.indices(), buffer.values()]
    by_row = buffer.layout in (torch.sparse_csr, torch.sparse_bsr)
    places = (buffer.crow_indices(), buffer.col_indices()) if by_row else (buffer.ccol_indices(), buffer.row_indices())
    return [*places, buffer.values()]
