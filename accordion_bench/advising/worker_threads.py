"""The two threads of every worker, side by side: one computes, the other exchanges, and both share the worker's cores.

`network.shared_cores` for all workers at once, each at a time of its own; two threads with two cores share nothing.
"""

import math

import numpy as np

from accordion_bench.advising.random_steps import Array
from accordion_bench.network.link_model import fair_rates


class WorkerThreads:
    """Of one step; methods take the exchanging threads on in time, while the others compute.

    Args:
        begin: of each worker's step.
        backward: seconds of computing in it, alone.
        cores: of each worker; infinity = nothing is shared.

    Attributes:
        now: where each exchanging thread is.
        backward_over: when each worker has computed everything; infinity = not yet.
    """

    def __init__(self, begin: Array, backward: Array, cores: float = math.inf) -> None:
        self.now, self.cores = begin, cores
        self.left = backward  # seconds that are still to be computed
        self.backward_over = np.where(backward > 0, math.inf, begin)

    def wait_for(self, left: Array | float) -> None:
        """Idle until no more than so many seconds of computing are left."""
        rate = min(1.0, self.cores)
        self._pass(np.maximum(0.0, self.left - left) / rate, rate)

    def wait_until(self, then: float) -> None:
        """Idle until a moment."""
        self._pass(np.maximum(0.0, then - self.now), min(1.0, self.cores))

    def work(self, seconds: Array | float, demand: float = 1.0) -> None:
        """Do something that takes so many seconds alone, with so many cores."""
        computing, exchanging = fair_rates(1.0, demand, self.cores)
        _, alone = fair_rates(0.0, demand, self.cores)
        together = np.minimum(seconds / exchanging, self.left / computing)
        self._pass(together, computing)
        self.now = self.now + np.maximum(0.0, seconds - exchanging * together) / alone

    def _pass(self, lasts: Array, rate: float) -> None:
        """Time passes in which the others compute, at a rate of 1 if they are alone."""
        needed = self.left / rate
        ends = (needed <= lasts) & (self.left > 0)
        self.backward_over = np.where(ends, self.now + needed, self.backward_over)
        self.left = np.where(needed <= lasts, 0.0, self.left - rate * lasts)
        self.now = self.now + lasts
