"""A clock with a given time instead of a measured one, for tests of step times."""

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.stages import ExchangeKind

GRADIENTS = ExchangeKind("gradient", 1)


class Told:
    """Clock of one process with one worker, after its first step.

    Attributes:
        now: current time in seconds.
    """

    def __init__(self) -> None:
        self.comm, self.now = Comm(1), 0.0
        self.clock = self.comm.clock
        self.clock.mark = lambda: self.now
        self.clock.start()
        self.clock.warm = True

    def lap(self, part, seconds):
        self.now += seconds
        self.clock.lap(part)

    def step(
        self, compute=1.0, encode=0.0, decode=0.0, update=0.1, samples=32, payload=1000, exchanges=True, batch=None
    ):
        """Record a step: compute, exchange one bucket in zero time, update."""
        clock = self.clock
        clock.in_force(batch or samples, payload)
        clock.worker()
        self.lap("compute", compute)
        if exchanges:
            clock.waits(GRADIENTS)
            with clock.exchanging(GRADIENTS, 0, self.comm.ledger):
                self.now += encode
                clock.collective(clock.mark())
                self.now += decode
            clock.lap("exposed")
        self.lap("update", update)
        clock.step_over(samples)

    def decide(self, seconds=0.01):
        """Record the end of an epoch."""
        self.lap("policy", seconds)
        self.clock.event("end of epoch")
        self.clock.step_over()
