"""Replayed: the work of a step is done operation by operation three times, then captured, then repeated by the device.

What Python does beside the device (bytes that are charged, times, looks that are noted) is noted at the capture and
done again at each replay. The first replay of each capture, and once for each kind of work a later one, is compared
with the same work done eagerly. Where they differ, or where work cannot be captured, that kind stays eager from then
on, and the reason is told once.
"""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from accordion_bench.comm.graphs import (
    EVALUATION,
    EXCHANGE,
    UPDATE,
    WORKERS,
    CapturedWork,
    Graphs,
    NotCapturable,
    eagerly,
)
from accordion_bench.exchange.state_bytes import tensors_in

WARM = 3  # times that work is done eagerly first: kernels are searched for and compiled, tables are made
KEPT = {WORKERS: 512, EXCHANGE: 8, UPDATE: 8, EVALUATION: 8}  # captures that are kept by kind, the latest used
CHANGING = 1000  # times in a row that work of one kind is done eagerly before it is given up: it never comes back
ALIKE = 1e-3  # relative distance up to which a replay and eager work are alike: some kernels do not repeat their bits


class HostRecord(Protocol):
    """What the host counts while it tells a device its work: bytes, times, looks."""

    def deferred(self) -> contextlib.AbstractContextManager[list[Callable[[], None]]]:
        """Inside, nothing counts; what would have counted is done by calling what the list holds afterwards."""


class Captured(NamedTuple):
    """Work that the device repeats.

    replays: of each stage, called with the moment of the work.
    repeated: what the host does beside each stage.
    out: what the last stage leaves.
    """

    replays: list[Callable[..., None]]
    repeated: list[list[Callable[[], None]]]
    out: Any


class Replayed:
    """Does work, eagerly or by replays.

    Args:
        graphs: what captures; where it captures nothing, everything stays eager.
        records: what the host counts beside the work.
        tell: called with a sentence when a kind of work turns out to stay eager.
        eager: why work stays eager, by the name of its kind, as far as that is known beforehand.
    """

    def __init__(
        self,
        graphs: Graphs,
        records: Sequence[HostRecord],
        tell: Callable[[str], object] = lambda _: None,
        eager: Mapping[str, str] | None = None,
    ) -> None:
        self.graphs, self.records, self.tell, self.eager = graphs, records, tell, dict(eager or {})
        self._seen: dict[str, OrderedDict[Hashable, int]] = {}  # times, of the latest keys
        self._kept: dict[str, OrderedDict[Hashable, Captured]] = {}
        self._missed: Counter[str] = Counter()  # times in a row that work of a kind was done eagerly
        self._again: set[str] = set()  # kinds of which a second replay has been compared, too

    def captures(self, name: str) -> bool:
        """Whether work of this kind is captured when it has been done often enough."""
        return self.graphs.captures and name not in self.eager

    def __call__(self, work: CapturedWork) -> Any:
        """Do the work; returns what its last stage leaves, the same tensors at every replay."""
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
            self._give_up(work.name, f"it was another work {CHANGING} times in a row")
            return False
        return seen[work.key] > WARM

    def _first(self, work: CapturedWork) -> Any:
        """Capture the work, and compare its first replay; eagerly where that cannot be."""
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
        """Note all stages; nothing of them has been done afterwards.

        Raises:
            NotCapturable: one of them cannot be repeated, or the work puts tensors in the place of those it changes.
        """
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
            raise NotCapturable("it puts new tensors in the place of those that it changes")
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
        """Replay the work, take it back, do it eagerly: what the run goes on with, whatever the replay has found."""
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
            self._give_up(work.name, "there is no memory to compare a replay with the same work done eagerly")
        if len(before) == len(changed) > 0:
            torch._foreach_copy_(changed, before)
        with torch.enable_grad():
            out = eagerly(work)
        found = [*changed, *tensors_in(out)]
        if replayed is not None and (len(found) != len(replayed) or not all(map(alike, replayed, found))):
            self._give_up(work.name, "a replay of it differs from the same work done operation by operation")
        return out

    def _give_up(self, name: str, reason: str) -> None:
        self.eager[name] = reason
        self._kept.pop(name, None)
        self._seen.pop(name, None)
        self.tell(f"eager from now on, not replayed: {name}, because {reason}")


class Slots:
    """Where batches lie: each time in the same place, since captured work reads them there.

    Args:
        replayed: whether work of a kind is captured.
        memory_format: of images.
    """

    def __init__(self, replayed: Replayed, memory_format: torch.memory_format) -> None:
        self.replayed, self.memory_format = replayed, memory_format
        self._places: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def filled(self, name: str, row: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The batches of a worker, or of all from `row` on, in their place; images in their memory format.

        Where work of this name is not captured, they are as they come.
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
    """Whether two tensors are the same, up to the order in which a kernel may add; waits for the device."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    if not torch.equal(x.isfinite(), y.isfinite()):
        return False
    a, b = (z.nan_to_num(0, 0, 0).double() for z in (x, y))
    return bool((a - b).norm() <= ALIKE * b.norm())
