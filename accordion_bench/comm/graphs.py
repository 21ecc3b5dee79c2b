"""Graphs: work that a device is told once and then repeats by itself, without the host that told it.

The only room that captures with torch.cuda. A CPU is told everything each time: there nothing is captured.

Work may go to lanes, which a device works at side by side: streams, each with a random generator of its own.
"""

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from accordion_bench.comm.on_device import CudaStreams, Streams
from accordion_bench.tensors.upload import Cell, capture_uploads, filled, tables

T = TypeVar("T")
WORKERS, EXCHANGE, UPDATE, EVALUATION = "workers", "exchange", "update", "evaluation"  # kinds of work


class NotCapturable(RuntimeError):
    """Work that a device cannot repeat by itself; the message is a clause that says why."""


class ReplayedMark(NamedTuple):
    """A point in time within a graph; each replay takes it anew, so that it is read before the next one."""

    event: Any


class CaptureStage(NamedTuple):
    """A stretch of work that becomes one graph.

    prepare: what the host does each time before the device begins: it seeds generators, writes rates.
    run: tells the device the work; returns the tensors that it leaves.
    """

    prepare: Callable[[], object]
    run: Callable[[], Any]


@dataclass(frozen=True)
class CapturedWork:
    """What is done once in a step, or for one batch of an evaluation, and may be captured.

    Args:
        name: of its kind; what cannot be captured stays eager by kind.
        key: two pieces of work with equal keys ask the device for the same operations on the same memory.
        stages: in their order; the last one's result is that of the work.
        changes: the tensors that it writes besides its result.
        lane: that it is done in; 0 = the training's own stream.
        moment: from which the numbers come that the host makes for it, see `tensors.upload`.
    """

    name: str
    key: Hashable
    stages: Sequence[CaptureStage]
    changes: Callable[[], Sequence[Tensor]]
    lane: int = 0
    moment: Any = None


def eagerly(work: CapturedWork) -> Any:
    """Do the work operation by operation; returns what its last stage returns."""
    out = None
    for stage in work.stages:
        stage.prepare()
        out = stage.run()
    return out


class Graphs:
    """Captures nothing, as on a CPU.

    Args:
        streams: of the device.

    Class attributes:
        captures: whether work can be captured here.
    """

    captures = False

    def __init__(self, streams: Streams | None = None) -> None:
        self.streams = streams or Streams()
        self._lanes: dict[int, tuple[Any, Any]] = {}  # stream and generator
        self._told: dict[int, Any] = {}  # events: the ends of what lanes were told since the last `join`
        self._lane = 0  # that is told work now

    @contextlib.contextmanager
    def lane(self, number: int) -> Iterator[None]:
        """Inside, work goes to a lane; it begins after everything that was told before, but for the other lanes'.

        torch's default generator draws in there from the lane's own: graphs that share one, and that are replayed side
        by side, would overwrite each other's seed.

        Args:
            number: of the lane; 0 = none, the training's own stream.
        """
        if not number:
            yield
            return
        if number not in self._lanes:
            self._lanes[number] = self.streams.new(), self.new_generator()
        stream, generator = self._lanes[number]
        before = self.streams.record()
        self._lane = number
        try:
            with self.streams.on(stream), self.drawing_from(generator):
                self.streams.wait(before)
                yield
                self._told[number] = self.streams.record()
        finally:
            self._lane = 0

    def join(self) -> None:
        """What is told from here on begins after everything that lanes were told."""
        for end in self._told.values():
            self.streams.wait(end)
        self._told.clear()

    def new_generator(self) -> Any:
        """One more random generator of the device."""
        return None

    def drawing_from(self, generator: Any) -> contextlib.AbstractContextManager[Any]:
        """Inside, torch's default generator of the device draws from this one, and seeds it."""
        return contextlib.nullcontext()

    def training(self) -> contextlib.AbstractContextManager[Any]:
        """Around a training whose work is to be captured."""
        return contextlib.nullcontext()

    def capture(self, run: Callable[[], T], pool: str) -> tuple[Callable[..., None], T]:
        """Note what `run` asks of the device, which does nothing of it yet.

        Args:
            run: tells the device the work.
            pool: graphs of one pool and one lane share their memory: they are replayed one after another, and what one
                leaves is used up before another one of the pool begins.

        Returns:
            what repeats the work, called with the moment of `CapturedWork`; and the tensors that it leaves each time.

        Raises:
            NotCapturable: it reads numbers of the device, say.
        """
        raise NotCapturable("there is no device that could repeat it")

    def mark(self) -> ReplayedMark | None:
        """A point in time within the graph that is being captured; None where none is."""
        return None


@dataclass(frozen=True)
class CudaReplay:
    """Repeats captured work.

    Args:
        graph: of torch.cuda.
        cells: whose numbers it reads.
        kept: what it would read or write where it had been: events that it records, and tables that caches may drop.
    """

    graph: Any
    cells: list[Cell]
    kept: list[Any]

    def __call__(self, moment: Any = None) -> None:
        filled(self.cells, self.graph.replay, moment)


class CudaGraphs(Graphs):
    """CUDA graphs of one GPU.

    All of the training runs in one stream of its own, in which its graphs are captured, too: a node of autograd that
    was made in another stream would make the capture fail.

    Args:
        device: which.
    """

    captures = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(CudaStreams(device))
        self.device, self._stream = device, self.streams.new()
        self._pools: dict[tuple[str, int], Any] = {}
        self._marks: list[Any] | None = None  # events of the graph that is being captured, which writes to them

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        outside = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def capture(self, run: Callable[[], T], pool: str) -> tuple[Callable[..., None], T]:
        graph = torch.cuda.CUDAGraph()
        shared = self._pools.setdefault((pool, self._lane), torch.cuda.graph_pool_handle())
        # graphs that were captured in one stream share cuBLAS' workspace
        stream = self._lanes[self._lane][0] if self._lane else self._stream
        marks = self._marks = []
        try:
            with (
                _nothing_collected(),
                capture_uploads(_elsewhere) as cells,
                torch.cuda.graph(graph, shared, stream, capture_error_mode="thread_local"),
            ):
                out = run()
        except RuntimeError as error:
            raise NotCapturable(str(error).strip().partition("\n")[0]) from error
        finally:
            self._marks = None
        for cell in cells:
            cell.place.record_stream(stream)
        return CudaReplay(graph, cells, [*marks, *tables()]), out

    def new_generator(self) -> torch.Generator:
        return torch.Generator(self.device)

    @contextlib.contextmanager
    def drawing_from(self, generator: torch.Generator) -> Iterator[None]:
        default = torch.cuda.default_generators[self.device.index or 0]
        outside = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)
        try:
            yield
        finally:
            default.graphsafe_set_state(outside)

    def mark(self) -> ReplayedMark | None:
        if self._marks is None:
            return None
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        self._marks.append(event)
        return ReplayedMark(event)


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Inside, Python looks for no garbage: a graph of before that is destroyed would end the capture."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _elsewhere(x: Tensor, to: torch.device) -> Tensor:
    """Memory on a device that is none of the graph's which is being captured, from a thread that captures nothing.

    The host fills cells before a replay begins. Memory of the graph may belong to something else until they are read.
    """
    with ThreadPoolExecutor(1) as other:
        return other.submit(torch.empty, x.shape, dtype=x.dtype, device=to).result()


def graphs_of(device: torch.device) -> Graphs:
    """What captures work of a device."""
    return CudaGraphs(device) if device.type == "cuda" else Graphs()
