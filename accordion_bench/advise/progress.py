"""How far the advice is, on stderr."""

import sys

from accordion_bench import output


def say(what: str) -> None:
    """A line; on a terminal in the place of the last one."""
    line = f"\r\x1b[K{what} ..." if output.can_draw(sys.stderr) else f"{what} ...\n"
    print(line, end="", file=sys.stderr, flush=True)


def done() -> None:
    """Leave a terminal's line empty."""
    if output.can_draw(sys.stderr):
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
