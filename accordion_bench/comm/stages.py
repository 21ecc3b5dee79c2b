"""What the clock says of a run, in words that can be read without torch."""

from collections.abc import Mapping
from typing import NamedTuple

EXCLUSIVE = ("data", "compute", "exposed", "update", "policy")  # parts of the main thread's time, all of it
MATTERS = 0.01  # of the training time, from which outliers are told


class Stage(NamedTuple):
    """One bucket of the exchanges of one kind."""

    ready: float  # seconds from the start of a worker's step until its tensors were there; median
    # encode, decode: seconds of work before its last collective ended, and after; medians
    encode: float
    decode: float
    wire: float  # bytes that one worker sends; mean over exchanges and workers
    rounds: float  # of collectives, one after another; mean
    kinds: Mapping[str, tuple[float, float]] | None = None  # (wire, rounds) by kind of collective; None = not known

    @property
    def by_kind(self) -> Mapping[str, tuple[float, float]]:
        """(wire, rounds) by kind of collective; where it is not known, all of it as an all-reduce's."""
        return self.kinds or {"all_reduce": (self.wire, self.rounds)}
