"""Upload: batches that are copied to a GPU while it computes."""

from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.comm import on_device


class Sent(NamedTuple):
    """Tensors on their way; they are there after `event`."""

    tensors: list[Tensor]
    event: object


class Upload:
    """Copies from pinned memory on a stream of their own; on a CPU tensors are where they are.

    Args:
        device: where they go.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.streams = device, on_device.streams_of(device)
        self._stream = self.streams.new()

    def send(self, tensors: tuple[Tensor, ...]) -> Sent:
        """Let copies begin; the host does not wait where the tensors are pinned."""
        with self.streams.on(self._stream):
            there = [x.to(self.device, non_blocking=True) for x in tensors]
            return Sent(there, self.streams.record())

    def receive(self, sent: Sent) -> list[Tensor]:
        """The tensors, for this thread's stream."""
        self.streams.wait(sent.event)
        self.streams.keep(sent.tensors)
        return sent.tensors
