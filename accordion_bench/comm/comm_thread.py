"""Transport: one thread that makes exchanges in the order in which they are handed over.

Every process hands them over in the same order, so that collectives meet their like. On a GPU the thread has a stream
of its own, and tensors change hands by one rule: an event is between what one stream has written and what the other
one reads, and memory that the other one uses is kept until it has done so. That holds for what the work reads, for
what it returns, and for the state that it changes.
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
    """Something that was handed over; `computed` is the event after which its tensors are there."""

    future: Future
    run: Callable[[], list[Tensor]]
    inputs: Iterable[Tensor]
    state: State
    computed: Any


class Transport:
    """Runs work on its thread, one piece after another; after the first failure nothing more is begun.

    Args:
        device: where tensors live.

    """

    def __init__(self, device: torch.device) -> None:
        self.streams = on_device.streams_of(device)
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._last: Future | None = None
        self._failure: BaseException | None = None
        # a daemon: one that waits for a lost peer must not keep its process alive
        self._thread = threading.Thread(target=self._run, name="transport", daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], list[Tensor]], inputs: Iterable[Tensor] = (), state: State = tuple
    ) -> "Future[tuple[list[Tensor], State, Any]]":
        """Hand over work on tensors that are there, or that this thread has told the device to compute.

        Args:
            work: returns new tensors.
            inputs: what it reads; no other code may keep it.
            state: names the tensors that it changes, which may be read and changed once it has been waited for.
        """
        self._last = Future()
        self._work.put(Work(self._last, work, inputs, state, self.streams.record()))
        return self._last

    def wait(self, future: "Future[tuple[list[Tensor], State, Any]]") -> list[Tensor]:
        """The tensors that the work has left.

        Raises:
            what the work has raised, or an earlier piece of it.
        """
        tensors, state, done = future.result()
        if self._last is future:
            self._last = None
        self.streams.wait(done)
        self.streams.keep(tensors)
        self.streams.keep(state())
        return tensors

    def drain(self) -> None:
        """Wait until nothing is under way, before another thread starts a collective.

        Raises:
            what the work has raised: other processes may still be inside the collectives that it has not made.
        """
        if self._last is not None and threading.current_thread() is not self._thread:
            self.wait(self._last)

    @property
    def failed(self) -> bool:
        """Whether a piece of work has raised."""
        return self._failure is not None

    def begin_anew(self) -> None:
        """The processes are others now: what has failed among those before is over, to its last piece."""
        if self._last is not None:
            futures.wait([self._last])
        self._failure = self._last = None

    def close(self, seconds: float = 0.0) -> bool:
        """End the thread, after what has been handed over; whether it has ended well within so many seconds."""
        self._work.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive() and not self.failed

    def _run(self) -> None:
        stream = None
        try:
            self.streams.use_device()
            stream = self.streams.new(urgent=True)  # others wait for what travels
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
            del work  # or the last gradients would live until the next
