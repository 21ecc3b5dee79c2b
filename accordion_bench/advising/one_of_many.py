"""One worker of many, alone in its process: the others are taken to hand over what it does."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm


class OneOfMany(Comm):
    """Collectives of A workers of which only the first is there, with the bytes, tensors and code of a real run's.

    Simulated workers of one process are summed without a collective; what a worker with a process of its own does is
    another path, and it is that one which takes the time.

    Args:
        workers: A, at least 2.
        device: where tensors live.
    """

    def __init__(self, workers: int, device: str = "cpu") -> None:
        super().__init__(1, workers, 0, device)

    def _run(self, run: Callable[[], object]) -> None:
        """Nobody answers: what arrives is written by whoever calls this."""

    def _arrives(self, write: Callable[[], object]) -> None:
        """A collective, for the clock."""
        start = self.clock.mark()
        write()
        self.clock.collective(start)

    def _summed(self, fused: Tensor) -> Tensor:
        self.ledger.all_reduce(fused.numel() * fused.element_size())
        self._arrives(lambda: fused.mul_(self.workers))
        return fused

    def all_gather(self, message_W: Tensor, account: str = "payload") -> Tensor:
        if account == "payload":
            self.ledger.all_gather(message_W.shape[1])
        message_A = message_W.new_empty(self.workers, message_W.shape[1])
        self._arrives(lambda: message_A.copy_(message_W))
        return message_A

    def all_gather_uneven(self, messages_W: Sequence[Tensor], sizes_A: Sequence[int]) -> list[Tensor]:
        self.ledger.all_gather_uneven(sizes_A)
        (mine,) = messages_W
        parts_A = list(mine.new_empty(sum(sizes_A)).split(list(sizes_A)))
        self._arrives(lambda: _fill_(parts_A, mine))
        return parts_A

    def all_to_all(self, messages_AW: Sequence[Tensor]) -> list[Tensor]:
        self.ledger.all_to_all([message.shape[1] for message in messages_AW])
        mine = messages_AW[0]
        received = mine.new_empty(self.workers, mine.shape[1])
        self._arrives(lambda: received.copy_(mine))
        return [received]

    def send_receive(self, message_W: Tensor, targets_A: Sequence[int]) -> Tensor:
        self.ledger.send_receive(message_W.numel() * message_W.element_size())
        theirs_W = torch.empty_like(message_W)
        self._arrives(lambda: theirs_W.copy_(message_W))
        return theirs_W


def _fill_(parts_A: Sequence[Tensor], mine: Tensor) -> None:
    """All workers' messages: this one's, or zeros where another one owns more or less, and its message is as long."""
    for part in parts_A:
        if len(part) == len(mine):
            part.copy_(mine)
        else:
            part.zero_()
