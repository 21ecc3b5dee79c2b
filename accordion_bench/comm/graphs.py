"""Graphs: capture of GPU work, and its replay without a launch of each kernel by the host.

This is the only module that captures with torch.cuda. On a CPU nothing is captured.

Work can be submitted to lanes that run concurrently: streams, each with its own random generator.
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
    """Raised for work that cannot be captured; the message is a clause with the reason."""


class ReplayedMark(NamedTuple):
    """A timing event within a graph. Each replay records it again, so read it before the next replay."""

    event: Any


class CaptureStage(NamedTuple):
    """A part of work that is captured as one graph; `run` launches it and returns its results.

    `prepare` is host code that runs before each execution, for example seeding generators or writing learning rates.
    """

    prepare: Callable[[], object]
    run: Callable[[], Any]


@dataclass(frozen=True)
class CapturedWork:
    """Work of one step, or of one batch of an evaluation, that can be captured."""

    name: str  # kind of work; if capture fails, all work of this kind stays eager
    key: Hashable  # work with equal keys launches the same operations on the same memory
    stages: Sequence[CaptureStage]  # stages in order; the result of the last stage is the result of the work
    changes: Callable[[], Sequence[Tensor]]  # returns the tensors that the work writes besides its result
    lane: int = 0  # lane in which it runs; 0 = the training's own stream
    moment: Any = None  # source of the numbers that the host computes for it, see `tensors.upload`


def eagerly(work: CapturedWork) -> Any:
    """Run the work without capture, and return the result of its last stage."""
    out = None
    for stage in work.stages:
        stage.prepare()
        out = stage.run()
    return out


class Graphs:
    """Implementation without capture, for a CPU."""

    captures = False  # whether work can be captured

    def __init__(self, streams: Streams | None = None) -> None:
        self.streams = streams or Streams()
        self._lanes: dict[int, tuple[Any, Any]] = {}  # stream and generator
        self._told: dict[int, Any] = {}  # lane -> event at the end of its work since `join`
        self._lane = 0  # the current lane

    @contextlib.contextmanager
    def lane(self, number: int) -> Iterator[None]:
        """Return a context in which work is launched in a lane, after all earlier work except that of other lanes.

        torch's default generator draws from the lane's generator inside: graphs that share a generator and are replayed
        concurrently would overwrite each other's seed. Lane 0 is the training's own stream.
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
        """Make later work wait for all work of the lanes."""
        for end in self._told.values():
            self.streams.wait(end)
        self._told.clear()

    def new_generator(self) -> Any:
        """Create a random generator of the device."""
        return None

    def drawing_from(self, generator: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which torch's default generator of the device uses the state of this one."""
        return contextlib.nullcontext()

    def training(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for a training whose work is captured."""
        return contextlib.nullcontext()

    def capture(self, run: Callable[[], T], pool: str) -> tuple[Callable[..., None], T]:
        """Capture the work that `run` launches, without executing it.

        Graphs of one pool and one lane share memory. They are replayed one after another, and the result of one is
        consumed before the next one of the pool starts.

        Returns:
            a function that replays the work, given the moment of `CapturedWork`; and the tensors that each replay
            writes.

        Raises:
            NotCapturable: the work cannot be captured, for example because the host reads a tensor of the device.
        """
        raise NotCapturable("there is no device that could repeat it")

    def mark(self) -> ReplayedMark | None:
        """Record a timing event in the graph that is being captured; None if no graph is."""
        return None


@dataclass(frozen=True)
class CudaReplay:
    """Replay of captured work."""

    graph: Any  # CUDA graph
    cells: list[Cell]  # cells of numbers that the graph reads
    # objects whose memory the graph uses and which must stay alive: events, and tables that caches may drop
    kept: list[Any]

    def __call__(self, moment: Any = None) -> None:
        filled(self.cells, self.graph.replay, moment)


class CudaGraphs(Graphs):
    """CUDA graphs of one GPU.

    The whole training runs in one side stream, in which its graphs are also captured, because an autograd node that was
    created in another stream makes the capture fail.
    """

    captures = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(CudaStreams(device))
        self.device, self._stream = device, self.streams.new()
        self._pools: dict[tuple[str, int], Any] = {}
        self._marks: list[Any] | None = None  # events of the graph that is being captured

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
    """Disable Python's garbage collection inside, because destroying an older graph would abort the capture."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _elsewhere(x: Tensor, to: torch.device) -> Tensor:
    """Allocate device memory outside the pool of the graph that is being captured, from a thread without a capture.

    The host fills cells before a replay starts. Memory of the graph's pool could be reused before they are read.
    """
    with ThreadPoolExecutor(1) as other:
        return other.submit(torch.empty, x.shape, dtype=x.dtype, device=to).result()


def graphs_of(device: torch.device) -> Graphs:
    """Return the `Graphs` of a device."""
    return CudaGraphs(device) if device.type == "cuda" else Graphs()
