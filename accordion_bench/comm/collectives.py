"""Comm: collectives over (worker axis x process group).

Tensor suffixes: W local workers, A all workers. A tensor `x_W` has the local workers as dimension 0.
"""

import contextlib
import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accordion_bench.batches import weights
from accordion_bench.comm import on_device
from accordion_bench.comm.clock import Clock
from accordion_bench.comm.comm_thread import Transport
from accordion_bench.comm.ledger import Ledger
from accordion_bench.comm.membership import Membership
from accordion_bench.tensors import large_pages, sixteen_bits
from accordion_bench.tensors.same_shape import joined


def split_like(flat: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive parts of a vector as tensors of given shapes; views."""
    parts = flat.split([like.numel() for like in likes])
    return [part.view(like.shape) for part, like in zip(parts, likes, strict=True)]


class Comm:
    """Collectives over all workers of the run: first over the worker axis of this process, then over the process group.

    Args:
        workers_per_process: workers that this process hosts, W.
        processes: processes in the default process group; 1 needs no group.
        rank: this process.
        device: where tensors live.

    Attributes:
        first_worker: number of the first local worker.
        first_named: its number in the whole run, for messages; another one inside `groups`.
        transport: a thread that makes exchanges, where there is one: other threads wait for it before each collective.
        before: the group before one was made for this object.
        made: those for which groups were made, see `leave`.
        timeout: seconds after which a collective inside `groups` gives up; None = torch's own.
        connected: false before a process that may come and go has entered: until then collectives do nothing.
        membership: the processes, and what they do together.
        samples: of each worker in a step, by which means are weighted; () = all have as many.
        weights_W: A n_w / sum n of the local workers, float64; None = all are 1.
    """

    def __init__(self, workers_per_process: int, processes: int = 1, rank: int = 0, device: str = "cpu") -> None:
        self.local_workers = workers_per_process
        self.processes = processes
        self.rank = rank
        self.device = torch.device(device)
        self.workers = workers_per_process * processes
        self.first_worker = self.first_named = rank * workers_per_process
        self.timeout: float | None = None
        self.group: dist.ProcessGroup | None = None  # the default one
        self.before: dist.ProcessGroup | None = None
        self.made: list[Comm] = []
        self.grouped, self.connected = False, True
        self.membership = Membership()
        self.samples: tuple[int, ...] = ()
        self.weights_W: Tensor | None = None
        self.transport: Transport | None = None
        self.ledger = Ledger(self.workers)
        self.clock = Clock(self.device)

    def groups(self, size: int) -> list["Comm"]:
        """Collectives inside groups of `size` consecutive workers, one Comm for each group with workers here.

        Every process must call this at the same point. What a group spends stands in its own ledger until the run's
        ledger absorbs it.

        Args:
            size: divides the number of workers, and either divides the workers per process or is a multiple of them.

        Raises:
            ValueError: it does not.
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
        """Sum what groups have spent over the processes; every process calls it before it reads or saves the ledger.

        Args:
            charged: 8 control bytes per number, wherever groups live; false for checkpoints, which leave no trace.
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

    # ---- weights

    def weigh(self, samples: Sequence[int]) -> None:
        """From here on means are weighted by so many samples of each worker; () = all are alike.

        What is captured reads the weights where they lie, so that they stay in one place.
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
        """A n_w / sum n times the tensors of the local workers [W, ...]: their plain mean is then the weighted one.

        The same tensor where all have as many samples.
        """
        if self.weights_W is None:
            return x_W
        return x_W * self.weights_W.to(x_W.dtype).view(-1, *[1] * (x_W.ndim - 1))

    # ---- who is here

    def resize(self, processes: int, rank: int) -> None:
        """From here on the default process group has so many processes, and this is one of them."""
        self.processes, self.rank, self.connected = processes, rank, True
        self.workers, self.first_worker = self.local_workers * processes, rank * self.local_workers
        self.first_named = self.first_worker
        self.ledger.resized(self.workers)
        if self.transport is not None:
            self.transport.begin_anew()

    @property
    def local(self) -> range:
        """Numbers of the local workers."""
        return range(self.first_worker, self.first_worker + self.local_workers)

    @property
    def leader(self) -> bool:
        """Whether this process hosts worker 0, decides, and writes."""
        return self.rank == 0

    def _collective(self, run: Callable[[], object]) -> None:
        start = self.clock.mark()
        self._run(run)
        self.clock.collective(start)

    def _run(self, run: Callable[[], object]) -> None:
        """Run a collective, unless this process is alone, and never beside another one: all ranks keep one order."""
        if self.transport is not None:
            self.transport.drain()
        if self.processes > 1 and self.connected:
            run()

    def all_reduce_mean(
        self, xs_W: Sequence[Tensor], dtype: torch.dtype | None = None, may_alias: bool = False
    ) -> list[Tensor]:
        """Mean over all workers, in one collective for the whole list.

        Args:
            xs_W: tensors [W, ...].
            dtype: type on the wire, e.g. bfloat16; each worker divides by A before the cast. Default: as given.
            may_alias: the caller keeps nothing in `xs_W`, so a lone worker gets its own tensors back, uncopied, and
                a device reduces where they lie.

        Returns:
            tensors [...], in the type of the input.
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
        fused = large_pages.empty(sum(like.numel() for like in likes), likes[0].dtype, likes[0].device)
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
        """The sum over all processes, in place; charged as payload."""
        self.ledger.all_reduce(fused.numel() * fused.element_size())
        self._collective(lambda: dist.all_reduce(fused, group=self.group))
        return fused

    def _mean_flat(self, xs_W: Sequence[Tensor], dtype: torch.dtype | None, may_alias: bool) -> Tensor:
        """The same as one vector, in the order of `xs_W`, on a device: in a few launches, however many tensors."""
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
        """Largest value of each scalar over all workers (each process gives its local workers' largest, for good)."""
        if not xs:
            return []
        fused = joined(xs)
        self.ledger.all_reduce(fused.numel() * fused.element_size())
        self._collective(lambda: dist.all_reduce(fused, op=dist.ReduceOp.MAX, group=self.group))
        return list(fused)

    def all_gather(self, message_W: Tensor, account: str = "payload") -> Tensor:
        """Every worker's message [W, B] of bytes, as [A, B], on every worker; charged as payload, or to `account`."""
        if account == "payload":
            self.ledger.all_gather(message_W.shape[1])
        else:
            nbytes, others = message_W.shape[1], self.workers - 1
            self.ledger.charge(account, nbytes, wire=self.workers * others * nbytes, rounds=others)
        message_A = message_W if self.processes == 1 else message_W.new_empty(self.workers, message_W.shape[1])
        self._collective(lambda: dist.all_gather_into_tensor(message_A, message_W.contiguous(), group=self.group))
        return message_A

    def put_own_(self, message_W: Tensor, message_A: Tensor) -> None:
        """Write the local workers' rows of `all_gather`'s [A, B] back into [W, B]."""
        message_W.copy_(message_A[self.first_worker : self.first_worker + self.local_workers])

    def all_gather_uneven(self, messages_W: Sequence[Tensor], sizes_A: Sequence[int]) -> list[Tensor]:
        """Every worker's message of bytes, on every worker; messages differ in size, and nothing is padded.

        Args:
            messages_W: one 1-D message for each local worker.
            sizes_A: the sizes of all workers' messages.

        Returns:
            A messages, in the order of the workers.
        """
        self.ledger.all_gather_uneven(sizes_A)
        here, W = joined(messages_W), self.local_workers
        if self.processes == 1:
            self._collective(lambda: None)
            return list(here.split(list(sizes_A)))
        by_process = [sum(sizes_A[first : first + W]) for first in range(0, self.workers, W)]
        everywhere = here.new_empty(sum(by_process))
        # an all-gather of unequal parts is an all-to-all in which each process sends all others the same
        if self._takes_lists():  # of views: nothing is repeated
            sent, received = [here] * self.processes, list(everywhere.split(by_process))
            self._collective(lambda: dist.all_to_all(received, sent, group=self.group))
            return list(everywhere.split(list(sizes_A)))
        self._collective(
            lambda: dist.all_to_all_single(
                everywhere, here.repeat(self.processes), by_process, [len(here)] * self.processes, group=self.group
            )
        )
        return list(everywhere.split(list(sizes_A)))

    def _takes_lists(self) -> bool:
        """Whether the backend has an all-to-all of lists of tensors; gloo has none."""
        return self.device.type == "cuda" and dist.get_backend(self.group) == "nccl"

    def all_to_all(self, messages_AW: Sequence[Tensor]) -> list[Tensor]:
        """Hand each worker its part of every worker's message.

        Args:
            messages_AW: for each receiving worker of the run, the bytes [W, B] that the local workers send it.

        Returns:
            for each local worker the bytes [A, B] that all workers have sent it.
        """
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
        """What other workers send to the local ones, [W, ...], for messages [W, ...]; charged as payload.

        Messages side by side, and no collective: one process sends another all that its workers have for it at once.

        Args:
            message_W: of equal size on all workers.
            targets_A: to whom each worker of the run sends, no two of them to one; None = to no worker. Who gets no
                message has its own.
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
        calls = [
            *((peer, dist.isend, message_W[rows]) for peer, rows in outgoing.items()),
            *((peer, dist.irecv, x) for peer, x in received.items()),
        ]
        ops = [
            dist.P2POp(call, x, group=self.group, group_peer=peer)
            for peer, call, x in sorted(calls, key=lambda one: one[0])
        ]
        self._collective(lambda: [work.wait() for work in dist.batch_isend_irecv(ops)] if ops else None)
        for peer, rows in incoming.items():
            theirs_W[rows] = received[peer]
        return theirs_W

    def sum_(self, x: Tensor, account: str) -> Tensor:
        """Sum of one tensor per process, in place; charged to `account` as one message per worker."""
        nbytes, ring = x.numel() * x.element_size(), 2 * (self.workers - 1)
        self.ledger.charge(account, nbytes, wire=ring * nbytes, rounds=ring)
        self._run(lambda: dist.all_reduce(x, group=self.group))
        return x

    def broadcast_(self, xs: Sequence[Tensor], account: str) -> None:
        """Overwrite `xs` with the leader's, in one message for each of their types; charged to `account` as one."""
        if not xs:
            return
        nbytes, others = sum(x.numel() * x.element_size() for x in xs), self.workers - 1
        self.ledger.charge(account, nbytes, wire=others * nbytes, rounds=others)
        if self.processes == 1:
            return
        for dtype in dict.fromkeys(x.dtype for x in xs):
            alike = [x for x in xs if x.dtype == dtype]
            fused = torch.cat([x.detach().reshape(-1) for x in alike])
            self._run(functools.partial(dist.broadcast, fused, group=self.group, group_src=0))
            for x, value in zip(alike, fused.split([x.numel() for x in alike]), strict=True):
                x.detach().copy_(value.view(x.shape))

    def hand_on_(self, xs: Sequence[Tensor], source: int, receivers: Sequence[int]) -> None:
        """Overwrite `xs` of some processes with those of another one; only these call it, and who calls it charges it.

        One message for each of their types and each receiver.

        Args:
            xs: contiguous or not, of the same shapes and types everywhere.
            source: rank of the process that has them.
            receivers: ranks of those that get them.
        """
        for dtype in dict.fromkeys(x.dtype for x in xs):
            alike = [x for x in xs if x.dtype == dtype]
            fused = torch.cat([x.detach().reshape(-1) for x in alike])
            if self.rank == source:
                for receiver in receivers:
                    self._run(functools.partial(dist.send, fused, receiver, group=self.group))
                continue
            self._run(functools.partial(dist.recv, fused, source, group=self.group))
            for x, value in zip(alike, split_like(fused, alike), strict=True):
                x.detach().copy_(value)

    def told(self, said: Any, source: int, receivers: Sequence[int]) -> Any:
        """What one process says to some others; only these call it. As `everyones`, on no ledger and no clock."""
        heard = [said]
        if self.rank == source:
            for receiver in receivers:
                self._run(functools.partial(dist.send_object_list, heard, receiver, group=self.group))
        else:
            self._run(functools.partial(dist.recv_object_list, heard, source, group=self.group))
        return heard[0]

    def agree(self, value: int, what: str) -> None:
        """Stop the run unless every process has the same integer (a checksum, 8 control bytes, on no clock).

        Raises:
            RuntimeError: the processes differ.
        """
        if not self.same(value):
            raise RuntimeError(f"the processes no longer agree on {what}; rank {self.rank} has checksum {value}")

    def same(self, value: int) -> bool:
        """Whether every process has the same integer, as all of them find; 8 control bytes, on no clock."""
        self.ledger.charge("control", 8)
        if self.processes == 1:
            return True
        lowest = torch.tensor([value, -value], dtype=torch.int64, device=self.device)
        self._run(lambda: dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=self.group))
        return bool(lowest[0] == -lowest[1])

    def everyones(self, said: Any) -> list[Any]:
        """What each process says, by rank; on no ledger and no clock, for what leaves no trace in a run."""
        heard = [said] * self.processes
        self._run(lambda: dist.all_gather_object(heard, said, group=self.group))
        return heard

    def leave(self) -> None:
        """Give up the groups of gloo that were made for this object, after the last collective.

        Its threads may hold tensors for a moment longer than a collective takes. A process that ends meanwhile is
        aborted ("terminate called without an active exception"), since they cannot give them back to Python any more.
        They are waited for when the last reference to a destroyed group is gone. NCCL has no such threads, and its way
        out waits for the other processes.
        """
        while self.made:
            made = self.made.pop()
            group, made.group = made.group, made.before
            with contextlib.suppress(ValueError, RuntimeError):  # the user has destroyed all groups
                if dist.is_initialized() and dist.get_backend(group) == "gloo":
                    dist.destroy_process_group(group)

    def barrier(self) -> None:
        """Wait for every process."""
        self._run(lambda: dist.barrier(group=self.group))
