"""Comm: collectives over (worker axis x process group); Ledger: every byte counted once.

Tensor suffixes: W local workers, A all workers. A tensor `x_W` has the local workers as dimension 0.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from accordion_bench.clock import Clock


class Ledger:
    """Bytes of one run as cumulative integers.

    `payload_bytes` is what one worker hands to the collectives; `wire_bytes` what one worker's own link sends under the
    collective's algorithm (mean over workers): ring all-reduce 2(A-1)/A x payload, all-gather (A-1) x payload.

    Args:
        workers: all workers of the run, A.
    """

    fields = ("payload", "wire", "rounds", "control", "eval", "setup", "dense", "dense_wire")

    def __init__(self, workers: int) -> None:
        self.workers = workers
        # payload, wire and their dense twins are sums over the workers, so that they stay integers
        self.counts = dict.fromkeys(self.fields, 0)

    def all_reduce(self, nbytes: int) -> None:
        """Charge a ring all-reduce to which each worker hands `nbytes`."""
        self._payload(nbytes, wire=2 * (self.workers - 1) * nbytes, rounds=2 * (self.workers - 1))

    def all_gather(self, nbytes: int) -> None:
        """Charge an all-gather to which each worker hands `nbytes`."""
        self._payload(nbytes, wire=self.workers * (self.workers - 1) * nbytes, rounds=self.workers - 1)

    def _payload(self, nbytes: int, wire: int, rounds: int) -> None:
        self.counts["payload"] += self.workers * nbytes
        self.counts["wire"] += wire
        self.counts["rounds"] += rounds

    def dense_step(self, numel: int) -> None:
        """Count what an fp32 ring all-reduce of `numel` coordinates would have cost in this step."""
        self.counts["dense"] += self.workers * 4 * numel
        self.counts["dense_wire"] += 2 * (self.workers - 1) * 4 * numel

    def charge(self, account: str, nbytes: int) -> None:
        """Charge `control`, `eval` or `setup` traffic that each worker sends or receives once."""
        self.counts[account] += nbytes

    def columns(self) -> dict[str, int]:
        """The ledger as it stands in every metrics row; bytes of one worker."""
        c, mean = self.counts, lambda total: round(total / self.workers)
        return {
            "payload_bytes": mean(c["payload"]),
            "wire_bytes": mean(c["wire"]),
            "rounds": c["rounds"],
            "control_bytes": c["control"],
            "eval_bytes": c["eval"],
            "setup_bytes": c["setup"],
            "dense_bytes": mean(c["dense"]),
            "dense_wire_bytes": mean(c["dense_wire"]),
        }


def cast_share(x_W: Tensor, workers: int, dtype: torch.dtype) -> Tensor:
    """What each worker adds to a sum in `dtype`: x / A, cut to the range in which A of them cannot overflow."""
    limit = torch.finfo(dtype).max / workers
    return (x_W / workers).clamp(-limit, limit).to(dtype)


class Comm:
    """Collectives over all workers of the run: first over the worker axis of this process, then over the process group.

    Args:
        workers_per_process: workers that this process hosts, W.
        processes: processes in the default process group; 1 needs no group.
        rank: this process.
        device: where tensors live.
    """

    def __init__(self, workers_per_process: int, processes: int = 1, rank: int = 0, device: str = "cpu") -> None:
        self.local_workers = workers_per_process
        self.processes = processes
        self.rank = rank
        self.device = torch.device(device)
        self.workers = workers_per_process * processes
        self.first_worker = rank * workers_per_process
        self.ledger = Ledger(self.workers)
        self.clock = Clock(self.device)

    @property
    def leader(self) -> bool:
        """Whether this process hosts worker 0, decides, and writes."""
        return self.rank == 0

    def _collective(self, run: Callable[[], object]) -> None:
        start = self.clock.mark()
        if self.processes > 1:
            run()
        self.clock.collective(start)

    def all_reduce_mean(
        self, xs_W: Sequence[Tensor], dtype: torch.dtype | None = None, may_alias: bool = False
    ) -> list[Tensor]:
        """Mean over all workers, in one collective for the whole list.

        Args:
            xs_W: tensors [W, ...].
            dtype: type on the wire, e.g. bfloat16; each worker divides by A before the cast. Default: as given.
            may_alias: the caller keeps nothing in `xs_W`, so a lone worker gets its own tensors back, uncopied.

        Returns:
            tensors [...], in the type of the input.
        """
        if not xs_W:
            return []
        if may_alias and self.workers == 1 and dtype is None:
            self.ledger.all_reduce(sum(x.numel() * x.element_size() for x in xs_W))
            self._collective(lambda: None)
            return [x_W[0] for x_W in xs_W]
        wire_type = dtype or xs_W[0].dtype
        total = sum(x[0].numel() for x in xs_W)
        fused = torch.empty(total, dtype=wire_type, device=xs_W[0].device)
        start, parts = 0, []
        for x_W in xs_W:
            part = fused[start : start + x_W[0].numel()].view(x_W.shape[1:])
            if dtype is None and self.local_workers == 1:
                torch.mul(x_W[0], 1 / self.workers, out=part)
            elif dtype is None:
                torch.sum(x_W, dim=0, out=part)
            else:
                part.copy_(cast_share(x_W, self.workers, wire_type).sum(dim=0))
            parts.append(part)
            start += part.numel()
        self.ledger.all_reduce(total * fused.element_size())
        self._collective(lambda: dist.all_reduce(fused))
        if dtype is None and self.local_workers > 1:
            fused.div_(self.workers)
        return [part.to(x_W.dtype) for part, x_W in zip(parts, xs_W, strict=True)]

    def all_gather(self, message_W: Tensor) -> Tensor:
        """Every worker's message [W, B] of bytes, as [A, B], on every worker."""
        self.ledger.all_gather(message_W.shape[1])
        message_A = message_W if self.processes == 1 else message_W.new_empty(self.workers, message_W.shape[1])
        self._collective(lambda: dist.all_gather_into_tensor(message_A, message_W.contiguous()))
        return message_A

    def sum_(self, x: Tensor, account: str) -> Tensor:
        """Sum of one tensor per process, in place; charged to `account` as one message per worker."""
        self.ledger.charge(account, x.numel() * x.element_size())
        if self.processes > 1:
            dist.all_reduce(x)
        return x

    def broadcast_(self, xs: Sequence[Tensor], account: str) -> None:
        """Overwrite `xs` with the leader's, in one message; charged to `account`."""
        if not xs:
            return
        self.ledger.charge(account, sum(x.numel() * x.element_size() for x in xs))
        if self.processes > 1:
            fused = torch.cat([x.detach().reshape(-1) for x in xs])
            dist.broadcast(fused, src=0)
            for x, value in zip(xs, fused.split([x.numel() for x in xs]), strict=True):
                x.detach().copy_(value.view(x.shape))

    def agree(self, value: int, what: str) -> None:
        """Stop the run unless every process has the same integer (a checksum, 8 control bytes).

        Raises:
            RuntimeError: the processes differ.
        """
        self.ledger.charge("control", 8)
        if self.processes > 1:
            lowest = torch.tensor([value, -value], dtype=torch.int64, device=self.device)
            dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
            if lowest[0] != -lowest[1]:
                raise RuntimeError(f"the processes no longer agree on {what}; rank {self.rank} has checksum {value}")

    def barrier(self) -> None:
        """Wait for every process."""
        if self.processes > 1:
            dist.barrier()
