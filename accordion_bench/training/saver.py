"""Decide when a run saves a checkpoint: equally in all processes, without waiting in a step."""

import time

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.sealed_store import AgreedStep, SealedStore
from accordion_bench.run_config import CheckpointConfig

SHARE = 0.02  # maximum share of the run's time for saving at ends of epochs
FIRST = 0.1  # seconds that the first save is assumed to take


class Saver:
    """Schedule of checkpoints by the options of `checkpoint`; none is saved if some state cannot be (`resumable`).

    If no number of steps is configured, the state is saved at the end of an epoch, provided that the last save took at
    most `SHARE` of the time since then. In any case it is saved after the configured minutes and at the end of the run.
    """

    def __init__(
        self, options: CheckpointConfig, comm: Comm, store: SealedStore | None, resumable: bool = True
    ) -> None:
        self.comm, self.every, self.keep = comm, options.every, options.keep
        self.resumable, self.off = resumable, not resumable or options.every == 0
        alone = store is None and comm.processes > 1  # without a store the processes cannot agree on a step
        self._patience = 60 * options.minutes * (not self.off and not alone)  # seconds; 0 = no saving by time
        self._agreed = AgreedStep("save", store)
        self._step: int | None = None  # step at which the state was last saved or loaded
        self._took = FIRST
        self._since = time.monotonic()

    def begin(self, step: int) -> None:
        """Start, or continue after a step whose state is saved."""
        self._step, self._since = step, time.monotonic()

    def due_after_step(self, step: int) -> bool:
        """Whether to save after this step within an epoch; call it after every step. See `AgreedStep.due`."""
        timed = self._patience > 0 and self._agreed.due(step, self._late)
        return timed or bool(self.every and step % self.every == 0)

    def due_after_epoch(self, step: int, last: bool) -> bool:
        """Whether to save at the end of an epoch's steps. Every process must call it, while the clock is paused."""
        if self.off or step == self._step or (self.every and not last):
            return False
        return last or self.comm.gather_objects(self._since + self._took / SHARE <= time.monotonic())[0]

    def saved(self, step: int, began: float) -> None:
        """Note that the state after a step was saved; `began` is the start of saving by `time.monotonic()`."""
        self._step, self._since = step, time.monotonic()
        self._took = self._since - began

    def _late(self) -> bool:
        return time.monotonic() >= self._since + self._patience
