"""A process group of one: every other process is believed to hold what this one holds."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from accordion_bench.comm import collectives
from accordion_bench.conformance.pretend_device import real


class Echo:
    """Stands in for torch.distributed inside `comm.collectives`.

    Args:
        processes: how many there seem to be; this one has rank 0.

    Attributes:
        log: what was called: operation, entries, type.
    """

    class ReduceOp:
        """As torch's."""

        SUM, MAX, MIN = "sum", "max", "min"

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.log: list[tuple[str, int, torch.dtype]] = []

    def get_backend(self, group: Any = None) -> str:
        """Neither gloo nor NCCL."""
        return "echo"

    def _note(self, operation: str, x: Tensor) -> Tensor:
        self.log.append((operation, x.numel(), x.dtype))
        return real(x)

    def all_reduce(self, x: Tensor, op: str = "sum", group: Any = None) -> None:
        """The sum of equal numbers is a multiple; the largest of them is what it was."""
        mine = self._note("all_reduce", x)
        if op == "sum":
            mine.mul_(self.processes)

    def all_gather_into_tensor(self, out: Tensor, x: Tensor, group: Any = None) -> None:
        """All have what this one has."""
        real(out).view(self.processes, -1).copy_(self._note("all_gather", x).reshape(1, -1))

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: list[int], sent: list[int], group: Any = None
    ) -> None:
        """All send what this one sends itself; zeros where another one's share is longer or shorter."""
        mine = self._note("all_to_all", x)[: sent[0]]
        real(out).copy_(torch.cat([mine if size == len(mine) else mine.new_zeros(size) for size in received]))

    def broadcast(self, x: Tensor, group: Any = None, group_src: int = 0) -> None:
        """It stays as it is."""
        self._note("broadcast", x)


@contextlib.contextmanager
def echoed(processes: int) -> Iterator[Echo]:
    """Let collectives of `processes` processes be an echo of this one."""
    echo = Echo(processes)
    with mock.patch.object(collectives, "dist", echo):
        yield echo
