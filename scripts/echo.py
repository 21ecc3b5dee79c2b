"""Replacement for other processes: every other one behaves like this one, which needs no process group."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from accordion_bench.comm import collectives
from accordion_bench.conformance.pretend_device import real


class Echo:
    """Replacement for torch.distributed: every other process behaves like this one, which has rank 0.

    Attributes:
        log: calls as (operation, number of entries, dtype).
    """

    class ReduceOp:
        SUM, MAX, MIN = "sum", "max", "min"

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.log: list[tuple[str, int, torch.dtype]] = []

    def get_backend(self, group: Any = None) -> str:
        """Return a name that is neither gloo nor nccl."""
        return "echo"

    def _note(self, operation: str, x: Tensor) -> Tensor:
        self.log.append((operation, x.numel(), x.dtype))
        return real(x)

    def all_reduce(self, x: Tensor, op: str = "sum", group: Any = None) -> None:
        """Multiply by the number of processes for a sum; keep the values for max and min."""
        mine = self._note("all_reduce", x)
        if op == "sum":
            mine.mul_(self.processes)

    def all_gather_into_tensor(self, out: Tensor, x: Tensor, group: Any = None) -> None:
        """Repeat this process's values for every process."""
        real(out).view(self.processes, -1).copy_(self._note("all_gather", x).reshape(1, -1))

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: list[int], sent: list[int], group: Any = None
    ) -> None:
        """Receive this process's own share from every process; zeros where the sizes differ."""
        mine = self._note("all_to_all", x)[: sent[0]]
        real(out).copy_(torch.cat([mine if size == len(mine) else mine.new_zeros(size) for size in received]))

    def broadcast(self, x: Tensor, group: Any = None, group_src: int = 0) -> None:
        """Keep the values."""
        self._note("broadcast", x)


@contextlib.contextmanager
def echoed(processes: int) -> Iterator[Echo]:
    """Replace collectives by an echo of this process within the block."""
    echo = Echo(processes)
    with mock.patch.object(collectives, "dist", echo):
        yield echo
