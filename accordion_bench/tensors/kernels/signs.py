"""Signs as bits, least significant first; 1 = negative."""

from accordion_bench.tensors.kernels.compiled import bits_of, compiled, f32, u8, u32, u64


@compiled
def pack_signs(x, out):  # type: ignore[no-untyped-def]
    """Zeros of both signs are positive."""
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
    """Neither NaN nor infinity."""
    infinite, bad = u32(0x7F800000), u32(0)
    for i in range(x.size):
        bad |= u32(bits_of(f32(x[i])) & infinite == infinite)
    return bad == 0
