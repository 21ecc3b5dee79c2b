"""Signs as bits."""

import numpy as np

from accordion_bench.tensors.kernels.compiled import array_at, bits_of, compiled, f32, owner, u8, u32, u64
from accordion_bench.tensors.kernels.table import CODES, TILE, N, Table
from accordion_bench.tensors.kernels.threads import over_tiles


def encode_signs(addresses: np.ndarray, table: Table, message: np.ndarray, like: np.ndarray) -> np.ndarray:
    """One bit per coordinate into the messages [W, B], 1 = negative; whether each tensor is finite, bool [W, T]."""
    finite = np.empty((len(addresses), table.tiles), np.bool_)
    over_tiles(_encode_signs, finite.size, addresses, table.rows, table.tile, message, like, finite)
    out = np.ones((len(addresses), len(table.rows) - 1), bool)
    for w, t in zip(*np.nonzero(~finite), strict=True):
        out[w, np.searchsorted(table.rows[1:, TILE], t, side="right")] = False
    return out


@compiled
def _encode_signs(addresses, rows, tile, message, like, finite, first, last):  # type: ignore[no-untyped-def]
    t, tiles = 0, finite.shape[1]
    for number in range(first, last):
        w, own = number // tiles, number % tiles
        t = owner(rows, TILE, own, t)
        begin = (own - rows[t, TILE]) * tile
        end = min(begin + tile, rows[t, N])
        x = array_at(addresses[w, t], rows[t, N], like)[begin:end]
        at = rows[t, CODES] + begin // 8
        pack_signs(x, message[w, at : at + (end - begin + 7) // 8])
        finite[w, own] = all_finite(x)


@compiled
def pack_signs(x, out):  # type: ignore[no-untyped-def]
    whole = x.size // 64
    for g in range(whole):
        v, word = x[64 * g : 64 * g + 64], u64(0)
        for k in range(64):
            word |= u64(v[k] < 0) << u64(k)
        o = out[8 * g : 8 * g + 8]
        for byte in range(8):
            o[byte] = u8(word >> u64(8 * byte))
    for g in range(8 * whole, out.size):
        v, byte = x[8 * g : min(8 * g + 8, x.size)], u8(0)
        for k in range(v.size):
            byte |= u8(v[k] < 0) << u8(k)
        out[g] = byte


@compiled
def all_finite(x):  # type: ignore[no-untyped-def]
    infinite, bad = u32(0x7F800000), u32(0)
    for i in range(x.size):
        bad |= u32(bits_of(f32(x[i])) & infinite == infinite)
    return bad == 0
