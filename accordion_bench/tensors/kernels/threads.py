"""Execution of kernels in several threads, with a part of the tiles for each thread."""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

LEAST = 16  # fewest tiles per thread; fewer take less time than waking a thread

_pool: ThreadPoolExecutor | None = None


def over_tiles(kernel: Callable[..., Any], tiles: int, *args: Any) -> None:
    """Call kernel(*args, first, last) for parts of the tiles, in at most `torch.get_num_threads()` threads.

    Args:
        kernel: function that releases the GIL and whose writes depend on the tile only.
        tiles: number of tiles.
        args: arguments of the kernel.
    """
    threads = min(torch.get_num_threads(), max(1, tiles // LEAST))
    if threads == 1:
        kernel(*args, 0, tiles)
        return
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(os.cpu_count(), "kernels")
    ends = [tiles * part // threads for part in range(threads + 1)]
    rest = [_pool.submit(kernel, *args, first, last) for first, last in itertools.pairwise(ends[1:])]
    kernel(*args, 0, ends[1])
    for part in rest:
        part.result()


def _forget() -> None:
    global _pool
    _pool = None  # a forked process does not inherit threads


os.register_at_fork(after_in_child=_forget)
