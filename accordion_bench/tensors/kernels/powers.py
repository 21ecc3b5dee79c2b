"""Random rounding to powers of two: the exponent of |x| plus a random mantissa; what carries, goes up."""

import numpy as np

from accordion_bench.tensors.kernels.compiled import bits_of, compiled, f32, u8, u32

MANTISSA = 23


@compiled
def round_to_powers(x, v, K, codes):  # type: ignore[no-untyped-def]
    """The code of the exponent: of float32 (K = 256), or 1 to 127 for 2^-63 to 2^63 and 0 for zero (K = 128).

    v are random integers below 2^23.
    """
    smallest = f32(2.0) ** f32(-63)
    for i in range(codes.size):
        magnitude = abs(f32(x[i]))
        exponent = np.int32((bits_of(magnitude) + u32(v[i])) >> u32(MANTISSA))
        if K == 256:
            codes[i] = u8(min(exponent, 254))
        else:  # below 2^-63: that or nothing
            up = v[i] < magnitude * (f32(2.0) ** f32(63 + MANTISSA))
            codes[i] = u8(up) if magnitude < smallest else u8(min(exponent - 63, 127))
