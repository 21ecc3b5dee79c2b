"""When a run saves its state; all processes decide alike, and none waits for it in a step."""

import time

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.sealed_store import AgreedStep, SealedStore
from accordion_bench.run_config import CheckpointConfig

SHARE = 0.02  # of a run's time that saving at the ends of epochs may take
FIRST = 0.1  # seconds that the first one is expected to take


class Saver:
    """Without a number of steps the state is saved at the ends of epochs, where the last time took at most `SHARE` of
    the time since then; in any case after so many minutes, and at the end of the run.

    Args:
        options: the configuration's.
        comm: of all workers.
        store: of the run, which the processes share; None with one process.
        resumable: false: there is state that cannot be saved.
    """

    def __init__(
        self, options: CheckpointConfig, comm: Comm, store: SealedStore | None, resumable: bool = True
    ) -> None:
        self.comm, self.every, self.keep = comm, options.every, options.keep
        self.resumable, self.off = resumable, not resumable or options.every == 0
        alone = store is None and comm.processes > 1  # nothing to agree by
        self._patience = 60 * options.minutes * (not self.off and not alone)  # seconds; 0 = no clock decides
        self._agreed = AgreedStep("save", store)
        self._step: int | None = None  # after which the state was saved, or loaded
        self._took = FIRST
        self._since = time.monotonic()

    def begin(self, step: int) -> None:
        """Training begins, or goes on after a step that is saved."""
        self._step, self._since = step, time.monotonic()

    def due_after_step(self, step: int) -> bool:
        """Whether to save now, in mid-epoch; call it after every step. See `AgreedStep.due`."""
        timed = self._patience > 0 and self._agreed.due(step, self._late)
        return timed or bool(self.every and step % self.every == 0)

    def due_after_epoch(self, step: int, last: bool) -> bool:
        """Whether to save at the end of an epoch's steps; every process calls it, in no measured time."""
        if self.off or step == self._step or (self.every and not last):
            return False
        return last or self.comm.everyones(self._since + self._took / SHARE <= time.monotonic())[0]

    def saved(self, step: int, began: float) -> None:
        """The state has been saved after a step; it was begun then, on the clock of `time.monotonic`."""
        self._step, self._since = step, time.monotonic()
        self._took = self._since - began

    def _late(self) -> bool:
        return time.monotonic() >= self._since + self._patience
