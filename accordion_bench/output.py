"""What is printed: standard output and error that outlive their readers, say whose lines they are, and know a terminal.

A line of progress must cost no run. `protect` puts streams in the place of Python's that drop what is not taken: the
reader of a pipe has gone, the terminal has been closed, the disk is full, the descriptor was never open.
"""

import contextlib
import errno
import functools
import io
import logging
import os
import select
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TextIO

P = ParamSpec("P")
STANDARD = {1: "standard output", 2: "standard error"}
GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)  # the reader is gone: a pipe's other end, a terminal
DUMB = ("dumb", "unknown")  # values of TERM of a terminal that cannot move its cursor
# `unread`, as SIGPIPE ends others, and `unwritten`, where what is printed is all that was asked for
ANSWER = (128 + 13, 1)
_streams: dict[int, "_Descriptor"] = {}  # of this process, by descriptor
_goes_on = ""  # what does although a stream is lost


class _Descriptor(io.RawIOBase):
    """A standard stream's descriptor: what it refuses is dropped, and told once.

    Args:
        number: of the descriptor.

    Attributes:
        lost: the first error; None while all was taken.
        told: whether the user has read of it.
        named: stands in front of each line.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.lost: OSError | None = None
        self.told = False
        self.named = self._part = b""

    def fileno(self) -> int:
        return self.number

    def isatty(self) -> bool:
        return os.isatty(self.number)

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:  # type: ignore[override]
        """Write all of it; where lines have names, those that are whole, each at once, as pipes keep it."""
        given = bytes(data)
        if not self.named:
            self._put(given)
            return len(given)
        *whole, self._part = (self._part + given).split(b"\n")
        for line in whole:
            self._put(self.named + line + b"\n")
        return len(given)

    def name_lines(self, name: bytes) -> None:
        """Put a name in front of each line from now on; b"" = none."""
        if self._part:
            self._put(self.named + self._part)
        self.named, self._part = name, b""

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:  # a part would be lost where Python runs unbuffered
                try:
                    rest = rest[os.write(self.number, rest) :]
                except BlockingIOError:  # another program has made the pipe so
                    select.select([], [self.number], [])
        except OSError as error:
            if self.lost is None:
                self.lost = error
                _tell(self)


def protect() -> None:
    """Let this process's standard output and error outlive their readers; call it first of all.

    Descriptors that are closed lead to nowhere from now on, or the next file that is opened would get what is printed.
    Letters that a terminal does not know are written as their numbers. Streams that replace Python's keep theirs.
    """
    while (free := os.open(os.devnull, os.O_RDWR)) <= max(STANDARD):
        os.set_inheritable(free, True)
    os.close(free)
    sys.stdout, sys.stderr = _protected(sys.stdout, 1), _protected(sys.stderr, 2)


def _protected(stream: TextIO | None, number: int) -> TextIO:
    if stream is None:  # the descriptor was closed when Python started, and may be another file by now
        return open(os.devnull, "w", encoding="utf-8")
    own = (sys.__stdout__, sys.__stderr__)[number - 1]
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.reconfigure(errors="backslashreplace")
    if stream is not own:
        return stream
    _streams[number] = raw = _Descriptor(number)
    with contextlib.suppress(OSError):
        stream.flush()
    unbuffered = isinstance(stream.buffer, io.RawIOBase)
    below: Any = raw if unbuffered else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        below,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def command(main: Callable[P, int]) -> Callable[P, int]:
    """The main function of a command, which returns its exit status: with streams that outlive their readers.

    Example:
        @command
        def main(argv: list[str] | None = None) -> int: ...
    """

    @functools.wraps(main)
    def protected(*args: P.args, **kwargs: P.kwargs) -> int:
        protect()
        try:
            return finish(main(*args, **kwargs), unwritten=1)
        except SystemExit as end:  # argparse's, which has printed help or refused
            raise SystemExit(finish(end.code, *ANSWER) if isinstance(end.code, int) else end.code) from None

    return protected


def finish(status: int, unread: int = 0, unwritten: int = 0) -> int:
    """Write out what is buffered; the exit status of a command that has come to its end with `status`.

    Args:
        status: without regard to what was printed.
        unread: instead of 0 where the reader of standard output has gone.
        unwritten: instead of 0 where standard output could not be written otherwise, on a full disk, say.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    lost = _streams[1].lost if 1 in _streams else None
    if status or lost is None:
        return status
    return unread if lost.errno in GONE else unwritten


@contextlib.contextmanager
def outlived(what: str) -> Iterator[None]:
    """While inside, the loss of a stream is told on the other one and in the package's log: `what` goes on.

    Args:
        what: `the training`, say.
    """
    global _goes_on
    before, _goes_on = _goes_on, what
    try:
        for stream in _streams.values():
            if stream.lost is not None:
                _tell(stream)
        yield
    finally:
        _goes_on = before


def _tell(stream: _Descriptor) -> None:
    """Say that a stream is lost, where that matters; not through Python's streams, one of which may wait."""
    assert stream.lost is not None
    if stream.lost.errno in GONE and not _goes_on:
        return  # who reads the first lines of an answer has chosen so
    sentence = f"{STANDARD[stream.number]} cannot be written any more ({stream.lost.strerror})"
    sentence += f"; {_goes_on} goes on" if _goes_on else ""
    if not stream.told:
        stream.told = True
        with contextlib.suppress(OSError):
            os.write(3 - stream.number, f"warning: {sentence}\n".encode())
    record = logging.LogRecord("accordion_bench", logging.WARNING, __file__, 0, sentence, None, None)
    for handler in logging.getLogger("accordion_bench").handlers:
        handler.handle(record)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """While inside, each line that this process prints has a name in front: of several that print at the same time.

    Args:
        name: with what separates it from the line.
    """
    before = {number: stream.named for number, stream in _streams.items()}
    try:
        _name_lines(dict.fromkeys(_streams, name.encode("utf-8", "backslashreplace")))
        yield
    finally:
        _name_lines(before)


def _name_lines(names: Mapping[int, bytes]) -> None:
    for text in (sys.stdout, sys.stderr):
        text.flush()
    for number, stream in _streams.items():
        stream.name_lines(names[number])


def can_draw(stream: TextIO) -> bool:
    """Whether a stream leads to a terminal that can take a line back."""
    return stream.isatty() and os.environ.get("TERM") not in DUMB


def on_a_terminal() -> bool:
    """Whether a terminal is there that can draw a bar, which only this process draws on."""
    watched = can_draw(sys.stdout) and can_draw(sys.stderr)
    return watched and not any(stream.named for stream in _streams.values())


def columns() -> int:
    """Width of the terminal; 80 where it does not say."""
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if width := os.get_terminal_size(stream.fileno()).columns:
                return width
    return 80


def progress(what: str) -> None:
    """A line on standard error; on a terminal in the place of the last one."""
    line = f"\r\x1b[K{what} ..." if can_draw(sys.stderr) else f"{what} ...\n"
    print(line, end="", file=sys.stderr, flush=True)


def progress_over() -> None:
    """Leave a terminal's line empty."""
    if can_draw(sys.stderr):
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
