"""Pauses between two looks of one who waits: who has waited long asks seldom, so that a thousand may wait at once."""

import time
from collections.abc import Iterator


def growing_pauses(first: float = 0.02, longest: float = 0.5) -> Iterator[None]:
    """Sleep at each `next`, each time half as long again.

    Args:
        first: seconds of the first pause.
        longest: seconds of the last ones.
    """
    seconds = first
    while True:
        time.sleep(seconds)
        yield
        seconds = min(1.5 * seconds, longest)
