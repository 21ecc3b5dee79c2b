"""Replayed: the work of a step is done operation by operation three times, then captured, then repeated by the device.

What Python does beside the device (bytes that are charged, times, looks that are noted) is noted at the capture and
done again at each replay. Once in a run the replay of each kind of work is compared with the same work done eagerly;
where they differ, or where work cannot be captured, that kind stays eager from then on, and the reason is told once.
"""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from accordion_bench.comm.graphs import Graphs, NotCapturable, Work, eagerly
from accordion_bench.config.capture_rules import WORKERS

WARM = 3  # times that work is done eagerly first: kernels are searched for and compiled, tables are made
KEPT = 64  # captures that are kept, the latest used
CHANGING = 200  # keys of one kind after which work that never comes back is given up
ALIKE = (
    1e-3  # relative distance up to which a replay and eager work are the same, where kernels do not repeat their bits
)


class Beside(Protocol):
    """What is kept on the host beside the work of a device: bytes, times, looks."""

    def noting(self) -> contextlib.AbstractContextManager[list[Callable[[], None]]]:
        """Inside, nothing counts; what would have counted is done by calling what the list holds afterwards."""


class Captured(NamedTuple):
    """Work that the device repeats.

    replays: of each stage.
    repeated: what the host does beside each stage.
    out: what the last stage leaves.
    """

    replays: list[Callable[[], None]]
    repeated: list[list[Callable[[], None]]]
    out: Any


class Replayed:
    """Does work, eagerly or by replays.

    Args:
        graphs: what captures; where it captures nothing, everything stays eager.
        beside: what is kept on the host.
        tell: called with a sentence when a kind of work turns out to stay eager.
        eager: why work stays eager, by the name of its kind, as far as that is known beforehand.
    """

    def __init__(
        self,
        graphs: Graphs,
        beside: Sequence[Beside],
        tell: Callable[[str], object] = lambda _: None,
        eager: Mapping[str, str] | None = None,
    ) -> None:
        self.graphs, self.beside, self.tell, self.eager = graphs, beside, tell, dict(eager or {})
        self._seen: dict[str, Counter[Hashable]] = {}
        self._kept: OrderedDict[Hashable, Captured] = OrderedDict()
        self._compared: set[str] = set()

    def __call__(self, work: Work) -> Any:
        """Do the work; returns what its last stage leaves, the same tensors at every replay."""
        if not self.graphs.captures or work.name in self.eager:
            return eagerly(work)
        kept = self._kept.get((work.name, work.key))
        if kept is None:
            if not self._often_enough(work):
                return eagerly(work)
            try:
                kept = self._capture(work)
            except NotCapturable as bad:
                self._give_up(work.name, str(bad))
                return eagerly(work)
            return self._replay(work, kept)
        self._kept.move_to_end((work.name, work.key))
        if work.name in self._compared:
            return self._replay(work, kept)
        return self._compare(work, kept)

    def forget(self) -> None:
        """The memory of parameters, gradients or buffers is another one from here on."""
        self._kept.clear()
        self._seen.clear()

    def _often_enough(self, work: Work) -> bool:
        seen = self._seen.setdefault(work.name, Counter())
        seen[work.key] += 1
        if len(seen) > CHANGING:
            self._give_up(work.name, f"it was another work in each of {CHANGING} steps")
            return False
        return seen[work.key] > WARM

    def _capture(self, work: Work) -> Captured:
        """Note all stages; nothing of them has been done afterwards.

        Raises:
            NotCapturable: one of them cannot be repeated, or the work puts tensors in the place of those it changes.
        """
        before = [x.data_ptr() for x in work.changes()]
        replays, repeated, out = [], [], None
        for stage in work.stages:
            stage.prepare()
            with contextlib.ExitStack() as stack:
                noted = [stack.enter_context(own.noting()) for own in self.beside]
                replay, out = self.graphs.capture(stage.run, work.name)
            replays.append(replay)
            repeated.append([again for own in noted for again in own])
        if [x.data_ptr() for x in work.changes()] != before:
            raise NotCapturable("it puts new tensors in the place of those that it changes")
        kept = self._kept[work.name, work.key] = Captured(replays, repeated, out)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return kept

    @staticmethod
    def _replay(work: Work, kept: Captured) -> Any:
        for stage, replay, repeated in zip(work.stages, kept.replays, kept.repeated, strict=True):
            stage.prepare()
            replay()
            for again in repeated:
                again()
        return kept.out

    @torch.no_grad()
    def _compare(self, work: Work, kept: Captured) -> Any:
        """Replay the work, take it back, do it eagerly: what the run goes on with, whatever the replay has found."""
        changed = list(work.changes())
        before = [x.clone() for x in changed]
        for stage, replay in zip(work.stages, kept.replays, strict=True):
            stage.prepare()
            replay()
        replayed = [x.clone() for x in [*changed, *_tensors(kept.out)]]
        if changed:
            torch._foreach_copy_(changed, before)
        with torch.enable_grad():
            out = eagerly(work)
        found = [*changed, *_tensors(out)]
        if len(found) != len(replayed) or not all(map(alike, replayed, found)):
            self._give_up(work.name, "a replay of it differs from the same work done operation by operation")
        self._compared.add(work.name)
        return out

    def _give_up(self, name: str, reason: str) -> None:
        self.eager[name] = reason
        for key in [key for key in self._kept if isinstance(key, tuple) and key[0] == name]:
            del self._kept[key]
        self.tell(f"{name} stays eager: {reason}")


class Slots:
    """Where the batches of a step lie: at each step in the same place, since captured work reads them there.

    Args:
        replayed: whether the work of workers is captured.
        memory_format: of images.
    """

    def __init__(self, replayed: Replayed, memory_format: torch.memory_format) -> None:
        self.replayed, self.memory_format = replayed, memory_format
        self._places: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def filled(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The batches of all local workers in their place, images in their memory format.

        Where nothing is captured, they are as they come.
        """
        if not self.replayed.graphs.captures or WORKERS in self.replayed.eager:
            return x.to(memory_format=self.memory_format), y
        key = (x.shape, x.dtype, y.shape, y.dtype)
        if key not in self._places:
            self._places[key] = torch.empty_like(x, memory_format=self.memory_format), torch.empty_like(y)
        for place, values in zip(self._places[key], (x, y), strict=True):
            place.copy_(values)
        return self._places[key]


def alike(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same, up to the order in which a kernel may add; waits for the device."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if torch.equal(x, y):
        return True
    if not x.is_floating_point():
        return False
    a, b = x.double(), y.double()
    return bool((a - b).norm() <= ALIKE * b.norm())


def _tensors(out: Any) -> list[Tensor]:
    return [x for x in tree_leaves(out) if isinstance(x, Tensor)]
