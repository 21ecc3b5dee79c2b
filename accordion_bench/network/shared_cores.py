"""A step whose two threads share the cores of a worker: one computes, the other encodes, sends and decodes.

Each thread has a demand: one core for computing and for codecs; for a collective, the processor time that it takes over
the time that it lasts. Cores are shared max-min fairly, as operating systems do; a thread that gets less than its
demand is slower by that factor. With two cores for each worker this is `Network.end`.
"""

import math
from collections.abc import Sequence

from accordion_bench.comm.clock import Stage
from accordion_bench.network.link_model import Network

LEAST = 1e-12  # seconds, below which work is over


def step_ends(
    network: Network, buckets: Sequence[Stage], workers: int, backward: float, cores: float = math.inf
) -> tuple[float, float]:
    """(When the backward pass is over, when the last bucket has been decoded), from the start of the step.

    Args:
        network: over which buckets travel.
        buckets: in their order; `ready` is when they would be ready if nothing else took the cores.
        workers: that take part.
        backward: seconds that forward and backward pass take, alone.
        cores: of each worker; below 1 where workers share one.
    """
    threads = _Threads(backward, cores)
    idle_since, tokens = 0.0, network.burst
    for bucket in buckets:
        threads.wait_for(bucket.ready)
        threads.work(bucket.encode, 1.0)
        tokens = min(network.burst, tokens + (threads.now - idle_since) * network.bandwidth / 8)
        seconds = network.of_bucket(bucket, workers, tokens)
        threads.work(seconds, min(1.0, network.processor_seconds(bucket) / seconds) if seconds else 0.0)
        idle_since, tokens = threads.now, max(0.0, tokens - network.carried(bucket, workers))
        threads.work(bucket.decode, 1.0)
    end = threads.now
    threads.wait_for(backward)
    return threads.backward_over, end


class _Threads:
    """The computing thread, which never waits, and the exchange's, at its time `now`."""

    def __init__(self, backward: float, cores: float) -> None:
        self.backward, self.cores = backward, cores
        self.now = self.computed = 0.0
        self.backward_over = 0.0 if backward <= LEAST else math.inf

    def wait_for(self, ready: float) -> None:
        """The exchange idles until so much is computed; what lies beyond the backward pass is time that passes."""
        if self.computed < min(ready, self.backward) - LEAST:
            self._compute((min(ready, self.backward) - self.computed) / min(1.0, self.cores), min(1.0, self.cores))
        if ready > self.backward:
            self.now = max(self.now, self.backward_over + ready - self.backward)

    def work(self, seconds: float, demand: float) -> None:
        """The exchange does something, beside the other thread."""
        while seconds > LEAST:
            computes = self.computed < self.backward - LEAST
            own, other = fair_rates(1.0 if computes else 0.0, demand, self.cores)
            lasts = seconds / other
            if computes:
                lasts = min(lasts, (self.backward - self.computed) / own)
            seconds -= other * lasts
            self._compute(lasts, own if computes else 0.0)

    def _compute(self, lasts: float, rate: float) -> None:
        self.now += lasts
        self.computed += rate * lasts
        if self.computed >= self.backward - LEAST and self.backward_over == math.inf:
            self.backward_over = self.now


def fair_rates(one: float, other: float, cores: float) -> tuple[float, float]:
    """How fast two threads are, 1 = as if alone: cores are shared max-min fairly.

    Args:
        one, other: their demands, in cores; 0 = it needs none.
        cores: to share.
    """
    if one + other <= cores:
        return 1.0, 1.0
    least = min(one, other, cores / 2)
    most = cores - least
    first, second = (least, most) if one <= other else (most, least)
    return min(1.0, first / one) if one else 1.0, min(1.0, second / other) if other else 1.0
