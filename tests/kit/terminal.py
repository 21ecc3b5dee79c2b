"""A terminal of some width: what a program has drawn on it, and what stays there."""

import contextlib
import fcntl
import os
import pty
import struct
import termios
import threading
from collections.abc import Iterator


class Terminal:
    """A pseudo-terminal whose other end is read as long as it is open.

    Args:
        columns: its width; 0 = it does not say.

    Attributes:
        descriptor: for the program.
    """

    def __init__(self, columns: int) -> None:
        self.columns, self._drawn = columns, bytearray()
        self._other, self.descriptor = pty.openpty()
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # nobody has the terminal open any more
            while some := os.read(self._other, 4096):
                self._drawn += some

    def close(self) -> None:
        """The program has ended, all that it has drawn is read."""
        os.close(self.descriptor)
        self._reader.join(10)
        os.close(self._other)

    @property
    def drawn(self) -> str:
        """All of it, in order."""
        return self._drawn.decode()

    @property
    def drawings(self) -> list[str]:
        """What was written from one return of the cursor to the next, without blanks at its ends; lines end such."""
        return [text.strip() for text in self.drawn.replace("\n", "\r").split("\r")]

    @property
    def lines(self) -> list[str]:
        """What stays on the screen and above it."""
        return list(self._lines())

    def _lines(self) -> Iterator[str]:
        for line in self.drawn.replace("\r\n", "\n").split("\n"):
            cells: list[str] = []
            for part in line.split("\r"):
                cells[: len(part)] = part
            yield "".join(cells).rstrip()
