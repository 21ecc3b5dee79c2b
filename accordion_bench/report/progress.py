"""Progress of a report, on stderr: a bar on a terminal, else a line every ten seconds; nothing where it is quick."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def told(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The items, while telling how many are done.

    Args:
        items: to go through.
        total: how many.
        what: is done, such as `drawing`.
    """
    shown = sys.stderr.isatty()
    pace = {"delay": 1, "mininterval": 0.2} if shown else {"delay": 9, "mininterval": 9, "ncols": 60}
    return iter(tqdm(items, total=total, desc=what, file=sys.stderr, leave=not shown, **pace))
