"""Signs as bits."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.on_gpu.launch import TYPES, launch
from accordion_bench.tensors.kernels.on_gpu.packing import pack, places, slice_size
from accordion_bench.tensors.kernels.on_gpu.table import CODES, N, rows_on, slices_on
from accordion_bench.tensors.kernels.table import Table
from accordion_bench.tensors.upload import upload


def encode_signs(addresses: np.ndarray, table: Table, message: Tensor, like: Tensor) -> None:
    """One bit per coordinate into the messages [W, B], 1 = negative. One launch.

    Nobody is told here whether a tensor is finite: the exchange looks at all of them once per step.
    """
    there, (W, T) = message.device, addresses.shape
    slices = slices_on(table, slice_size(2), there)
    launch(
        _encode_signs,
        (len(slices), W),
        there,
        *(upload(torch.from_numpy(addresses), there), T, rows_on(table, there), slices, message, message.stride(0)),
        COLUMNS=table.rows.shape[1],
        TYPE=TYPES[like.dtype],
    )


@triton.jit
def _encode_signs(  # type: ignore[no-untyped-def]
    addresses, T, rows, slices, message, row_bytes, COLUMNS: tl.constexpr, TYPE: tl.constexpr
):
    w = tl.program_id(1).to(tl.int64)
    t, begin = tl.load(slices + 2 * tl.program_id(0)), tl.load(slices + 2 * tl.program_id(0) + 1)
    n = tl.load(rows + t * COLUMNS + N)
    j, exists = places(2)
    exists = exists & (begin + j < n)
    x = tl.load(addresses + w * T + t).to(tl.pointer_type(TYPE))
    negative = tl.load(x + begin + j, mask=exists, other=0) < 0
    codes = tl.load(rows + t * COLUMNS + CODES)
    pack(negative.to(tl.int32), exists, begin, n, 2, message + w * row_bytes + codes)
