"""Transport: one thread that makes exchanges in the order in which they are handed over.

Every process hands them over in the same order, so that collectives meet their like. On a GPU the thread has a stream
of its own.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor


class Transport:
    """Runs work on its thread, one piece after another; after the first failure nothing more is begun.

    Args:
        device: where tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._work: queue.SimpleQueue[tuple[Future, Callable[[], Any], Sequence[Tensor], Any] | None]
        self._work = queue.SimpleQueue()
        self._last: Future | None = None
        # a daemon: one that waits for a lost peer must not keep its process alive
        self._thread = threading.Thread(target=self._run, name="transport", daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], list[Tensor]], inputs: Sequence[Tensor] = ()
    ) -> "Future[tuple[list[Tensor], Any]]":
        """Hand over work on tensors that are there, or that this thread has told the device to compute.

        Args:
            work: returns new tensors.
            inputs: what it reads and nobody else may keep.
        """
        computed = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        self._last = Future()
        self._work.put((self._last, work, inputs, computed))
        return self._last

    def wait(self, future: "Future[tuple[list[Tensor], Any]]") -> list[Tensor]:
        """The tensors that the work has left.

        Raises:
            what the work has raised, or an earlier piece of it.
        """
        tensors, done = future.result()
        if self._last is future:
            self._last = None
        if done is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(done)
            for x in tensors:
                x.record_stream(stream)
        return tensors

    def drain(self) -> None:
        """Wait until nothing is under way, before another thread starts a collective.

        Raises:
            what the work has raised: other processes may still be inside the collectives that it has not made.
        """
        if self._last is not None and threading.current_thread() is not self._thread:
            self.wait(self._last)

    def close(self) -> None:
        """End the thread, after what has been handed over."""
        self._work.put(None)

    def _run(self) -> None:
        failure: BaseException | None = None
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        while (item := self._work.get()) is not None:
            future, work, inputs, computed = item
            try:
                if failure is not None:
                    raise failure
                with torch.cuda.stream(stream):
                    if stream is not None:
                        stream.wait_event(computed)
                        for x in inputs:  # their memory is the other stream's, which may give it to others
                            x.record_stream(stream)
                    tensors = work()
                    future.set_result((tensors, stream.record_event() if stream is not None else None))
                    del tensors
            except BaseException as error:
                failure = failure or error
                future.set_exception(error)
            del item, future, work, inputs, computed  # or the last gradients would live until the next
