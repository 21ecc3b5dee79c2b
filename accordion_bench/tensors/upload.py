"""Upload of host data to a device, also for captured work.

During capture nothing is uploaded, because a graph would replay the copy of old data. Instead, captured work reads
cells, which are device memory that is filled before every replay.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, device
from torch.utils._python_dispatch import _disable_current_modes

_noting = threading.local()
_tables: "weakref.WeakValueDictionary[int, Tensor]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Cell:
    """Device memory for data that the host computes.

    Args:
        place: tensor on the device.
        make: function from the moment (step and rates) to the data.
        once: whether the data are equal at all moments.
    """

    def __init__(self, place: Tensor, make: Callable[[Any], Tensor], once: bool) -> None:
        self.place, self.make, self.once, self._filled = place, make, once, False

    def fill(self, moment: Any) -> None:
        """Copy the data of a moment to the device, asynchronously."""
        if not (self.once and self._filled):
            self.place.copy_(self.make(moment).pin_memory(), non_blocking=True)
            self._filled = True


def filled(cells: "list[Cell]", replay: Callable[[], object], moment: Any = None) -> None:
    """Replay captured work with the data of a moment."""
    for cell in cells:
        cell.fill(moment)
    replay()


def _empty(x: Tensor, to: device) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=to)


@contextlib.contextmanager
def capture_uploads(place: Callable[[Tensor, device], Tensor] = _empty) -> Iterator[list[Cell]]:
    """Replace uploads of this thread inside the block by cells in memory of `place`; yield the list of the cells."""
    outer, _noting.cells, _noting.place = getattr(_noting, "cells", None), [], place
    try:
        yield _noting.cells
    finally:
        _noting.cells = outer


def upload(x: Tensor, to: device) -> Tensor:
    """Copy a CPU tensor to a device asynchronously, through pinned memory; return it unchanged for the CPU."""
    return _uploaded(x, lambda _: x, to, once=True)


def fresh(make: Callable[[Any], Tensor], moment: Any, to: device) -> Tensor:
    """Upload data that change from step to step: make(moment), of constant shape; the moment is a `Context`."""
    cells = getattr(_noting, "cells", None)
    if cells is None or to.type == "cpu":
        return _uploaded(make(moment), make, to, once=False)
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        x = make(moment)
    return _uploaded(x, make, to, once=False)


def _uploaded(x: Tensor, make: Callable[[Any], Tensor], to: device, once: bool) -> Tensor:
    if to.type == "cpu":
        return x
    cells = getattr(_noting, "cells", None)
    if cells is None:
        return x.pin_memory().to(to, non_blocking=True)
    cell = Cell(_noting.place(x, to), make, once)
    cells.append(cell)
    return cell.place


def table(x: Tensor, to: device) -> Tensor:
    """Copy a cached tensor to a device; synchronises once, so that all streams may read it."""
    made = x.to(to)
    _tables[next(_numbers)] = made
    return made


def tables() -> list[Tensor]:
    """Return all live tables; a capture of work that reads them must keep references."""
    return list(_tables.values())
