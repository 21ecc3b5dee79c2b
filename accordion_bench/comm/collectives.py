"""Collectives over all workers: first over the local workers of a process, then over the process group.

Tensor suffixes: W local workers, A all workers. Dimension 0 of a tensor `x_W` is the local workers.
"""

import contextlib
import datetime
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accordion_bench.batches import weights
from accordion_bench.comm import on_device
from accordion_bench.comm.clock import Clock
from accordion_bench.comm.ledger import Ledger
from accordion_bench.comm.membership import Membership
from accordion_bench.comm.on_device import Transport
from accordion_bench.tensors import sixteen_bits
from accordion_bench.tensors.same_shape import empty_vector, joined


def split_like(flat: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into consecutive views with the shapes of `likes`."""
    parts = flat.split([like.numel() for like in likes])
    return [part.view(like.shape) for part, like in zip(parts, likes, strict=True)]


def _by_dtype(xs: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield the tensors of each dtype, and their values as one vector."""
    for dtype in dict.fromkeys(x.dtype for x in xs):
        alike = [x for x in xs if x.dtype == dtype]
        yield alike, torch.cat([x.detach().reshape(-1) for x in alike])


class Comm:
    """Communicator of all workers of the run over torch.distributed.

    Args:
        workers_per_process: number of workers of this process, W.
        processes: number of processes in the default process group; 1 needs no group.

    Attributes:
        first_worker, first_named: number of the first local worker among those of this object, and in the whole run,
            for messages; inside `groups` they differ.
    """

    def __init__(self, workers_per_process: int, processes: int = 1, rank: int = 0, device: str = "cpu") -> None:
        self.local_workers = workers_per_process
        self.processes = processes
        self.rank = rank
        self.device = torch.device(device)
        self.workers = workers_per_process * processes
        self.first_worker = self.first_named = rank * workers_per_process
        self.timeout: float | None = None  # seconds after which a collective inside `groups` fails; None = torch's
        self.group: dist.ProcessGroup | None = None  # the default one
        self.before: dist.ProcessGroup | None = None  # used before one was created for this object
        self.made: list[Comm] = []  # communicators whose process groups this object created, see `leave`
        self.grouped = False
        self.connected = True  # false until a process of an elastic run has entered: collectives are no-ops until then
        self.membership = Membership()  # the processes of the run, and the rule for a lost one
        self.samples: tuple[int, ...] = ()  # of each worker per step, by which means are weighted; () = equal batches
        self.weights_W: Tensor | None = None  # A n_w / sum n of the local workers, float64; None = all are 1
        self.transport: Transport | None = None  # communication thread, for which others wait before each collective
        self.ledger = Ledger(self.workers)
        self.clock = Clock(self.device)

    def groups(self, size: int) -> list["Comm"]:
        """Create groups of `size` consecutive workers; return a Comm for each group with local workers.

        Every process must call this at the same point. A group counts bytes in its own ledger until the run's ledger
        absorbs them.

        Raises:
            ValueError: `size` is no divisor of the number of workers, or neither a divisor nor a multiple of those of a
                process.
        """
        W = self.local_workers
        if self.workers % size or (size % W and W % size):
            raise ValueError(f"{self.processes} processes of {W} workers cannot form groups of {size}")
        if size <= W:
            inner = [Comm(size, device=str(self.device)) for _ in range(W // size)]
        else:
            span = size // W
            spans = [range(first, first + span) for first in range(0, self.processes, span)]
            timeout = None if self.timeout is None else datetime.timedelta(seconds=self.timeout)
            groups = [
                dist.new_group(list(ranks), timeout=timeout, **on_device.nccl_sub_group_options(timeout))
                for ranks in spans
            ]
            comm = Comm(W, span, self.rank % span, str(self.device))
            mine = groups[self.rank // span]
            assert isinstance(mine, dist.ProcessGroup)
            comm.group = mine
            self.made.append(comm)
            inner = [comm]
        for i, comm in enumerate(inner):
            comm.clock, comm.timeout, comm.transport = self.clock, self.timeout, self.transport
            comm.first_named = self.first_named + i * comm.local_workers
            first = comm.first_named // size * size
            comm.weigh(self.samples[first : first + size])
        self.grouped = True
        return inner

    def settle(self, charged: bool = True) -> None:
        """Sum the bytes of groups over the processes. Every process calls it before it reads or saves the ledger.

        8 control bytes per number are charged, except for checkpoints, which change no count.
        """
        if not self.grouped:
            return
        views = list(self.ledger.views.values())
        if charged:
            self.ledger.charge("control", 8 * len(views))
        if self.processes > 1:
            total = torch.tensor(views, dtype=torch.int64, device=self.device)
            self._run(lambda: dist.all_reduce(total, group=self.group))
            views = [spent // self.processes for spent in total.tolist()]
        self.ledger.settled(views)

    def weigh(self, samples: Sequence[int]) -> None:
        """Weight all later means by the number of samples of each worker; () = equal weights.

        The weights are updated in place, because captured graphs read them at a fixed address.
        """
        self.samples = tuple(samples)
        if not samples:
            self.weights_W = None
            return
        own = torch.tensor(weights(samples), dtype=torch.float64)[self.first_worker :][: self.local_workers]
        if self.weights_W is None:
            self.weights_W = own.to(self.device)
        else:
            self.weights_W.copy_(own)

    def weighted(self, x_W: Tensor) -> Tensor:
        """Multiply tensors of the local workers [W, ...] by A n_w / sum n: their plain mean is then the weighted one.

        Return the same tensor if all workers have equally many samples.
        """
        if self.weights_W is None:
            return x_W
        return x_W * self.weights_W.to(x_W.dtype).view(-1, *[1] * (x_W.ndim - 1))

    def resize(self, processes: int, rank: int) -> None:
        """Set the number of processes in the default process group, and the rank of this process."""
        self.processes, self.rank, self.connected = processes, rank, True
        self.workers, self.first_worker = self.local_workers * processes, rank * self.local_workers
        self.first_named = self.first_worker
        self.ledger.resized(self.workers)
        if self.transport is not None:
            self.transport.reset_after_failure()

    @property
    def local(self) -> range:
        """Numbers of the local workers in the run."""
        return range(self.first_worker, self.first_worker + self.local_workers)

    @property
    def leader(self) -> bool:
        """Whether this process hosts worker 0, takes decisions and writes files."""
        return self.rank == 0

    def _collective(self, run: Callable[[], object]) -> None:
        start = self.clock.mark()
        self._run(run)
        self.clock.collective(start)

    def _run(self, run: Callable[[], object]) -> None:
        """Run a collective after those of the communication thread, so that all ranks keep one order."""
        if self.transport is not None:
            self.transport.drain()
        if self.processes > 1 and self.connected:
            run()

    def all_reduce_mean(
        self, xs_W: Sequence[Tensor], dtype: torch.dtype | None = None, may_alias: bool = False
    ) -> list[Tensor]:
        """Return the means over all workers, in one all-reduce for the whole list.

        Args:
            xs_W: tensors [W, ...].
            dtype: dtype on the wire, e.g. bfloat16; each worker divides by A before the cast. None = that of the input.
            may_alias: whether `xs_W` may be overwritten or returned: a single worker then gets its tensors uncopied,
                and a GPU reduces in place.

        Returns:
            tensors [...], in the dtype of the input.
        """
        if not xs_W:
            return []
        if may_alias and self.workers == 1 and dtype is None:
            self.ledger.all_reduce(sum(x.numel() * x.element_size() for x in xs_W))
            self._collective(lambda: None)
            return [x_W[0] for x_W in xs_W]
        if xs_W[0].device.type != "cpu":
            return split_like(self._mean_flat(xs_W, dtype, may_alias), [x_W[0] for x_W in xs_W])
        likes = [x_W[0] for x_W in xs_W]
        if dtype is not None:
            narrow = self._summed(sixteen_bits.sum_of_shares(xs_W, self.workers, dtype))
            return split_like(sixteen_bits.widened(narrow, likes[0].dtype), likes)
        fused = empty_vector(sum(like.numel() for like in likes), likes[0].dtype, likes[0].device)
        parts = split_like(fused, likes)
        for x_W, part in zip(xs_W, parts, strict=True):
            if self.local_workers == 1:
                torch.mul(x_W[0], 1 / self.workers, out=part)
            else:
                torch.sum(x_W, dim=0, out=part)
        self._summed(fused)
        if self.local_workers > 1:
            fused.div_(self.workers)
        return parts

    def _summed(self, fused: Tensor) -> Tensor:
        self.ledger.all_reduce(fused.numel() * fused.element_size())
        self._collective(lambda: dist.all_reduce(fused, group=self.group))
        return fused

    def _mean_flat(self, xs_W: Sequence[Tensor], dtype: torch.dtype | None, may_alias: bool) -> Tensor:
        """Return the means on a GPU as one vector, in the order of `xs_W`, in a few launches."""
        if dtype is None:
            rows = [x_W[0] for x_W in xs_W]
            fused = joined(rows) if may_alias else torch.cat([row.reshape(-1) for row in rows])
            parts = split_like(fused, [x_W[0] for x_W in xs_W])
            for row in range(1, self.local_workers):
                torch._foreach_add_(parts, [x_W[row] for x_W in xs_W])
            if self.local_workers == 1:
                fused.mul_(1 / self.workers)
        else:
            fused = sixteen_bits.sum_of_shares(xs_W, self.workers, dtype)
        self._summed(fused)
        if dtype is not None:
            return sixteen_bits.widened(fused, xs_W[0].dtype)
        return fused if self.local_workers == 1 else fused.div_(self.workers)

    def all_reduce_max(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Return the maximum of each scalar over all workers. Each process passes the maximum of its local workers."""
        if not xs:
            return []
        fused = joined(xs)
        self.ledger.all_reduce(fused.numel() * fused.element_size())
        self._collective(lambda: dist.all_reduce(fused, op=dist.ReduceOp.MAX, group=self.group))
        return list(fused)

    def all_gather(self, message_W: Tensor, account: str = "payload") -> Tensor:
        """Gather messages [W, B] of bytes of all workers as [A, B]; charged as payload, or to `account`."""
        if account == "payload":
            self.ledger.all_gather(message_W.shape[1])
        else:
            nbytes, others = message_W.shape[1], self.workers - 1
            self.ledger.charge(account, nbytes, wire=self.workers * others * nbytes, rounds=others)
        message_A = message_W if self.processes == 1 else message_W.new_empty(self.workers, message_W.shape[1])
        self._collective(lambda: dist.all_gather_into_tensor(message_A, message_W.contiguous(), group=self.group))
        return message_A

    def copy_local_rows_(self, message_W: Tensor, message_A: Tensor) -> None:
        """Copy the rows of the local workers from the gathered messages [A, B] into [W, B]."""
        message_W.copy_(message_A[self.first_worker : self.first_worker + self.local_workers])

    def all_gather_uneven(self, messages_W: Sequence[Tensor], sizes_A: Sequence[int]) -> list[Tensor]:
        """Return the 1-D messages of bytes of all workers in order, of these different sizes, without padding."""
        self.ledger.all_gather_uneven(sizes_A)
        here, W = joined(messages_W), self.local_workers
        if self.processes == 1:
            self._collective(lambda: None)
            return list(here.split(list(sizes_A)))
        by_process = [sum(sizes_A[first : first + W]) for first in range(0, self.workers, W)]
        everywhere = here.new_empty(sum(by_process))
        # an all-gather of unequal parts equals an all-to-all in which each process sends the same data to all others
        if self.device.type == "cuda" and dist.get_backend(self.group) == "nccl":  # takes lists: views, without copies
            sent, received = [here] * self.processes, list(everywhere.split(by_process))
            self._collective(lambda: dist.all_to_all(received, sent, group=self.group))
            return list(everywhere.split(list(sizes_A)))
        self._collective(
            lambda: dist.all_to_all_single(
                everywhere, here.repeat(self.processes), by_process, [len(here)] * self.processes, group=self.group
            )
        )
        return list(everywhere.split(list(sizes_A)))

    def all_to_all(self, messages_AW: Sequence[Tensor]) -> list[Tensor]:
        """Send to each worker of the run the bytes [W, B] from the local workers; return the bytes [A, B] for each."""
        sizes = [message.shape[1] for message in messages_AW]
        self.ledger.all_to_all(sizes)
        if self.processes == 1:
            self._collective(lambda: None)
            return list(messages_AW)
        W = self.local_workers
        sent = joined(messages_AW)
        mine = sizes[self.first_worker : self.first_worker + W]
        splits = [W * sum(sizes[first : first + W]) for first in range(0, self.workers, W)]
        received = sent.new_empty(self.processes * W * sum(mine))
        whole = [W * sum(mine)] * self.processes
        self._collective(lambda: dist.all_to_all_single(received, sent, whole, splits, group=self.group))
        if W == 1:
            return [received.view(self.processes, mine[0])]
        per_process = [part.split([W * size for size in mine]) for part in received.chunk(self.processes)]
        return [torch.cat([parts[own].view(W, size) for parts in per_process]) for own, size in enumerate(mine)]

    def send_receive(self, message_W: Tensor, targets_A: Sequence[int | None]) -> Tensor:
        """Send a message of each worker to another worker, and return those that the local workers receive, [W, ...].

        Uses concurrent point-to-point messages, at most one per pair of processes and direction. Charged as payload.

        Messages have equal size on all workers. `targets_A` has the number of the worker to which each worker of the
        run sends, without duplicates; None = it sends nothing. A worker that receives no message gets its own.
        """
        self.ledger.send_receive(message_W[0].numel() * message_W.element_size(), targets_A)
        W, first = self.local_workers, self.first_worker
        theirs_W = message_W.clone() if None in targets_A else torch.empty_like(message_W)
        outgoing: dict[int, list[int]] = {}  # rows by process, in the order of the senders, which both sides know
        incoming: dict[int, list[int]] = {}
        for sender, target in enumerate(targets_A):
            if target is None:
                continue
            source, there = sender // W, target // W
            if source == there == self.rank:
                theirs_W[target - first] = message_W[sender - first]
            elif source == self.rank:
                outgoing.setdefault(there, []).append(sender - first)
            elif there == self.rank:
                incoming.setdefault(source, []).append(target - first)
        received = {peer: message_W.new_empty(len(rows), *message_W.shape[1:]) for peer, rows in incoming.items()}
        calls: list[tuple[int, Any, Tensor]]
        calls = [(peer, dist.isend, message_W[rows]) for peer, rows in outgoing.items()]
        calls += [(peer, dist.irecv, x) for peer, x in received.items()]
        calls.sort(key=lambda call: call[0])
        ops = [dist.P2POp(call, x, group=self.group, group_peer=peer) for peer, call, x in calls]
        self._collective(lambda: [work.wait() for work in dist.batch_isend_irecv(ops)] if ops else None)
        for peer, rows in incoming.items():
            theirs_W[rows] = received[peer]
        return theirs_W

    def sum_(self, x: Tensor, account: str) -> Tensor:
        """Sum one tensor per process in place; charged to `account` as one message per worker."""
        nbytes, ring = x.numel() * x.element_size(), 2 * (self.workers - 1)
        self.ledger.charge(account, nbytes, wire=ring * nbytes, rounds=ring)
        self._run(lambda: dist.all_reduce(x, group=self.group))
        return x

    def broadcast_(self, xs: Sequence[Tensor], account: str) -> None:
        """Overwrite `xs` with those of the leader, in one message per dtype; charged to `account` as one message."""
        if not xs:
            return
        nbytes, others = sum(x.numel() * x.element_size() for x in xs), self.workers - 1
        self.ledger.charge(account, nbytes, wire=others * nbytes, rounds=others)
        if self.processes == 1:
            return
        for alike, fused in _by_dtype(xs):
            self._run(functools.partial(dist.broadcast, fused, group=self.group, group_src=0))
            for x, value in zip(alike, split_like(fused, alike), strict=True):
                x.detach().copy_(value)

    def send_tensors_(self, xs: Sequence[Tensor], source: int, receivers: Sequence[int]) -> None:
        """Send `xs` from one process to some others, which overwrite theirs. Only these processes call it.

        Sends one message per dtype and receiver. The caller charges the ledger. Shapes and dtypes are the same on all
        of these processes; tensors may be not contiguous.
        """
        for alike, fused in _by_dtype(xs):
            if self.rank == source:
                for receiver in receivers:
                    self._run(functools.partial(dist.send, fused, receiver, group=self.group))
                continue
            self._run(functools.partial(dist.recv, fused, source, group=self.group))
            for x, value in zip(alike, split_like(fused, alike), strict=True):
                x.detach().copy_(value)

    def told(self, said: Any, source: int, receivers: Sequence[int]) -> Any:
        """Send an object from one process to some others; only these call it. Neither counted nor timed."""
        heard = [said]
        if self.rank == source:
            for receiver in receivers:
                self._run(functools.partial(dist.send_object_list, heard, receiver, group=self.group))
        else:
            self._run(functools.partial(dist.recv_object_list, heard, source, group=self.group))
        return heard[0]

    def agree(self, value: int, what: str) -> None:
        """Raise RuntimeError unless every process passes the same integer; 8 control bytes, not timed."""
        if not self.same(value):
            raise RuntimeError(f"the processes no longer agree on {what}; rank {self.rank} has checksum {value}")

    def same(self, value: int) -> bool:
        """Return on every process whether all passed the same integer; 8 control bytes, not timed."""
        self.ledger.charge("control", 8)
        if self.processes == 1:
            return True
        lowest = torch.tensor([value, -value], dtype=torch.int64, device=self.device)
        self._run(lambda: dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self.group))
        return bool(lowest[0] == -lowest[1])

    def gather_objects(self, said: Any) -> list[Any]:
        """Gather an object of each process, by rank. Neither counted nor timed, so that no metric changes."""
        heard = [said] * self.processes
        self._run(lambda: dist.all_gather_object(heard, said, group=self.group))
        return heard

    def leave(self) -> None:
        """Destroy the gloo groups that were created for this object, after the last collective.

        Threads of gloo may hold tensors for a moment longer than a collective takes. A process that exits meanwhile
        aborts ("terminate called without an active exception"), because the threads cannot release the tensors to
        Python any more. They are joined when the last reference to a destroyed group is gone. NCCL has no such threads,
        and destroying its groups waits for the other processes.
        """
        while self.made:
            made = self.made.pop()
            group, made.group = made.group, made.before
            with contextlib.suppress(ValueError, RuntimeError):  # the user destroyed all groups
                if dist.is_initialized() and dist.get_backend(group) == "gloo":
                    dist.destroy_process_group(group)

    def barrier(self) -> None:
        """Wait until every process has called this."""
        self._run(lambda: dist.barrier(group=self.group))
