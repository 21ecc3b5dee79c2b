"""Print a line at least every ten seconds if there is no terminal, so that a silent job does not seem to hang."""

import threading
import time

PATIENCE = 9.5  # seconds without output


class Heartbeat:
    """Prints the current activity when nothing else has been printed for a while.

    Args:
        shown: whether to print.
        what: initial activity, as a clause.
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
        """Seconds since the last line."""
        return time.monotonic() - self._said

    def now(self, what: str) -> None:
        """Set the current activity."""
        self.what, self._since = what, time.monotonic()

    def say(self, line: str) -> None:
        """Print one line atomically."""
        with self._lock:
            self._said = time.monotonic()
            print(line, flush=True)

    def _beat(self) -> None:
        while not self._end.wait(max(PATIENCE - self.silent, 0.05)):
            if self.silent >= PATIENCE:
                self.say(f"still {self.what}, for {time.monotonic() - self._since:.0f} s")
