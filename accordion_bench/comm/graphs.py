"""Graphs: work that a device is told once and then repeats by itself, without the host that told it.

The only room that captures with torch.cuda. A CPU is told everything each time: there nothing is captured.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
WORKERS, EXCHANGE, UPDATE, EVALUATION = "workers", "exchange", "update", "evaluation"  # kinds of work


class NotCapturable(RuntimeError):
    """Work that a device cannot repeat by itself; the message is a clause that says why."""


class ReplayedMark(NamedTuple):
    """A point in time within a graph; each replay takes it anew, so that it is read before the next one."""

    event: Any


class Stage(NamedTuple):
    """A stretch of work that becomes one graph.

    prepare: what the host does each time before the device begins: it seeds generators, writes rates.
    run: tells the device the work; returns the tensors that it leaves.
    """

    prepare: Callable[[], object]
    run: Callable[[], Any]


@dataclass(frozen=True)
class Work:
    """What is done once in a step, or for one batch of an evaluation, and may be captured.

    Args:
        name: of its kind; what cannot be captured stays eager by kind.
        key: two pieces of work with equal keys ask the device for the same operations on the same memory.
        stages: in their order; the last one's result is that of the work.
        changes: the tensors that it writes besides its result.
    """

    name: str
    key: Hashable
    stages: Sequence[Stage]
    changes: Callable[[], Sequence[Tensor]]


def eagerly(work: Work) -> Any:
    """Do the work operation by operation; returns what its last stage returns."""
    out = None
    for stage in work.stages:
        stage.prepare()
        out = stage.run()
    return out


class Graphs:
    """Captures nothing, as on a CPU.

    Class attributes:
        captures: whether work can be captured here.
    """

    captures = False

    def training(self) -> contextlib.AbstractContextManager[Any]:
        """Around a training whose work is to be captured."""
        return contextlib.nullcontext()

    def capture(self, run: Callable[[], T], pool: str) -> tuple[Callable[[], None], T]:
        """Note what `run` asks of the device, which does nothing of it yet.

        Args:
            run: tells the device the work.
            pool: graphs of one pool share their memory: they are replayed one after another, and what one leaves is
                used up before another one of the pool begins.

        Returns:
            what repeats the work, and the tensors that it leaves each time.

        Raises:
            NotCapturable: it reads numbers of the device, say.
        """
        raise NotCapturable("there is no device that could repeat it")

    def mark(self) -> ReplayedMark | None:
        """A point in time within the graph that is being captured; None where none is."""
        return None


class CudaGraphs(Graphs):
    """CUDA graphs of one GPU.

    All of the training runs in one stream of its own, in which its graphs are captured, too: a node of autograd that
    was made in another stream would make the capture fail.

    Args:
        device: which.
    """

    captures = True

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.cuda.Stream(device)
        self._pools: dict[str, Any] = {}
        self._capturing = False

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        outside = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def capture(self, run: Callable[[], T], pool: str) -> tuple[Callable[[], None], T]:
        graph = torch.cuda.CUDAGraph()
        shared = self._pools.setdefault(pool, torch.cuda.graph_pool_handle())
        self._capturing = True
        try:
            with torch.cuda.graph(graph, shared, self._stream, capture_error_mode="thread_local"):
                out = run()
        except RuntimeError as error:
            raise NotCapturable(str(error).strip().partition("\n")[0]) from error
        finally:
            self._capturing = False
        return graph.replay, out

    def mark(self) -> ReplayedMark | None:
        if not self._capturing:
            return None
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        return ReplayedMark(event)


def graphs_of(device: torch.device) -> Graphs:
    """What captures work of a device."""
    return CudaGraphs(device) if device.type == "cuda" else Graphs()
