"""A pseudo-terminal of a given width: the output of a program, and the text that remains on the screen."""

import contextlib
import fcntl
import os
import pty
import struct
import termios
import threading
from collections.abc import Iterator


class Terminal:
    """Pseudo-terminal whose other end is read while it is open.

    Args:
        columns: width; 0 = the terminal does not report a width.

    Attributes:
        descriptor: file descriptor for the program.
    """

    def __init__(self, columns: int) -> None:
        self.columns, self._drawn = columns, bytearray()
        self._other, self.descriptor = pty.openpty()
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the terminal has been closed on all sides
            while some := os.read(self._other, 4096):
                self._drawn += some

    def close(self) -> None:
        """Close the terminal after the program has ended, and read the rest of its output."""
        os.close(self.descriptor)
        self._reader.join(10)
        os.close(self._other)

    @property
    def drawn(self) -> str:
        """Return the whole output, in order."""
        return self._drawn.decode()

    @property
    def drawings(self) -> list[str]:
        """Return the texts between carriage returns or line ends, stripped of blanks."""
        return [text.strip() for text in self.drawn.replace("\n", "\r").split("\r")]

    @property
    def lines(self) -> list[str]:
        """Return the lines that remain on the screen and above it."""
        return list(self._lines())

    def _lines(self) -> Iterator[str]:
        for line in self.drawn.replace("\r\n", "\n").split("\n"):
            cells: list[str] = []
            for part in line.split("\r"):
                cells[: len(part)] = part
            yield "".join(cells).rstrip()
