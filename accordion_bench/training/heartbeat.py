"""A word at least every ten seconds, where the output is no terminal: a silent job looks like one that hangs."""

import threading
import time

PATIENCE = 9.5  # seconds without a word


class Heartbeat:
    """Says what is going on when nothing else has been printed for a while.

    Args:
        shown: whether it says anything at all.
        what: is going on at first.
    """

    def __init__(self, shown: bool, what: str) -> None:
        self.what = what
        self._said = self._since = time.monotonic()
        self._end, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat, daemon=True) if shown else None

    def __enter__(self) -> "Heartbeat":
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    @property
    def silent(self) -> float:
        """Seconds since the last word."""
        return time.monotonic() - self._said

    def now(self, what: str) -> None:
        """Something else is going on from now on."""
        self.what, self._since = what, time.monotonic()

    def say(self, line: str) -> None:
        """One line, whole and at once."""
        with self._lock:
            self._said = time.monotonic()
            print(line, flush=True)

    def _beat(self) -> None:
        while not self._end.wait(max(PATIENCE - self.silent, 0.05)):
            if self.silent >= PATIENCE:
                self.say(f"still {self.what}, for {time.monotonic() - self._since:.0f} s")
