"""Numbers of the host on a device.

While work is captured nothing is uploaded, since a graph would repeat the copy of that moment: the work is given cells,
memory on the device, and they are filled before every repetition.
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
    """A place on a device for numbers that the host makes.

    Args:
        place: on the device.
        make: called with the moment (a step's number and rates) gives the numbers.
        once: they are the same at every moment.
    """

    def __init__(self, place: Tensor, make: Callable[[Any], Tensor], once: bool) -> None:
        self.place, self.make, self.once, self._filled = place, make, once, False

    def fill(self, moment: Any) -> None:
        """Bring the numbers of a moment to the device, asynchronously."""
        if not (self.once and self._filled):
            self.place.copy_(self.make(moment).pin_memory(), non_blocking=True)
            self._filled = True


def filled(cells: "list[Cell]", replay: Callable[[], object], moment: Any = None) -> None:
    """Repeat captured work with the numbers of a moment."""
    for cell in cells:
        cell.fill(moment)
    replay()


def _empty(x: Tensor, to: device) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=to)


@contextlib.contextmanager
def noting(place: Callable[[Tensor, device], Tensor] = _empty) -> Iterator[list[Cell]]:
    """Inside, this thread uploads nothing; the list holds the cells that work was given in its place.

    Args:
        place: makes room on a device for such a tensor.
    """
    outer, _noting.cells, _noting.place = getattr(_noting, "cells", None), [], place
    try:
        yield _noting.cells
    finally:
        _noting.cells = outer


def upload(x: Tensor, to: device) -> Tensor:
    """A tensor of the CPU on a device; on the CPU itself, uncopied. Asynchronous, through pinned memory."""
    return _uploaded(x, lambda _: x, to, once=True)


def fresh(make: Callable[[Any], Tensor], moment: Any, to: device) -> Tensor:
    """The same for numbers that change from step to step.

    Args:
        make: called with a moment gives the numbers, always of one shape.
        moment: of this step, a `Context`.
        to: where they are needed.
    """
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
    """The same for a tensor that is kept: the host waits, once, since any stream may read it from now on."""
    made = x.to(to)
    _tables[next(_numbers)] = made
    return made


def tables() -> list[Tensor]:
    """The tables that are kept now: a capture of work that reads them must keep them as long."""
    return list(_tables.values())
