"""Collectives among some of the workers, wherever these live: the others' rows are there and count for nothing.

Tensor suffixes: W local workers, A all workers, S those that take part.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.ledger import Ledger


class Present(Comm):
    """Means, largest values and all-gathers of those workers of a run that take part, in a ledger of their own.

    All processes call the collectives, also those without such a worker, so that everybody knows what comes of it.
    Tensors [W, ...] have rows of all local workers.

    Args:
        comm: of all workers.
        workers: numbers of those that take part, ascending.
    """

    def __init__(self, comm: Comm, workers: Sequence[int]) -> None:
        super().__init__(comm.local_workers, comm.processes, comm.rank, str(comm.device))
        self.group, self.clock, self.timeout = comm.group, comm.clock, comm.timeout
        self.transport = comm.transport
        self.numbers, self.workers, self.ledger = list(workers), len(workers), Ledger(len(workers))
        self._everyone = Comm(comm.local_workers, comm.processes, comm.rank, str(comm.device))
        self._everyone.group, self._everyone.clock = comm.group, comm.clock
        self._everyone.transport = comm.transport
        here = set(workers)
        self.absent = [row for row, worker in enumerate(self.local) if worker not in here]

    def all_reduce_mean(
        self, xs_W: Sequence[Tensor], dtype: torch.dtype | None = None, may_alias: bool = False
    ) -> list[Tensor]:
        return super().all_reduce_mean(self._without_absent(xs_W), dtype)

    def all_reduce_mean_flat(self, xs_W: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        return super().all_reduce_mean_flat(self._without_absent(xs_W), dtype)

    def all_gather(self, message_W: Tensor, account: str = "payload") -> Tensor:
        """Messages [S, B] of those that take part."""
        self.ledger.all_gather(message_W.shape[1])
        return self._everyone.all_gather(message_W)[self.numbers]

    def put_own_(self, message_W: Tensor, message_A: Tensor) -> None:
        for row, worker in enumerate(self.local):
            if worker in self.numbers:
                message_W[row] = message_A[self.numbers.index(worker)]

    def _without_absent(self, xs_W: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, with zeros for the absent: a codec may make something else of nothing."""
        if not self.absent:
            return list(xs_W)
        rows = torch.tensor(self.absent, device=self.device)
        return [x_W.index_fill(0, rows, 0) for x_W in xs_W]
