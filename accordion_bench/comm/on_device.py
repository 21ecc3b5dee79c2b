"""Device-specific functions: names, streams and events, options of NCCL, copies to the CPU; the communication thread.

This is the only module that uses streams of torch.cuda. On a CPU, which executes in order, all stream methods are
no-ops.

The communication thread runs exchanges in the order of submission, which is the same in every process, so that
collectives match. On a GPU it has its own stream. For each tensor that is passed between streams (inputs, results and
state of the work), an event separates the write on one stream from the read on the other, and its memory is kept until
the other stream has used it.
"""

import contextlib
import datetime
import platform
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def processor_name() -> str:
    """Return the model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def gpu_models() -> list[str]:
    """Return the models of all GPUs visible to this process."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def nccl_options(timeout: datetime.timedelta | None) -> Any:
    """Return options of one NCCL group: a high-priority stream, for exchanges that overlap the backward pass.

    Each group needs a new object, because torch writes the group's name into it. Without a timeout torch's is used.
    """
    chosen = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        chosen._timeout = timeout  # torch warns if it differs from that of the group
    return chosen


def nccl_sub_group_options(timeout: datetime.timedelta | None) -> dict[str, Any]:
    """Return keyword arguments of `new_group`; {} if the default group does not use NCCL.

    torch splits the new group from the default group eagerly, because that is bound to its GPU.
    """
    over_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return {"pg_options": nccl_options(timeout)} if over_nccl else {}


class Streams:
    """Stream interface of a device; this class is for CPUs, where all methods are no-ops."""

    def use_device(self) -> None:
        """Select the device for this thread; otherwise it would create a context on another one."""

    def new(self, urgent: bool = False) -> Any:
        """Create a stream, with high priority if `urgent`."""
        return None

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Context in which this thread launches work on a stream."""
        return contextlib.nullcontext()

    def record(self) -> Any:
        """Record and return an event on the current stream of this thread."""
        return None

    def wait(self, event: Any) -> None:
        """Let the current stream of this thread wait for an event; does not block the host."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors from another stream until the current stream of this thread has used it."""


class CudaStreams(Streams):
    """Streams of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def use_device(self) -> None:
        torch.cuda.set_device(self.device)

    def new(self, urgent: bool = False) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device, priority=-1 if urgent else 0)

    def on(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        stream = torch.cuda.current_stream(self.device)
        for x in tensors:
            x.record_stream(stream)


def streams_of(device: torch.device) -> Streams:
    """Return the stream interface of a device."""
    return CudaStreams(device) if device.type == "cuda" else Streams()


def copy_on_cpu(x: Tensor) -> Tensor:
    """Return a copy on the CPU, without a second copy on the device."""
    return x.detach().to("cpu", copy=True)


@torch.no_grad()
def restore_(x: Tensor, saved: Tensor) -> None:
    """x <- saved; ValueError if the shapes differ, because `copy_` would broadcast."""
    if saved.shape != x.shape:
        raise ValueError(f"a tensor has the shape {list(saved.shape)} where {list(x.shape)} belongs")
    x.copy_(saved)


State = Callable[[], Iterable[Tensor]]


class Work(NamedTuple):
    """Submitted work; `computed` is the event after which its input tensors are complete."""

    future: Future
    run: Callable[[], list[Tensor]]
    inputs: Iterable[Tensor]
    state: State
    computed: Any


class Transport:
    """Thread that runs submitted work one item after another; after the first failure it runs no more."""

    def __init__(self, device: torch.device) -> None:
        self.streams = streams_of(device)
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._last: Future | None = None
        self._failure: BaseException | None = None
        # a daemon, so that a thread that waits for a lost peer does not keep its process alive
        self._thread = threading.Thread(target=self._run, name="transport", daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], list[Tensor]], inputs: Iterable[Tensor] = (), state: State = tuple
    ) -> "Future[tuple[list[Tensor], State, Any]]":
        """Submit work that returns new tensors.

        Args:
            inputs: tensors that it reads, complete or computed by work that this thread has launched on the device; no
                other code may keep a reference.
            state: returns the tensors that it changes; they may be read and changed after `wait`.
        """
        self._last = Future()
        self._work.put(Work(self._last, work, inputs, state, self.streams.record()))
        return self._last

    def wait(self, future: "Future[tuple[list[Tensor], State, Any]]") -> list[Tensor]:
        """Wait for submitted work, and return its tensors; raise the exception of this work, or of earlier work."""
        tensors, state, done = future.result()
        if self._last is future:
            self._last = None
        self.streams.wait(done)
        self.streams.keep(tensors)
        self.streams.keep(state())
        return tensors

    def drain(self) -> None:
        """Wait until no work is pending, before another thread starts a collective.

        Raises:
            the exception of the work: other processes may still wait in the collectives that it did not run.
        """
        if self._last is not None and threading.current_thread() is not self._thread:
            self.wait(self._last)

    @property
    def failed(self) -> bool:
        """Whether any work has raised an exception."""
        return self._failure is not None

    def reset_after_failure(self) -> None:
        """Wait for pending work and clear its failure, after the set of processes has changed."""
        if self._last is not None:
            futures.wait([self._last])
        self._failure = self._last = None

    def close(self, seconds: float = 0.0) -> bool:
        """Stop the thread after pending work; return whether it ended within `seconds` without a failure."""
        self._work.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive() and not self.failed

    def _run(self) -> None:
        stream = None
        try:
            self.streams.use_device()
            stream = self.streams.new(urgent=True)  # other processes wait for its results
        except BaseException as error:
            self._failure = error
        while (work := self._work.get()) is not None:
            try:
                if self._failure is not None:
                    raise self._failure
                with self.streams.on(stream):
                    self.streams.wait(work.computed)
                    self.streams.keep(work.inputs)
                    self.streams.keep(work.state())
                    tensors = work.run()
                    work.future.set_result((tensors, work.state, self.streams.record()))
                    del tensors
            except BaseException as error:
                self._failure = self._failure or error
                work.future.set_exception(error)
            del work  # otherwise the last gradients would be kept until the next item
