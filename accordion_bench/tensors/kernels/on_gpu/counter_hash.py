"""Random numbers of `keyed_rng` inside kernels."""

import triton
import triton.language as tl

from accordion_bench.tensors import keyed_rng

BLOCK = tl.constexpr(keyed_rng.BLOCK)
assert keyed_rng.BLOCK & (keyed_rng.BLOCK - 1) == 0


@triton.jit
def block_key(stream, block):  # type: ignore[no-untyped-def]
    """Word and odd factor of a block of a stream; see `keyed_rng.blocks_of`."""
    z = (stream + block.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z & 0xFFFFFFFF).to(tl.uint32), ((z >> 32) & 0xFFFFFFF8).to(tl.uint32) | 5


@triton.jit
def draw(lanes, stream, begin, j, exists, BITS: tl.constexpr, WITHIN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Random integers below 2^BITS, as float32, for coordinates begin + j within one block (WITHIN) or two."""
    first = begin // BLOCK
    word, odd = block_key(stream, first)
    if WITHIN:
        lane = tl.multiple_of((begin % BLOCK).to(tl.int32), 8) + j
        own = tl.load(lanes + lane).to(tl.uint32, bitcast=True)
        hashed = (own ^ word) * odd
    else:
        lane = (begin % BLOCK).to(tl.int32) + j
        next_word, next_odd = block_key(stream, first + 1)
        beyond = lane >= BLOCK
        own = tl.load(lanes + (lane & (BLOCK - 1)), mask=exists, other=0).to(tl.uint32, bitcast=True)
        hashed = (own ^ tl.where(beyond, next_word, word)) * tl.where(beyond, next_odd, odd)
    return (hashed >> (32 - BITS)).to(tl.int32).to(tl.float32)
