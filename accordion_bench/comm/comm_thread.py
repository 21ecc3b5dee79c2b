"""Communication thread, which runs exchanges in the order of submission.

Every process submits them in the same order, so that collectives match. On a GPU the thread has its own stream. For
each tensor that is passed between streams, an event separates the write on one stream from the read on the other, and
its memory is kept until the other stream has used it. This applies to inputs, results and state of the work.
"""

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accordion_bench.comm import on_device

State = Callable[[], Iterable[Tensor]]


class Work(NamedTuple):
    """Submitted work; `computed` is the event after which its input tensors are complete."""

    future: Future
    run: Callable[[], list[Tensor]]
    inputs: Iterable[Tensor]
    state: State
    computed: Any


class Transport:
    """Thread that runs submitted work one item after another; after the first failure it runs no more.

    Args:
        device: device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = on_device.streams_of(device)
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._last: Future | None = None
        self._failure: BaseException | None = None
        # a daemon, so that a thread that waits for a lost peer does not keep its process alive
        self._thread = threading.Thread(target=self._run, name="transport", daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], list[Tensor]], inputs: Iterable[Tensor] = (), state: State = tuple
    ) -> "Future[tuple[list[Tensor], State, Any]]":
        """Submit work on tensors that are complete, or whose computation this thread has launched on the device.

        Args:
            work: function that returns new tensors.
            inputs: tensors that it reads; no other code may keep a reference.
            state: returns the tensors that it changes; they may be read and changed after `wait`.
        """
        self._last = Future()
        self._work.put(Work(self._last, work, inputs, state, self.streams.record()))
        return self._last

    def wait(self, future: "Future[tuple[list[Tensor], State, Any]]") -> list[Tensor]:
        """Wait for submitted work, and return its tensors.

        Raises:
            the exception of this work, or of earlier work.
        """
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
