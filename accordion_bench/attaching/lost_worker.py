"""What a process says when another one is not there any more."""

import contextlib
from collections.abc import Iterator

from accordion_bench.comm.members import is_timeout, of_communication
from accordion_bench.comm.membership import LeftBehind


class LostWorker(RuntimeError):
    """Another process has ended, or has not answered in time."""


@contextlib.contextmanager
def lost_worker_told(where: str, timeout: float) -> Iterator[None]:
    """Around collectives: one sentence where another process is lost.

    Args:
        where: the sentence begins with it.
        timeout: seconds for which processes wait for each other.

    Raises:
        LostWorker: with what the backend says of it.
    """
    try:
        yield
    except LeftBehind as left:
        raise LostWorker(f"{where}: {left}") from None
    except RuntimeError as error:
        if isinstance(error, LostWorker) or not (said := of_communication(error)):
            raise
        first = " ".join(said.partition(". This is typically")[0].split())[:300]
        what = f"did not answer within timeout={timeout:g} s" if is_timeout(said) else "has ended"
        raise LostWorker(f"{where}: another worker {what}, as its own output may say ({first})") from None
