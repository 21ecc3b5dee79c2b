"""The functions of a `Room`, by loops over memory of the CPU."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.kernels import drawn, headers, norms, sums
from accordion_bench.tensors.kernels import encode as codes
from accordion_bench.tensors.kernels.rounding import Rounding
from accordion_bench.tensors.kernels.table import Table
from accordion_bench.tensors.permutations import Draws


def bucket_norms(addresses: np.ndarray, table: Table, norm: str, like: Tensor) -> Tensor:
    return torch.from_numpy(norms.bucket_norms(addresses, table, norm, array_like(like)))


def write_headers(scales: Tensor, table: Table, message: Tensor) -> None:
    headers.write_headers(scales.numpy(), table.rows, message.numpy())


def read_headers(message: Tensor, table: Table, alpha: float) -> Tensor:
    return torch.from_numpy(headers.read_headers(message.numpy(), table.rows, alpha))


def encode(
    addresses: np.ndarray,
    table: Table,
    scales: Tensor | None,
    factors: Tensor,
    streams: Tensor,
    message: Tensor,
    like: Tensor,
    rounding: Rounding,
) -> np.ndarray:
    if scales is not None:
        write_headers(scales, table, message)
    of_buckets, bytes_W = factors.contiguous().numpy(), message.numpy()
    drawn = streams.numpy().view(np.uint64) if streams.numel() else np.empty((0, 0), np.uint64)
    return codes.encode(addresses, table, of_buckets, drawn, bytes_W, array_like(like), rounding)


def add_values(
    targets: np.ndarray,
    table: Table,
    scales: Tensor | None,
    alpha: float,
    message: Tensor,
    values: Sequence[np.ndarray],
    like: Tensor,
    divisor: int,
    middles: Tensor | None = None,
    empty: bool = False,
) -> None:
    if scales is None:
        scales = read_headers(message, table, alpha)
    elif scales.numel():
        scales = (scales * alpha).contiguous()
    else:
        scales = torch.full((len(message), table.buckets), alpha)
    added = None if middles is None else middles.numpy()
    sums.add_values(targets, table, scales.numpy(), message.numpy(), values, array_like(like), divisor, added, empty)


def draw(draws: Draws, words: Tensor) -> Tensor:
    out = torch.empty(draws.room, dtype=draws.dtype)
    drawn.draw(draws, words.numpy().view(np.uint32), out.numpy())
    return out


def gather(addresses: np.ndarray, draws: Draws, places: Tensor, like: Tensor) -> Tensor:
    out = torch.empty(len(addresses), draws.room, dtype=like.dtype)
    drawn.gather(addresses, draws, places.numpy(), out.numpy())
    return out


def scatter(
    addresses: np.ndarray, draws: Draws, places: Tensor, values: np.ndarray, factors: tuple[float, ...], like: Tensor
) -> None:
    drawn.scatter(addresses, draws, places.numpy(), values, np.array(factors, array_like(like).dtype))


def array_like(x: Tensor) -> np.ndarray:
    """An empty array of a tensor's type."""
    return x.numpy()[:0].reshape(0)
