"""Random numbers of `counter_rng` inside kernels."""

import numpy as np

from accordion_bench.tensors.counter_rng import lane_words
from accordion_bench.tensors.kernels.compiled import compiled, f32, u32, u64

LANES = lane_words()
_GOLDEN, _FIRST, _SECOND = u64(0x9E3779B97F4A7C15), u64(0xBF58476D1CE4E5B9), u64(0x94D049BB133111EB)


@compiled
def block_key(stream, block):  # type: ignore[no-untyped-def]
    """Word and odd factor of a block of a stream; see `counter_rng.blocks_of`."""
    z = (stream + u64(block) + u64(1)) * _GOLDEN
    z = (z ^ (z >> u64(30))) * _FIRST
    z = (z ^ (z >> u64(27))) * _SECOND
    z = z ^ (z >> u64(31))
    return u32(z & u64(0xFFFFFFFF)), u32(z >> u64(32) & u64(0xFFFFFFF8) | u64(5))


@compiled
def integer(lane, word, factor, shift):  # type: ignore[no-untyped-def]
    """Leading 32 - shift bits of a random word."""
    return u32(u32(lane ^ word) * factor) >> shift  # numba widens uint32 to 64 bits without the mask


@compiled
def draw(lanes, word, factor, bits, out):  # type: ignore[no-untyped-def]
    """Write random integers below 2^bits, as float32, for the first lanes of a block to out; bits at most 24."""
    shift = u32(32 - bits)
    for i in range(out.size):
        out[i] = f32(np.int32(integer(lanes[i], word, factor, shift)))
