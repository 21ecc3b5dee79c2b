"""CUDA graph capture: run work eagerly three times, then capture it, then replay it.

Python code that accompanies the work on the host (counting bytes, times, checks) is recorded at capture and repeated at
each replay. The first replay of each capture, and one later replay per kind of work, is compared with the same work run
eagerly. If they differ, or if capture fails, that kind of work stays eager, and the reason is reported once.
"""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from accordion_bench.comm.graphs import WORKERS, CapturedWork, Graphs, NotCapturable, eagerly
from accordion_bench.exchange.dry_exchange import tensors_in

WARM = 3  # eager runs before capture, in which kernels are tuned and compiled and tables are created
KEPT = {WORKERS: 512}  # size of the LRU cache of captures, by kind; 8 for any other
CHANGING = 1000  # consecutive eager runs of one kind after which capture is given up, because keys do not recur
ALIKE = 1e-3  # relative tolerance between replay and eager work, because some kernels are not deterministic


class HostRecord(Protocol):
    """Protocol of counts that the host makes while it launches work: bytes, times, checks."""

    def deferred(self) -> contextlib.AbstractContextManager[list[Callable[[], None]]]:
        """Suspend counting within the context; the yielded list contains functions that do the suspended counting."""


class Captured(NamedTuple):
    """Captured work: replay functions of the stages, called with the work's `moment`, and the last stage's result.

    `repeated` are the host functions to repeat after each stage.
    """

    replays: list[Callable[..., None]]
    repeated: list[list[Callable[[], None]]]
    out: Any


class Replayed:
    """Executes work, eagerly or by replays; if `graphs` cannot capture, everything stays eager.

    Args:
        records: counts that the host makes with the work.
        tell: function called with a sentence when a kind of work turns out to stay eager.
        eager: reasons known in advance why kinds of work stay eager, by kind.
    """

    def __init__(
        self,
        graphs: Graphs,
        records: Sequence[HostRecord],
        tell: Callable[[str], object] = lambda _: None,
        eager: Mapping[str, str] | None = None,
    ) -> None:
        self.graphs, self.records, self.tell, self.eager = graphs, records, tell, dict(eager or {})
        self._seen: dict[str, OrderedDict[Hashable, int]] = {}  # number of eager runs, of the latest keys
        self._kept: dict[str, OrderedDict[Hashable, Captured]] = {}
        self._missed: Counter[str] = Counter()  # consecutive eager runs, by kind
        self._again: set[str] = set()  # kinds of which a second replay has been compared

    def captures(self, name: str) -> bool:
        """Whether work of this kind is captured after enough eager runs."""
        return self.graphs.captures and name not in self.eager

    def __call__(self, work: CapturedWork) -> Any:
        """Execute the work and return the result of its last stage; every replay returns the same tensors."""
        if not self.captures(work.name):
            return eagerly(work)
        with self.graphs.lane(work.lane):
            return self._do(work)

    def _do(self, work: CapturedWork) -> Any:
        kept = self._kept.setdefault(work.name, OrderedDict())
        found = kept.get(work.key)
        if found is None:
            return self._first(work) if self._often_enough(work) else eagerly(work)
        kept.move_to_end(work.key)
        self._missed[work.name] = 0
        if work.name in self._again:
            return self._replay(work, found)
        self._again.add(work.name)
        return self._compare(work, found)

    def _often_enough(self, work: CapturedWork) -> bool:
        seen = self._seen.setdefault(work.name, OrderedDict())
        seen[work.key] = seen.pop(work.key, 0) + 1
        if len(seen) > CHANGING:
            seen.popitem(last=False)
        self._missed[work.name] += 1
        if self._missed[work.name] > CHANGING:
            self._give_up(work.name, f"its key changed {CHANGING} times in a row")
            return False
        return seen[work.key] > WARM

    def _first(self, work: CapturedWork) -> Any:
        """Capture the work and compare its first replay; run it eagerly if capture fails."""
        try:
            captured = self._capture(work)
        except NotCapturable as bad:
            self._give_up(work.name, str(bad))
            return eagerly(work)
        kept, seen = self._kept[work.name], self._seen[work.name]
        kept[work.key] = captured
        self._missed[work.name] = 0
        while len(kept) > KEPT.get(work.name, 8):
            oldest, _ = kept.popitem(last=False)
            seen.pop(oldest, None)
        return self._compare(work, captured)

    def _capture(self, work: CapturedWork) -> Captured:
        """Capture all stages without executing them."""
        before = [x.data_ptr() for x in work.changes()]
        replays, repeated, out = [], [], None
        for stage in work.stages:
            stage.prepare()
            with contextlib.ExitStack() as stack:
                noted = [stack.enter_context(own.deferred()) for own in self.records]
                replay, out = self.graphs.capture(stage.run, work.name)
            replays.append(replay)
            repeated.append([again for own in noted for again in own])
        if [x.data_ptr() for x in work.changes()] != before:
            raise NotCapturable("it replaces the tensors that it changes")
        return Captured(replays, repeated, out)

    @staticmethod
    def _replay(work: CapturedWork, kept: Captured) -> Any:
        for stage, replay, repeated in zip(work.stages, kept.replays, kept.repeated, strict=True):
            stage.prepare()
            replay(work.moment)
            for again in repeated:
                again()
        return kept.out

    @torch.no_grad()
    def _compare(self, work: CapturedWork, kept: Captured) -> Any:
        """Replay the work, restore the state and run it eagerly; the run continues with the eager result."""
        changed = list(work.changes())
        before: list[Tensor] = []
        replayed: list[Tensor] | None = None
        try:
            before = [x.clone() for x in changed]
            for stage, replay in zip(work.stages, kept.replays, strict=True):
                stage.prepare()
                replay(work.moment)
            replayed = [x.clone() for x in [*changed, *tensors_in(kept.out)]]
        except torch.OutOfMemoryError:
            self._give_up(work.name, "there is not enough memory to compare a replay with eager work")
        if len(before) == len(changed) > 0:
            torch._foreach_copy_(changed, before)
        with torch.enable_grad():
            out = eagerly(work)
        found = [*changed, *tensors_in(out)]
        if replayed is not None and (len(found) != len(replayed) or not all(map(alike, replayed, found))):
            self._give_up(work.name, "a replay differs from the same work run eagerly")
        return out

    def _give_up(self, name: str, reason: str) -> None:
        self.eager[name] = reason
        self._kept.pop(name, None)
        self._seen.pop(name, None)
        self.tell(f"eager from now on, not replayed: {name}, because {reason}")


class Slots:
    """Fixed memory for batches, with images in their memory format, which captured work reads."""

    def __init__(self, replayed: Replayed, memory_format: torch.memory_format) -> None:
        self.replayed, self.memory_format = replayed, memory_format
        self._places: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def filled(self, name: str, row: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Copy inputs and targets to their memory and return it; images in their memory format.

        If work of this kind is not captured, return the batch itself. `row` is the worker's index in this process.
        """
        if not self.replayed.captures(name):
            return x.to(memory_format=self.memory_format), y
        key = (name, row, x.shape, x.dtype, y.shape, y.dtype)
        if key not in self._places:
            self._places[key] = torch.empty_like(x, memory_format=self.memory_format), torch.empty_like(y)
        for place, values in zip(self._places[key], (x, y), strict=True):
            place.copy_(values)
        return self._places[key]


def alike(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal up to the tolerance ALIKE; integers must be equal. Waits for the device."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    if not torch.equal(x.isfinite(), y.isfinite()):
        return False
    a, b = (z.nan_to_num(0, 0, 0).double() for z in (x, y))
    return bool((a - b).norm() <= ALIKE * b.norm())
