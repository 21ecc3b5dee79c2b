"""A step after which all processes do the same, although no message travels with every step."""

import time
from collections.abc import Callable

from accordion_bench.processes.sealed_store import SealedStore, whole_number

LOOK = 0.2  # seconds between two looks into the store
CROWD = 200  # processes that look that often; of more of them each looks less often, so that the store can serve them
GO, LAST = "go", "last"


class AgreedStep:
    """A process asks in the store, which all read a few times per second; how long steps take is not foreseen.

    The store holds the highest step that any process has gone on to since it was asked. Nobody goes on without reading
    it, and raising it where it is lower. When all have read the question, that step is declared the last one, in one
    atomic exchange: nobody is beyond it, everybody reads it before going beyond it, and nobody has waited for anybody.

    Where processes exchange something in every step, all of them reach that step within `LOOK` and four steps, as long
    as steps are then: a step to notice, `LOOK` and a step until all have read the question, two steps to the last one.
    If all processes want it at once, as after a signal to all, two steps do. With local steps those come on top by
    which the slowest process is behind the fastest one. With more than `CROWD` processes `LOOK` grows in proportion.

    Args:
        name: of what is done then.
        store: of the run; None with one process.
    """

    def __init__(self, name: str, store: SealedStore | None = None) -> None:
        self.name, self.store = name, store
        self._round = 0  # steps that have been agreed on and are over
        self._asked = False  # and this process knows it
        self._last: int | None = None  # the step
        self._next_look = 0.0

    def due(self, step: int, wanted: Callable[[], bool]) -> bool:
        """Whether this is the step; call it after every step, in every process.

        Args:
            step: steps taken.
            wanted: whether this process asks for it; called after every step until somebody has.
        """
        if self.store is None:
            return wanted()
        if self._last is None and (self._asked or wanted() or self._hears(self.store)):
            self._go_on(self.store, step)
        if self._last is None or step < self._last:
            return False
        self._round, self._asked, self._last = self._round + 1, False, None
        return True

    @property
    def _key(self) -> str:
        return f"{self.name}-{self._round}"

    def _hears(self, store: SealedStore) -> bool:
        """Whether another process has asked."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK * max(1.0, store.processes / CROWD)
        return store.read(self._key, _state) is not None

    def _go_on(self, store: SealedStore, step: int) -> None:
        """Go on to the next step with the others' knowledge, or learn which one is the last."""
        found = store.replace(self._key, "", f"{GO} {step + 1}", _state)  # asks, unless another process has
        while found is not None and found[0] == GO and found[1] <= step:
            found = store.replace(self._key, f"{GO} {found[1]}", f"{GO} {step + 1}", _state)
        if not self._asked:
            self._asked = True
            if store.add(f"{self._key}-asked", 1) >= store.processes:
                while found is not None and found[0] == GO:
                    found = store.replace(self._key, f"{GO} {found[1]}", f"{LAST} {found[1]}", _state)
        if found is not None and found[0] == LAST:
            if found[1] >= step:
                self._last = found[1]
            else:
                store.distrust(self._key, f"is step {found[1]}, which is over")


def _state(text: str) -> tuple[str, int]:
    """What the store holds: `go` and the highest step that any process has gone on to, or `last` and the step."""
    word, _, step = text.partition(" ")
    if word not in (GO, LAST):
        raise ValueError(text)
    return word, whole_number(step)
