"""Progress of a report, on stderr: a bar on a terminal, else a line every ten seconds; nothing where it is quick."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

from accordion_bench import output

T = TypeVar("T")
PATIENCE = 9.5  # seconds without a line


def told(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The items, while telling how many are done.

    Args:
        items: to go through.
        total: how many.
        what: is done, such as `drawing`.
    """
    if output.can_draw(sys.stderr):
        yield from tqdm(items, total=total, desc=what, file=sys.stderr, leave=False, delay=1, mininterval=0.2)
        return
    said = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if time.monotonic() - said >= PATIENCE:
            said = time.monotonic()
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)
