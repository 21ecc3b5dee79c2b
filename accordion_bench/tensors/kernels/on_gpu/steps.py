"""Updates of momenta and parameters in one launch for all tensors, with one read and one write per element; float32.

Kernels receive a table int64 [rows, T]: addresses of each list of tensors and worker, and in the last row the lengths.

Tensor suffixes: W local workers, T tensors.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.on_gpu.launch import aligned, launch, parts_on
from accordion_bench.tensors.kernels.on_gpu.packing import places, read_slice, slice_size, write_slice
from accordion_bench.tensors.kernels.on_gpu.residual_inputs import row_at
from accordion_bench.tensors.kernels.table import addresses, contiguous
from accordion_bench.tensors.same_shape import in_rows
from accordion_bench.tensors.upload import upload

SLICED = tl.constexpr(2)  # slices are those of codes of one bit


def add(
    us_W: Sequence[Tensor], gs_W: Sequence[Tensor], momentum: float, nesterov: bool, sums_W: Sequence[Tensor]
) -> Sequence[Tensor]:
    """See `Engine.add_momenta`."""
    ahead = nesterov and not sums_W
    found = [torch.empty_like(g_W, memory_format=torch.contiguous_format) for g_W in gs_W] if ahead else sums_W or us_W
    _launch(_add, [us_W, gs_W, found], us_W, [float(momentum)], NESTEROV=nesterov, SUMMED=bool(sums_W))
    return found


def take(
    momenta: Sequence[Tensor], sums: Sequence[Tensor], inverses: Sequence[Tensor], rates: Sequence[Tensor]
) -> list[Tensor]:
    """See `Engine.momentum_steps`."""
    steps = [torch.empty_like(m, memory_format=torch.contiguous_format) for m in momenta]
    lists = [[x[None] for x in xs] for xs in (momenta, sums, inverses, steps)]
    _launch(_take, lists, lists[0], [], np.array([[rate.data_ptr() for rate in rates]], np.int64))
    return steps


def _launch(
    kernel: object,
    lists: Sequence[Sequence[Tensor]],
    like_W: Sequence[Tensor],
    numbers: Sequence[float],
    more: np.ndarray | None = None,
    **constants: bool,
) -> None:
    rows = [[contiguous(in_rows(x_W)) for x_W in xs_W] for xs_W in lists]
    where = np.concatenate([addresses(own_W) for own_W in rows])
    lengths = [x_W.shape[1] for x_W in rows[0]]
    given = np.concatenate([where, np.zeros((0, len(lengths)), np.int64) if more is None else more, [lengths]])
    there, size = like_W[0].device, slice_size(SLICED.value)
    parts = parts_on(tuple(-(-n // size) for n in lengths), size, there)
    of = (upload(torch.from_numpy(given), there), len(lengths), parts)
    constants["ALIGNED"] = aligned(where, torch.float32)
    launch(kernel, (len(parts), len(like_W[0])), there, *of, *numbers, **constants)


@triton.jit
def _own(parts):  # type: ignore[no-untyped-def]
    """Tensor, first coordinate, offsets of the coordinates, and worker of a program."""
    p = tl.program_id(0)
    j, exists = places(SLICED)
    begin = tl.multiple_of(tl.load(parts + 2 * p + 1), 16)
    return tl.load(parts + 2 * p), begin, j, exists, tl.program_id(1).to(tl.int64), tl.num_programs(1)


@triton.jit
def _add(  # type: ignore[no-untyped-def]
    given, T, parts, momentum, NESTEROV: tl.constexpr, SUMMED: tl.constexpr, ALIGNED: tl.constexpr
):
    t, begin, j, exists, w, W = _own(parts)
    n = tl.load(given + 3 * W * T + t)
    at = row_at(given, w, T, t, tl.float32, ALIGNED) + begin + j
    out = row_at(given, 2 * W + w, T, t, tl.float32, ALIGNED) + begin + j
    u = read_slice(at, begin, j, n, exists, SLICED)
    g = read_slice(row_at(given, W + w, T, t, tl.float32, ALIGNED) + begin + j, begin, j, n, exists, SLICED)
    if NESTEROV and SUMMED:
        u = (u + g) * momentum
    else:
        u = u * momentum + g
    write_slice(at, u, begin, j, n, exists, SLICED)
    if SUMMED:
        v = read_slice(out, begin, j, n, exists, SLICED) + u
        if NESTEROV:
            v = v + g
        write_slice(out, v, begin, j, n, exists, SLICED)
    elif NESTEROV:
        write_slice(out, tl.fma(u, tl.full(u.shape, momentum, u.dtype), g), begin, j, n, exists, SLICED)


@triton.jit
def _take(given, T, parts, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    t, begin, j, exists, _, _ = _own(parts)
    n, rate = tl.load(given + 5 * T + t), tl.load(tl.load(given + 4 * T + t).to(tl.pointer_type(tl.float32)))
    m = read_slice(row_at(given, 1, T, t, tl.float32, ALIGNED) + begin + j, begin, j, n, exists, SLICED)
    inverse = read_slice(row_at(given, 2, T, t, tl.float32, ALIGNED) + begin + j, begin, j, n, exists, SLICED)
    m = tl.where(inverse == 0, m * 0, m)
    write_slice(row_at(given, 0, T, t, tl.float32, ALIGNED) + begin + j, m, begin, j, n, exists, SLICED)
    out = row_at(given, 3, T, t, tl.float32, ALIGNED) + begin + j
    write_slice(out, m * inverse * rate, begin, j, n, exists, SLICED)
