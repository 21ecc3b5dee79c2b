"""Transport: one thread that makes exchanges in the order in which they are handed over.

Every process hands them over in the same order, so that collectives meet their like. On a GPU the thread has a stream
of its own.
"""

import queue
import threading
from collections.abc import Callable
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
        self._work: queue.SimpleQueue[tuple[Future, Callable[[], Any], Any]] = queue.SimpleQueue()
        self._last: Future | None = None
        # a daemon: one that waits for a lost peer must not keep its process alive
        self._thread = threading.Thread(target=self._run, name="transport", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], list[Tensor]]) -> "Future[tuple[list[Tensor], Any]]":
        """Hand over work on tensors that are there, or that this thread has told the device to compute."""
        computed = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None
        self._last = Future()
        self._work.put((self._last, work, computed))
        return self._last

    def wait(self, future: "Future[tuple[list[Tensor], Any]]") -> list[Tensor]:
        """The tensors that the work has left.

        Raises:
            what the work has raised, or an earlier piece of it.
        """
        tensors, done = future.result()
        if done is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(done)
            for x in tensors:
                x.record_stream(stream)
        return tensors

    def drain(self) -> None:
        """Wait until nothing is under way, before another thread starts a collective."""
        if self._last is not None and threading.current_thread() is not self._thread:
            last, self._last = self._last, None
            last.exception()

    def _run(self) -> None:
        failure: BaseException | None = None
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        while True:
            future, work, computed = self._work.get()
            try:
                if failure is not None:
                    raise failure
                with torch.cuda.stream(stream):
                    if stream is not None:
                        stream.wait_event(computed)
                    tensors = work()
                    future.set_result((tensors, stream.record_event() if stream is not None else None))
            except BaseException as error:
                failure = failure or error
                future.set_exception(error)
            del future, work, computed  # or the last gradients would live until the next
