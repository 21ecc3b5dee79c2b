"""Check that tensors are finite; on a device, all values of a step are read at once.

On a CPU tensors are checked before use. On a device each check would synchronise with the host. There the largest
magnitudes are computed on the device, and one copy to the host decides, before any update is applied.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.tensors.same_shape import joined


class Look(NamedTuple):
    """A check of numbers on a device, none of which may be NaN or infinite."""

    length: int  # how many numbers
    told: Callable[[int, float], str]  # returns the error message for a non-finite number, given its index and value
    # communicator whose workers all have the same numbers; None = the numbers are local to this process
    common: Comm | None = None


Noted = tuple[Tensor, Sequence[Look]]


class Finite:
    """The checks of a step; if `late`, as on a device, they are noted and read together instead of at once."""

    def __init__(self, device: torch.device) -> None:
        self.late = device.type != "cpu"
        self._noted: list[Noted] = []

    def note(self, values: Tensor, *looks: Look) -> None:
        """Note numbers [n] of any dtype for the check of this step; each look covers the next `length` numbers."""
        self._noted.append((values, looks))

    def forget(self) -> None:
        """Discard all noted numbers."""
        self._noted = []

    @contextlib.contextmanager
    def deferred(self) -> Iterator[list[Callable[[], None]]]:
        """Return a context in which numbers are held back; calling the entries of its list afterwards notes them."""
        before, self._noted = self._noted, []
        again: list[Callable[[], None]] = []
        try:
            yield again
        finally:
            noted, self._noted = self._noted, before
        if noted:
            again.append(lambda: self._noted.extend(noted))

    def refuse(self) -> None:
        """Read the noted numbers in one copy to the host, and refuse non-finite ones.

        If common numbers are non-finite, all workers fail together; a worker that knows the source informs the others.

        Raises:
            NonFinite: a number is NaN or infinite; the message is about the first one, local numbers before common
                ones.
        """
        noted, self._noted = self._noted, []
        if not noted:
            return
        values = joined([values for values, _ in noted]).tolist()
        if all(map(math.isfinite, values)):
            return
        own, common = "", None
        looks = [look for _, own_looks in noted for look in own_looks]
        for look, end in zip(looks, itertools.accumulate(look.length for look in looks), strict=True):
            found = values[end - look.length : end]
            bad = next((i for i, value in enumerate(found) if not math.isfinite(value)), None)
            if bad is not None and look.common is None:
                own = own or look.told(bad, found[bad])
            elif bad is not None:
                common = common or (look, look.told(bad, found[bad]))
        if common is not None:
            look, told = common
            assert look.common is not None
            own = next(filter(None, look.common.gather_objects(own)), told)
        raise NonFinite(own)


def all_finite(xs: Sequence[Tensor]) -> bool:
    """Whether all tensors of one device are finite, in one pass by the kernel of torch's gradient scaler.

    The kernel writes back each number, times one. A sum of each tensor would cost a step of a small network 3 % more.
    """
    if not xs:
        return True
    found = torch.zeros(1, device=xs[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(list(xs), found, torch.ones_like(found))
    return not found.item()


def largest(xs: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in each non-empty tensor, [n], NaN if it contains NaN; does not synchronise."""
    filled = [x for x in xs if x.numel()]
    return torch.stack(torch._foreach_norm(filled, math.inf)) if filled else torch.zeros(0, device=xs[0].device)
