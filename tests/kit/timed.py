"""A clock whose time somebody else tells: what steps take is typed, not measured."""

from accordion_bench.comm.clock import ExchangeKind
from accordion_bench.comm.collectives import Comm

GRADIENTS = ExchangeKind("gradient", 1)


class Told:
    """One process with one worker, past its first step.

    Attributes:
        now: seconds.
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
        """Compute, exchange one bucket in no time, update."""
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
        """The end of an epoch."""
        self.lap("policy", seconds)
        self.clock.event("end of epoch")
        self.clock.step_over()
