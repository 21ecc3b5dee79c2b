"""Standard output and error that survive the loss of their reader, prefix lines with a name, and detect a terminal.

A progress line must never stop a run. `protect` replaces Python's streams by ones that discard what cannot be written,
because the reader of a pipe has ended, the terminal was closed, the disk is full, or the descriptor was never open.
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
GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)  # the reader has ended: the other end of a pipe, or a terminal
DUMB = ("dumb", "unknown")  # values of TERM for terminals that cannot move the cursor
# exit statuses `unread` (as for SIGPIPE) and `unwritten` of commands whose only result is what they print
ANSWER = (128 + 13, 1)
_streams: dict[int, "_Descriptor"] = {}  # streams of this process, by descriptor
_goes_on = ""  # activity that continues after a stream is lost


class _Descriptor(io.RawIOBase):
    """Descriptor of a standard stream; after an error, output is discarded and the error is reported once.

    Args:
        number: number of the descriptor.

    Attributes:
        lost: first error; None = no error.
        told: whether the user was informed.
        named: prefix of each line.
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
        """Write all bytes; with a prefix, write only complete lines, each in one call, which pipes keep together."""
        given = bytes(data)
        if not self.named:
            self._put(given)
            return len(given)
        *whole, self._part = (self._part + given).split(b"\n")
        for line in whole:
            self._put(self.named + line + b"\n")
        return len(given)

    def name_lines(self, name: bytes) -> None:
        """Set the prefix of each following line; b"" = none."""
        if self._part:
            self._put(self.named + self._part)
        self.named, self._part = name, b""

    def _put(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:  # with unbuffered output, Python does not retry a partial write
                try:
                    rest = rest[os.write(self.number, rest) :]
                except BlockingIOError:  # another program has made the pipe non-blocking
                    select.select([], [self.number], [])
        except OSError as error:
            if self.lost is None:
                self.lost = error
                _tell(self)


def protect() -> None:
    """Make standard output and error of this process survive the loss of their readers; call it first.

    Closed descriptors are opened on /dev/null; otherwise the next opened file would receive the output. Characters that
    a terminal cannot encode are escaped. Streams that replace Python's standard streams keep their descriptors.
    """
    while (free := os.open(os.devnull, os.O_RDWR)) <= max(STANDARD):
        os.set_inheritable(free, True)
    os.close(free)
    sys.stdout, sys.stderr = _protected(sys.stdout, 1), _protected(sys.stderr, 2)


def _protected(stream: TextIO | None, number: int) -> TextIO:
    if stream is None:  # the descriptor was closed when Python started, and may now belong to another file
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
    """Decorate the main function of a command, which returns its exit status, with protected streams.

    Example:
        @command
        def main(argv: list[str] | None = None) -> int: ...
    """

    @functools.wraps(main)
    def protected(*args: P.args, **kwargs: P.kwargs) -> int:
        protect()
        try:
            return finish(main(*args, **kwargs), unwritten=1)
        except SystemExit as end:  # raised by argparse after help or an error
            raise SystemExit(finish(end.code, *ANSWER) if isinstance(end.code, int) else end.code) from None

    return protected


def finish(status: int, unread: int = 0, unwritten: int = 0) -> int:
    """Flush the streams and return the exit status of a command that ends with `status`.

    Args:
        status: exit status regardless of output errors.
        unread: replaces status 0 if the reader of standard output has ended.
        unwritten: replaces status 0 after another output error, such as a full disk.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    lost = _streams[1].lost if 1 in _streams else None
    if status or lost is None:
        return status
    return unread if lost.errno in GONE else unwritten


@contextlib.contextmanager
def report_lost_streams(what: str) -> Iterator[None]:
    """Within the block, report the loss of a stream, and that `what`, such as `the training`, continues.

    The report is written to the other stream and to the package's log.
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
    """Report that a stream is lost, if that matters; not through Python's streams, one of which may block."""
    assert stream.lost is not None
    if stream.lost.errno in GONE and not _goes_on:
        return  # the reader of an answer may stop after the first lines
    sentence = f"{STANDARD[stream.number]} can no longer be written ({stream.lost.strerror})"
    sentence += f"; {_goes_on} continues" if _goes_on else ""
    if not stream.told:
        stream.told = True
        with contextlib.suppress(OSError):
            os.write(3 - stream.number, f"warning: {sentence}\n".encode())
    record = logging.LogRecord("accordion_bench", logging.WARNING, __file__, 0, sentence, None, None)
    for handler in logging.getLogger("accordion_bench").handlers:
        handler.handle(record)


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Within the block, prefix each printed line with a name, which includes its separator."""
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
    """Whether a stream is a terminal that can overwrite a line."""
    return stream.isatty() and os.environ.get("TERM") not in DUMB


def on_a_terminal() -> bool:
    """Whether both streams are a terminal that can draw a bar, on which only this process draws."""
    watched = can_draw(sys.stdout) and can_draw(sys.stderr)
    return watched and not any(stream.named for stream in _streams.values())


def columns() -> int:
    """Return the width of the terminal; 80 if unknown."""
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if width := os.get_terminal_size(stream.fileno()).columns:
                return width
    return 80


def progress(what: str) -> None:
    """Print a line on standard error; on a terminal it replaces the previous one."""
    line = f"\r\x1b[K{what} ..." if can_draw(sys.stderr) else f"{what} ...\n"
    print(line, end="", file=sys.stderr, flush=True)


def progress_over() -> None:
    """Clear the line on a terminal."""
    if can_draw(sys.stderr):
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
