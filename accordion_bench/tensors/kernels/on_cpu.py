"""`DenseKernels` on a CPU."""

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.kernels import drawn, sums
from accordion_bench.tensors.kernels import encode as codes
from accordion_bench.tensors.kernels.dense_kernels import Coordinates, Decoding, Encoding, array_like
from accordion_bench.tensors.kernels.norms import bucket_norms
from accordion_bench.tensors.kernels.table import Table
from accordion_bench.tensors.permutations import Draws

__all__ = ["add_values", "bucket_norms", "draw", "encode", "gather", "read_headers", "scatter", "write_headers"]


def write_headers(scales: Tensor, table: Table, message: Tensor) -> None:
    sums.write_headers(scales.numpy(), table.rows, message.numpy())


def read_headers(message: Tensor, table: Table, alpha: float) -> Tensor:
    return torch.from_numpy(sums.read_headers(message.numpy(), table.rows, alpha))


def encode(x: Coordinates, table: Table, message: Tensor, encoding: Encoding) -> np.ndarray:
    if encoding.scales is not None:
        write_headers(encoding.scales, table, message)
    return codes.encode(x, table, message, encoding)


def add_values(targets: Coordinates, table: Table, message: Tensor, decoding: Decoding) -> None:
    scales, alpha = decoding.scales, decoding.alpha
    if scales is None:
        scales = read_headers(message, table, alpha)
    elif scales.numel():
        scales = (scales * alpha).contiguous()
    else:
        scales = torch.full((len(message), table.buckets), alpha)
    sums.add_values(targets, table, message, scales, decoding)


def draw(draws: Draws, words: Tensor) -> Tensor:
    out = torch.empty(draws.room, dtype=draws.dtype)
    drawn.draw(draws, words.numpy().view(np.uint32), out.numpy())
    return out


def gather(x: Coordinates, draws: Draws, places: Tensor) -> Tensor:
    out = torch.empty(len(x.addresses), draws.room, dtype=x.like.dtype)
    drawn.gather(x.addresses, draws, places.numpy(), out.numpy())
    return out


def scatter(
    targets: Coordinates, draws: Draws, places: Tensor, values: Coordinates, factors: tuple[float, ...]
) -> None:
    own = np.array(factors, array_like(targets.like).dtype)
    drawn.scatter(targets.addresses, draws, places.numpy(), values.addresses, own)
