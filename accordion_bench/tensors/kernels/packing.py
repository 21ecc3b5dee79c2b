"""Packing and unpacking of the codes of a tile on a CPU, in the format of `codecs.packed_codes`."""

from accordion_bench.tensors.kernels.compiled import compiled, u8, u32, u64


@compiled
def width_of(K):  # type: ignore[no-untyped-def]
    """Return the number of bits of a code below K; ternary codes are an exception."""
    width = 1
    while (1 << width) < K:
        width += 1
    return width


@compiled
def packed_bytes(n, K):  # type: ignore[no-untyped-def]
    """Return the number of bytes of n codes below K."""
    if K == 3:
        return (n + 4) // 5
    width = width_of(K)
    if 8 % width == 0:
        return (n + 8 // width - 1) // (8 // width)
    return width * ((n + 7) // 8)


@compiled
def pack(codes, n, K, out):  # type: ignore[no-untyped-def]
    """Pack the first n codes; the buffer must have 39 more codes, which are overwritten with zeros."""
    for i in range(n, n + 39):
        codes[i] = u8(0)
    width = width_of(K)
    if K == 3:
        for g in range(out.size):
            c = codes[5 * g : 5 * g + 5]
            out[g] = c[0] + u8(3) * c[1] + u8(9) * c[2] + u8(27) * c[3] + u8(81) * c[4]
    elif width == 1:
        for g in range(out.size):
            c, byte = codes[8 * g : 8 * g + 8], u8(0)
            for k in range(8):
                byte |= c[k] << u8(k)
            out[g] = byte
    elif width == 2:
        for g in range(out.size):
            c = codes[4 * g : 4 * g + 4]
            out[g] = c[0] | c[1] << u8(2) | c[2] << u8(4) | c[3] << u8(6)
    elif width == 3:
        for g in range(out.size // 3):
            c, word = codes[8 * g : 8 * g + 8], u32(0)
            for k in range(8):
                word |= u32(c[k]) << u32(3 * k)
            o = out[3 * g : 3 * g + 3]
            o[0], o[1], o[2] = u8(word), u8(word >> u32(8)), u8(word >> u32(16))
    elif width == 4:
        for g in range(out.size):
            c = codes[2 * g : 2 * g + 2]
            out[g] = c[0] | c[1] << u8(4)
    elif width == 8:
        for g in range(out.size):
            out[g] = codes[g]
    else:
        for g in range(out.size // width):
            c, word = codes[8 * g : 8 * g + 8], u64(0)
            for k in range(8):
                word |= u64(c[k]) << u64(width * k)
            o = out[width * g : width * g + width]
            for byte in range(width):
                o[byte] = u8(word >> u64(8 * byte))


@compiled
def unpack(message, K, codes):  # type: ignore[no-untyped-def]
    """Unpack all codes in the bytes; inverse of `pack`."""
    width = width_of(K)
    if K == 3:
        for g in range(message.size):
            c, byte = codes[5 * g : 5 * g + 5], u32(message[g])
            for k in range(5):
                c[k] = u8(byte % u32(3))
                byte //= u32(3)
    elif width == 1:
        every, own = u64(0x0101010101010101), u64(0x8040201008040201)  # a byte eight times, its bit k in byte k
        for g in range(message.size):
            c, spread = codes[8 * g : 8 * g + 8], u64(message[g]) * every & own
            for k in range(8):
                c[k] = u8(u8(spread >> u64(8 * k)) != 0)
    elif width == 2:
        for g in range(message.size):
            c, byte = codes[4 * g : 4 * g + 4], message[g]
            for k in range(4):
                c[k] = (byte >> u8(2 * k)) & u8(3)
    elif width == 3:
        for g in range(message.size // 3):
            c, b = codes[8 * g : 8 * g + 8], message[3 * g : 3 * g + 3]
            word = u32(b[0]) | u32(b[1]) << u32(8) | u32(b[2]) << u32(16)
            for k in range(8):
                c[k] = u8((word >> u32(3 * k)) & u32(7))
    elif width == 4:
        for g in range(message.size):
            c, byte = codes[2 * g : 2 * g + 2], message[g]
            c[0], c[1] = byte & u8(15), byte >> u8(4)
    elif width == 8:
        for g in range(message.size):
            codes[g] = message[g]
    else:
        mask = u64((1 << width) - 1)
        for g in range(message.size // width):
            c, b, word = codes[8 * g : 8 * g + 8], message[width * g : width * g + width], u64(0)
            for byte in range(width):
                word |= u64(b[byte]) << u64(8 * byte)
            for k in range(8):
                c[k] = u8((word >> u64(width * k)) & mask)
