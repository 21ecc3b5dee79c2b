"""Random rounding to powers of two: the exponent of |x| plus a random mantissa; what carries, goes up."""

import triton
import triton.language as tl

MANTISSA = tl.constexpr(23)


@triton.jit
def round_to_powers(x, v, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """The code of the exponent: of float32 (K = 256), or 1 to 127 for 2^-63 to 2^63 and 0 for zero (K = 128).

    v are random integers below 2^23.
    """
    smallest: tl.constexpr = 2.0**-63
    steps: tl.constexpr = 2.0**86
    magnitude = tl.abs(x)
    exponent = (magnitude.to(tl.int32, bitcast=True) + v.to(tl.int32)) >> MANTISSA
    if K == 256:
        return tl.minimum(exponent, 254)
    else:  # below 2^-63: that or nothing
        up = (v < magnitude * steps).to(tl.int32)
        return tl.where(magnitude < smallest, up, tl.minimum(exponent - 63, 127))
