"""Collectives among some of the processes, as rings of point-to-point messages that the others do not take part in.

torch names a process group by the number of groups that its processes created before. Processes with different
histories would deadlock in `new_group`; point-to-point messages need no new group.

Tensor suffixes: W local workers, A all workers, S workers that take part.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.ledger import Ledger
from accordion_bench.tensors.same_shape import joined

# words in messages of gloo, NCCL and the store of torch 2.15; older versions use a subset
OF_TIMEOUTS = ("timed out", "timeout", "time out")
OF_LOST_PEERS = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "connection was likely closed",
    "remote process",
    "communicator was aborted",
    "nccl async error",
    "nccl operation failed",
)
OF_COMMUNICATION = (
    "gloo",
    "nccl",
    "[c10d]",
    "wait timeout",
    "socket",
    "failed to recv",
    "broken pipe",
    "reset by peer",
)


def is_timeout(text: str) -> bool:
    """Return whether an error message reports a timeout."""
    return any(words in text.lower() for words in OF_TIMEOUTS)


def communication_error_text(error: BaseException | None) -> str:
    """Return the message of gloo, NCCL or the store in an error or its causes; "" = there is none."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        text = str(error)
        of_both = isinstance(error, RuntimeError) and any(words in text.lower() for words in OF_COMMUNICATION)
        if of_both and any(words in text.lower() for words in (*OF_TIMEOUTS, *OF_LOST_PEERS)):
            return text
        seen.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return ""


class Members(Comm):
    """Communicator of the workers of some processes, with ranks in ascending order; only these processes call it."""

    def __init__(self, comm: Comm, ranks: Sequence[int]) -> None:
        super().__init__(comm.local_workers, len(ranks), ranks.index(comm.rank), str(comm.device))
        self.group, self.clock, self.timeout = comm.group, comm.clock, comm.timeout
        self.transport, self.first_named = comm.transport, comm.first_named
        self._next, self._previous = (ranks[(self.rank + step) % len(ranks)] for step in (1, -1))

    def _summed(self, fused: Tensor) -> Tensor:
        self.ledger.all_reduce(fused.numel() * fused.element_size())
        self._collective(lambda: self._reduce(fused, torch.add))
        return fused

    def all_reduce_max(self, xs: Sequence[Tensor]) -> list[Tensor]:
        if not xs:
            return []
        fused = joined(xs)
        self.ledger.all_reduce(fused.numel() * fused.element_size())
        self._collective(lambda: self._reduce(fused, torch.maximum))
        return list(fused)

    def all_gather(self, message_W: Tensor, account: str = "payload") -> Tensor:
        self.ledger.all_gather(message_W.shape[1])
        W = self.local_workers
        message_A = message_W.new_empty(self.workers, message_W.shape[1])
        message_A[self.rank * W : (self.rank + 1) * W] = message_W
        self._collective(lambda: self._pass_on(list(message_A.split(W)), self.rank))
        return message_A

    def _reduce(self, fused: Tensor, reduce: Callable[..., Tensor]) -> None:
        """Ring reduce-scatter in a fixed order, then a ring all-gather."""
        parts = list(fused.tensor_split(self.processes))
        for step in range(self.processes - 1):
            sent, reduced = (parts[(self.rank - step - back) % self.processes] for back in (0, 1))
            received = torch.empty_like(reduced)
            self._swap(sent, received)
            reduce(received, reduced, out=reduced)
        self._pass_on(parts, self.rank + 1)

    def _pass_on(self, parts: Sequence[Tensor], own: int) -> None:
        """Ring all-gather of the parts; part `own` is the complete one of this process."""
        for step in range(self.processes - 1):
            sent, received = (parts[(own - step - back) % self.processes] for back in (0, 1))
            self._swap(sent, received)

    def _swap(self, sent: Tensor, received: Tensor) -> None:
        work = dist.isend(sent, self._next, group=self.group) if sent.numel() else None
        if received.numel():
            dist.recv(received, self._previous, group=self.group)
        if work is not None:
            work.wait()


class Present(Comm):
    """Communicator of some workers of a run, with its own ledger.

    All processes call its collectives, including those without such a worker, so that all get the result. Tensors
    [W, ...] have rows of all local workers. The numbers of the workers that take part are ascending.
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

    def all_gather(self, message_W: Tensor, account: str = "payload") -> Tensor:
        """Gather the messages [S, B] of the workers that take part."""
        self.ledger.all_gather(message_W.shape[1])
        return self._everyone.all_gather(message_W)[self.numbers]

    def copy_local_rows_(self, message_W: Tensor, message_A: Tensor) -> None:
        for row, worker in enumerate(self.local):
            if worker in self.numbers:
                message_W[row] = message_A[self.numbers.index(worker)]

    def _without_absent(self, xs_W: Sequence[Tensor]) -> list[Tensor]:
        """Zero the rows of absent workers, because a codec may decode them to something else."""
        if not self.absent:
            return list(xs_W)
        rows = torch.tensor(self.absent, device=self.device)
        return [x_W.index_fill(0, rows, 0) for x_W in xs_W]
