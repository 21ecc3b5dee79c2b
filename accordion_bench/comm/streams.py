"""Streams: queues of a GPU, what of one must wait for what of another, and whose memory is still in use.

The only room that touches torch.cuda's streams. A CPU runs everything in order: there all of this does nothing.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Streams:
    """The streams of a device; of a CPU, which has none."""

    def use_device(self) -> None:
        """This thread works on the device; else it would open another one's context."""

    def new(self, urgent: bool = False) -> Any:
        """One more stream; of what waits on the device, urgent work goes first."""
        return None

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """What this thread tells the device in here goes to this stream."""
        return contextlib.nullcontext()

    def record(self) -> Any:
        """An event: when the device has done what this thread's stream was told so far."""
        return None

    def wait(self, event: Any) -> None:
        """What this thread's stream is told from here on begins after an event; the host does not wait."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """This thread's stream uses tensors of another one's memory, which is not given away before that is done."""


class CudaStreams(Streams):
    """The streams of one GPU.

    Args:
        device: which.
    """

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
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
