"""Tensors for engines.

Most are small whole numbers times a power of two: sums of their magnitudes and squares have no rounding in float64, in
any order, so that norms are equal to the bit, and with them everything that hangs on norms.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket
from accordion_bench.plan import TensorSpec

SHORT = (1, 7, 0, 8, 9, 39, 40, 41)
LENGTHS = (*SHORT, 4095, 4096, 4097, 20481)
NUMBERS = [0, 3, 4, 9]  # of local workers
ULP = torch.finfo(torch.float32).eps
SPECIAL = (
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    2.0**-127,
    -(2.0**-126),
    1.0,
    -1.0,
    0.5,
    2.0**-7,
    3.0 * 2.0**-8,
    -(2.0**63),
    2.0**-64,
)


def whole_numbers(
    lengths: Sequence[int], workers: int, dtype: torch.dtype = torch.float32, seed: int = 1
) -> list[Tensor]:
    """Rows [W, N], heavy-tailed, with ties and zeros."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(workers, n, generator=generator) ** 3 * 100 for n in lengths]
    return [(x_W.clamp(-1000, 1000).round() * 2.0**-10).to(dtype) for x_W in drawn]


def any_numbers(lengths: Sequence[int], workers: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Rows [W, N] of different sizes, with zeros, denormals, ties and powers of two among them."""
    generator = torch.Generator().manual_seed(2)
    rows_W = [torch.randn(workers, n, generator=generator) * 10.0 ** -(t % 4) for t, n in enumerate(lengths)]
    for x_W in rows_W:
        special = torch.tensor(SPECIAL)[: x_W.shape[1] // 2]
        x_W[:, : len(special)] = special
    return [x_W.to(dtype) for x_W in rows_W]


def apart(rows_W: list[Tensor]) -> list[Tensor]:
    """As they are."""
    return rows_W


def side_by_side(rows_W: list[Tensor]) -> list[Tensor]:
    """The same in one block [W, ...], where rows are strided."""
    return list(torch.cat(rows_W, dim=1).split([x_W.shape[1] for x_W in rows_W], dim=1))


def every_second(rows_W: list[Tensor]) -> list[Tensor]:
    """The same, coordinates apart."""
    return [torch.stack([x_W, x_W], dim=2)[:, :, 1] for x_W in rows_W]


LAID = [apart, side_by_side, every_second]


def bucket_of(rows_W: list[Tensor], shapes: Sequence[tuple[int, ...]] = ()) -> Bucket:
    """A bucket of these tensors, of one dimension if nothing else is said."""
    shapes = shapes or [(x_W.shape[1],) for x_W in rows_W]
    specs = [TensorSpec(f"t{t}", shape) for t, shape in enumerate(shapes)]
    workers = NUMBERS[: len(rows_W[0])]
    return Bucket(2, specs, [1] * len(specs), 5, xs_W=rows_W, workers=workers)


def ulps(found: Tensor, expected: Tensor) -> int:
    """The largest distance of two tensors of float32, NaN equal to NaN."""
    bits = [x.float().nan_to_num(nan=1e30).view(torch.int32).long() for x in (found, expected)]
    ordered = [torch.where(own < 0, -(own & 0x7FFFFFFF), own) for own in bits]
    return int((ordered[0] - ordered[1]).abs().max()) if found.numel() else 0
