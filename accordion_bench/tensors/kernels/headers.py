"""The float32 of every bucket, in front of its tensor's codes; bytes, since a message may begin anywhere."""

import numpy as np

from accordion_bench.tensors.kernels.compiled import bits_of, compiled, f32, float_of, u8, u32
from accordion_bench.tensors.kernels.table import BUCKET, HEADER


@compiled
def write_headers(scales, rows, message):  # type: ignore[no-untyped-def]
    """Scales [W, M] into the messages [W, B]."""
    for w in range(len(message)):
        for t in range(len(rows) - 1):
            for b in range(rows[t + 1, BUCKET] - rows[t, BUCKET]):
                bits = bits_of(scales[w, rows[t, BUCKET] + b])
                out = message[w, rows[t, HEADER] + 4 * b :][:4]
                for byte in range(4):
                    out[byte] = u8(bits >> u32(8 * byte))


@compiled
def read_headers(message, rows, alpha):  # type: ignore[no-untyped-def]
    """Scales [A, M] of messages [A, B], times alpha."""
    scales = np.empty((len(message), rows[-1, BUCKET]), np.float32)
    for a in range(len(message)):
        for t in range(len(rows) - 1):
            for b in range(rows[t + 1, BUCKET] - rows[t, BUCKET]):
                own, bits = message[a, rows[t, HEADER] + 4 * b :][:4], u32(0)
                for byte in range(4):
                    bits |= u32(own[byte]) << u32(8 * byte)
                scales[a, rows[t, BUCKET] + b] = float_of(bits) * f32(alpha)
    return scales
