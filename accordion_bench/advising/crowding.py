"""From how many workers on a method no longer gathers messages, because an all-reduce is shorter."""

import math

from accordion_bench.compressors.sizes import payload_bytes
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.position import StepInfo

MOST = 4096  # workers that anybody asks for
LEAST = 0.005  # share of the messages that must change


def crowded_from(exchange: Exchange, info: StepInfo) -> float:
    """From how many workers on most of what is exchanged travels otherwise than among few; infinity = never.

    Messages of A workers are `fixed + shared / A` long, until compressors find an all-reduce of what they would decode
    to be shorter; then they are as long as the tensors. Halfway between is where most coordinates have changed.

    Args:
        exchange: of any number of workers.
        info: of a step.
    """
    levels, compressor = exchange.levels(info), exchange.compressor

    def declared(workers: int) -> float:
        pairs = zip(exchange.sent, levels, strict=True)
        return sum(payload_bytes(compressor, spec, level, workers) for spec, level in pairs)

    two, three = declared(2), declared(3)
    shared = 6 * (two - three)  # of fixed + shared / A, from both
    if shared < 0:
        return 3.0

    def change(workers: int) -> float:
        return abs(declared(workers) - (two - shared / 2 + shared / workers))

    whole = change(MOST)
    if whole < LEAST * two:
        return math.inf
    below, above = 3, MOST
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if change(middle) >= whole / 2 else (middle, above)
    return float(above)
