"""Whether what is computed and exchanged is finite: on a device, all of a step is read at once.

A CPU looks at tensors before they are used. On a device each such look is a wait of the host. There the largest
magnitudes are computed as work like any other, and one copy to the host decides, before anything is applied.
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
    """Numbers on a device, none of which may be NaN or infinite.

    length: how many.
    told: the sentence about one that is, by its index and value.
    common: whose workers all have the same numbers; None = they are this process's own.
    """

    length: int
    told: Callable[[int, float], str]
    common: Comm | None = None


Noted = tuple[Tensor, Sequence[Look]]


class Finite:
    """What is to be looked at in a step.

    Args:
        device: where tensors live.

    Attributes:
        late: looks are noted, to be read together; else each look is made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.late = device.type != "cpu"
        self._noted: list[Noted] = []

    def note(self, values: Tensor, *looks: Look) -> None:
        """Numbers [n], of any type, that are to be read with the others of this step, by looks at consecutive ones."""
        self._noted.append((values, looks))

    def forget(self) -> None:
        """Nothing of what was noted will be read."""
        self._noted = []

    @contextlib.contextmanager
    def deferred(self) -> Iterator[list[Callable[[], None]]]:
        """Inside, looks are kept, not noted; they are noted by calling what the list holds afterwards."""
        before, self._noted = self._noted, []
        again: list[Callable[[], None]] = []
        try:
            yield again
        finally:
            noted, self._noted = self._noted, before
        if noted:
            again.append(lambda: self._noted.extend(noted))

    def refuse(self) -> None:
        """Read what was noted, in one copy to the host.

        What all workers have in common all of them refuse; so the one who knows where it comes from tells the others.

        Raises:
            NonFinite: something is NaN or infinite; the sentence is about the first, of the processes' own before those
                in common.
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
            own = next(filter(None, look.common.everyones(own)), told)
        raise NonFinite(own)


def all_finite(xs: Sequence[Tensor]) -> bool:
    """Whether tensors of one device are, in one pass and one call, that of torch's gradient scaler.

    It writes back each number, times one. A sum of each tensor would cost a step of a small network 3 % more.
    """
    if not xs:
        return True
    found = torch.zeros(1, device=xs[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(list(xs), found, torch.ones_like(found))
    return not found.item()


def largest(xs: Sequence[Tensor]) -> Tensor:
    """The largest magnitude in each tensor that is not empty, [n]; NaN where there is a NaN; waits for nothing."""
    filled = [x for x in xs if x.numel()]
    return torch.stack(torch._foreach_norm(filled, math.inf)) if filled else torch.zeros(0, device=xs[0].device)
