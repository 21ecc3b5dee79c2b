"""Norms of buckets on a CPU: sums of magnitudes, squares, coordinates and negative ones, counts, largest magnitudes.

Sums are accumulated in float64.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.kernels.compiled import array_at, bits_of, compiled, f32, f64, float_of, owner, summing
from accordion_bench.tensors.kernels.dense_kernels import NORMS, Coordinates, array_like
from accordion_bench.tensors.kernels.table import BUCKET, LONGEST, PIECE, SIZE, N, Table, over_tiles

L1, L2, LINF, SUM, BELOW, COUNT = range(len(NORMS))


def bucket_norms(x: Coordinates, table: Table, kinds: Sequence[str]) -> list[Tensor]:
    """See `DenseKernels.bucket_norms`; reads coordinates once per kind."""
    out = np.empty((len(kinds), len(x.addresses), table.buckets))
    parts = np.empty((len(x.addresses), table.pieces))
    for own, kind in zip(out, map(NORMS.index, kinds), strict=True):
        over_tiles(_sum_pieces, parts.size, x.addresses, table.rows, kind, array_like(x.like), parts)
        _join_pieces(table.rows, kind, parts, own)
    return list(torch.from_numpy(out))


@compiled
def _sum_pieces(addresses, rows, kind, like, parts, first, last):  # type: ignore[no-untyped-def]
    t, pieces = 0, parts.shape[1]
    for number in range(first, last):
        w, p = number // pieces, number % pieces
        t = owner(rows, PIECE, p, t)
        per_bucket = (rows[t, SIZE] + LONGEST - 1) // LONGEST
        bucket, part = (p - rows[t, PIECE]) // per_bucket, (p - rows[t, PIECE]) % per_bucket
        end = min((bucket + 1) * rows[t, SIZE], rows[t, N])
        start = min(bucket * rows[t, SIZE] + part * LONGEST, end)
        x = array_at(addresses[w, t], rows[t, N], like)[start : min(start + LONGEST, end)]
        if kind == L1:
            parts[w, p] = sum_of_magnitudes(x)
        elif kind == L2:
            parts[w, p] = sum_of_squares(x)
        elif kind == LINF:
            parts[w, p] = largest_magnitude(x)
        elif kind == SUM:
            parts[w, p] = sum_of(x)
        elif kind == BELOW:
            parts[w, p] = sum_below(x)
        else:
            parts[w, p] = count_below(x)


@compiled
def _join_pieces(rows, kind, parts, out):  # type: ignore[no-untyped-def]
    for w in range(len(parts)):
        for t in range(len(rows) - 1):
            per_bucket = (rows[t, SIZE] + LONGEST - 1) // LONGEST
            for bucket in range(rows[t + 1, BUCKET] - rows[t, BUCKET]):
                own = parts[w, rows[t, PIECE] + bucket * per_bucket :][:per_bucket]
                total = f64(0)
                for part in own:
                    # not (<=) propagates NaN
                    total = (part if not (part <= total) else total) if kind == LINF else total + part
                    if kind == LINF and total != total:
                        break
                out[w, rows[t, BUCKET] + bucket] = np.sqrt(total) if kind == L2 else total


@summing
def sum_of_magnitudes(x):  # type: ignore[no-untyped-def]
    total = f64(0)
    for i in range(x.size):
        total += f64(abs(f32(x[i])))
    return total


@summing
def sum_of_squares(x):  # type: ignore[no-untyped-def]
    total = f64(0)
    for i in range(x.size):
        total += f64(f32(x[i])) * f64(f32(x[i]))
    return total


@summing
def sum_of(x):  # type: ignore[no-untyped-def]
    total = f64(0)
    for i in range(x.size):
        total += f64(f32(x[i]))
    return total


@compiled
def largest_magnitude(x):  # type: ignore[no-untyped-def]
    """Largest magnitude by the bits of float32: their order is that of magnitudes, with NaN above infinity."""
    most = np.uint32(0)
    for i in range(x.size):
        most = max(most, bits_of(f32(x[i])) & np.uint32(0x7FFFFFFF))
    return f64(float_of(most))


@summing
def sum_below(x):  # type: ignore[no-untyped-def]
    total = f64(0)
    for i in range(x.size):
        total += f64(min(f32(x[i]), f32(0)))
    return total


@summing
def count_below(x):  # type: ignore[no-untyped-def]
    total = 0
    for i in range(x.size):
        total += x[i] < 0
    return f64(total)
