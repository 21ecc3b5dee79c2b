"""Streams that are none: what happens on them is logged, and held against what a GPU's would need.

Every operation on tensors, as torch dispatches it, counts as an entry in the queue of the stream that is current in its
thread. Two rules:

    a use on another stream than the one that wrote (or, for a write, read) a tensor needs an event between them;
    memory is freed when whoever allocated it knows that all others have done with it: by an event, or by `keep`.

Operations beneath torch (NumPy's, those of kernels in Python) are not seen.
"""

import contextlib
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accordion_bench.comm.on_device import Streams

Clock = dict[str, int]  # how many entries of each stream are known to be over
Part = tuple[int, int]  # of a storage, from one byte up to another
MOST_PARTS = 64  # of a tensor


@dataclass
class Memory:
    """One storage: who allocated it, and the last entries of each stream that have read and written its parts."""

    shape: tuple[int, ...]
    home: str
    reads: dict[Part, Clock] = field(default_factory=dict)
    writes: dict[Part, Clock] = field(default_factory=dict)
    kept_for: set[str] = field(default_factory=set)


class StubStreams(Streams):
    """Stands in for a GPU's streams while everything runs on the CPU.

    Attributes:
        log: what happened, as (what, stream, about which tensor or by which operation).
        wrong: a sentence for everything that would be a race on a GPU.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, str, str]] = []
        self.wrong: list[str] = []
        self._clocks: dict[str, Clock] = defaultdict(lambda: defaultdict(int))
        self._memory: dict[int, Memory] = {}
        self._here = threading.local()
        self._lock = threading.RLock()
        self._count = 0

    # ---- what the program sees

    def use_device(self) -> None:
        self._note("use_device", threading.current_thread().name)

    def new(self, urgent: bool = False) -> str:
        self._count += 1
        name = f"{'urgent ' * urgent}stream {self._count}"
        self._note("new", name)
        return name

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self._here.stream = getattr(self._here, "stream", None), stream
        try:
            with contextlib.nullcontext() if before else Watch(self):
                yield
        finally:
            self._here.stream = before

    def record(self) -> Clock:
        self._note("event")
        with self._lock:
            return dict(self._clocks[self.current])

    def wait(self, event: Clock) -> None:
        self._note("wait")
        with self._lock:
            clock = self._clocks[self.current]
            for stream, count in event.items():
                clock[stream] = max(clock[stream], count)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            memory = self._of(x)
            self._note("keep", str(memory.shape))
            memory.kept_for.add(self.current)

    # ---- what the test sees

    @property
    def current(self) -> str:
        return getattr(self._here, "stream", None) or "none"

    def main(self) -> contextlib.AbstractContextManager[None]:
        """Around everything that the thread does that trains; tensors from before are nobody's."""
        return self.on("main")

    def _note(self, what: str, about: str = "") -> None:
        self.log.append((what, self.current, about))

    def _of(self, x: Tensor) -> Memory:
        """The memory of a tensor; allocated where it is seen first."""
        storage = x.untyped_storage()
        with self._lock:
            key = storage._cdata
            if key not in self._memory:
                self._memory[key] = Memory(tuple(x.shape), self.current)
                weakref.finalize(storage, self._freed, key).atexit = False
            return self._memory[key]

    def used(self, name: str, read: Iterable[Tensor], written: Iterable[Tensor]) -> None:
        """An operation on the current stream."""
        stream = self.current
        with self._lock:
            clock = self._clocks[stream]
            clock[stream] += 1
            for x in read:
                memory, parts = self._of(x), parts_of(x)
                self._ordered(f"{name} on {stream} reads", memory, memory.writes, parts)
                for part in parts:
                    memory.reads.setdefault(part, {})[stream] = clock[stream]
            for x in written:
                memory, parts = self._of(x), parts_of(x)
                self._ordered(f"{name} on {stream} writes", memory, memory.writes, parts)
                self._ordered(f"{name} on {stream} writes", memory, memory.reads, parts)
                for part in parts:
                    memory.writes.setdefault(part, {})[stream] = clock[stream]
            self._note("use", name)

    def _ordered(self, does: str, memory: Memory, before: dict[Part, Clock], parts: Iterable[Part]) -> None:
        known = self._clocks[self.current]
        for start, end in parts:
            clocks = [clock for (first, last), clock in before.items() if first < end and start < last]
            for stream, count in (entry for clock in clocks for entry in clock.items()):
                if stream != self.current and known[stream] < count:
                    self.wrong.append(f"{does} {memory.shape} of {memory.home}, with which {stream} is not done")
                    return

    def _freed(self, key: int) -> None:
        with self._lock:
            memory = self._memory.pop(key)
            known = self._clocks[memory.home]
            clocks = [*memory.reads.values(), *memory.writes.values()]
            late = {stream for clock in clocks for stream, count in clock.items() if known[stream] < count}
            for stream in late - {memory.home, *memory.kept_for}:
                self.wrong.append(f"{memory.home} frees {memory.shape}, which {stream} may still use")
            self._note("free", str(memory.shape))


def parts_of(x: Tensor) -> list[Part]:
    """The parts of its storage that a tensor covers; where there are very many, all from the first to the last."""
    if not x.numel():
        return []
    dims = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1 and stride)
    length, reach = 1, 1 + sum(stride * (size - 1) for stride, size in dims)
    while dims and dims[0][0] <= length:
        length += dims[0][0] * (dims[0][1] - 1)
        dims.pop(0)
    starts = [x.storage_offset()]
    for stride, size in dims:
        starts = [start + k * stride for start in starts for k in range(size)][: MOST_PARTS + 1]
    if len(starts) > MOST_PARTS:
        starts, length = starts[:1], reach
    return [(x.itemsize * start, x.itemsize * (start + length)) for start in starts]


class Watch(TorchDispatchMode):
    """Tells the streams of every operation in one thread."""

    def __init__(self, streams: StubStreams) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        changed: set[int] = set()
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                changed |= {id(x) for x in tree_leaves(given)}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for x in given:
            self.streams._of(x)
        out = func(*args, **kwargs)
        left = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        own = {x.untyped_storage()._cdata for x in given}
        made = [x for x in left if x.untyped_storage()._cdata not in own]
        if changed or made or not left:  # else it is a view, which touches nothing
            read = [x for x in given if id(x) not in changed]
            self.streams.used(str(func), read, [*(x for x in given if id(x) in changed), *made])
        return out
