"""Batches of a data set: which sample is whose, and how they reach the device."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Hashable, Iterable, Iterator
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from accordion_bench.comm import on_device
from accordion_bench.options.checks import ConfigError
from accordion_bench.tensors import keyed_rng


class Sampler:
    """Shards a keyed permutation over the workers; the last, partial batch is kept.

    As in torch's DistributedSampler, worker w takes entries w, w + A, ... and the permutation is filled up from its own
    beginning, so that all workers have equally many.

    Args:
        size: training samples.
        workers: A.
        seed: of the run.
        sharding: `reshuffled` in every epoch, `static`, or `consecutive`: samples are segments of one sequence, cut
            into A x batch size strands of equal length, the last ones filled up from its beginning; entry i of a
            worker's next batch continues entry i. Batches are always whole.
        samples: numbers of the training samples among all that are loaded; None = 0 to size - 1.
        device: where batches are wanted; an epoch's order goes there once.
    """

    def __init__(
        self,
        size: int,
        workers: int,
        seed: int,
        sharding: str = "reshuffled",
        samples: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.size, self.workers, self.seed, self.sharding = size, workers, seed, sharding
        self.samples, self.device = samples, device
        self.per_worker = -(-size // workers)

    def steps(self, batch_size: int) -> int:
        """Optimizer steps per epoch."""
        return -(-self.per_worker // batch_size)

    def begin_epoch(self, epoch: int, batch_size: int) -> None:
        """Draw the order of this epoch."""
        self._batch_size = batch_size
        if self.sharding == "consecutive":
            self._strands = torch.arange(batch_size, device=self.device)
            return
        keyed = 0 if self.sharding == "static" else epoch
        order = torch.randperm(self.size, generator=keyed_rng.generator(self.seed, "order", keyed))
        if self.samples is not None:
            order = self.samples[order]
        total = self.per_worker * self.workers
        order = order.repeat(-(-total // self.size))[:total]
        self._shards = order.to(self.device).view(self.per_worker, self.workers).T

    def batch(self, worker: int, step: int) -> Tensor:
        """Indices of one worker's samples in one step of the epoch."""
        if self.sharding == "consecutive":
            strands = worker * self._batch_size + self._strands
            return (strands * self.steps(self._batch_size) + step) % self.size
        return self._shards[worker, step * self._batch_size : (step + 1) * self._batch_size]


class Uploaded(NamedTuple):
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

    def send(self, tensors: tuple[Tensor, ...]) -> Uploaded:
        """Let copies begin; the host does not wait where the tensors are pinned."""
        with self.streams.on(self._stream):
            there = [x.to(self.device, non_blocking=True) for x in tensors]
            return Uploaded(there, self.streams.record())

    def receive(self, sent: Uploaded) -> list[Tensor]:
        """The tensors, for this thread's stream."""
        self.streams.wait(sent.event)
        self.streams.keep(sent.tensors)
        return sent.tensors


# by which a user, a terminal that closes, a launcher or the kernel ends a run
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")
SIGNALS = {getattr(signal, name) for name in NAMES if hasattr(signal, name)}


class Told(Dataset):
    """Items, or what is wrong with one: an exception would come from a process with all of that one's traceback.

    Args:
        items: items[key].
    """

    def __init__(self, items: Dataset) -> None:
        self.items = items

    def __getitem__(self, key: Hashable) -> Any:
        try:
            return self.items[key]
        except ConfigError as wrong:
            return wrong


def together(items: list[Any]) -> Any:
    """A batch of items, stacked; or what is wrong with the first one that is none."""
    return next((item for item in items if isinstance(item, ConfigError)), None) or default_collate(items)


class Announced:
    """The batches of a DataLoader's next pass."""

    batches: Iterable[list[Any]] = ()

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.batches)


class Loader:
    """Reads batches of items by their keys, ahead of the need and in the order asked for.

    Processes are spawned, not forked, because neither CUDA nor the threads of gloo and NCCL survive a fork. The first
    pass starts them; they serve later passes, and end with this process, however that ends.

    Args:
        items: items[key] is a tuple of tensors and numbers; goes to every process.
        workers: processes per pass; 0 reads in this one, when asked.
        pin: put batches into pinned memory, for copies to a GPU.
    """

    def __init__(self, items: Dataset, workers: int, pin: bool) -> None:
        self.items, self.workers, self.pin = items, workers, pin
        self._idle: list[tuple[DataLoader, Announced]] = []

    def read(self, batches: Iterable[list[Hashable]]) -> Iterator[tuple[Tensor, ...]]:
        """The items of each list of keys in turn, stacked; several passes may be under way at a time.

        Raises:
            ConfigError: an item cannot be read; in whichever process, one sentence.
        """
        loader, announced = pair = self._idle.pop() if self._idle else self._new()
        try:
            announced.batches = batches
            with _parent_of_calm_processes() if self.workers else contextlib.nullcontext():
                passing = iter(loader)
            for batch in passing:
                if isinstance(batch, ConfigError):
                    raise batch
                yield batch
        finally:
            self._idle.append(pair)

    def _new(self) -> tuple[DataLoader, Announced]:
        keyed = keyed_rng.generator("loader")  # or it would draw from the global one
        options: dict[str, Any] = {"num_workers": self.workers, "pin_memory": self.pin, "generator": keyed}
        options["collate_fn"] = together
        if self.workers:
            options |= {"multiprocessing_context": "spawn", "worker_init_fn": _obey, "persistent_workers": True}
        announced = Announced()
        return DataLoader(Told(self.items), batch_sampler=announced, **options), announced


@contextlib.contextmanager
def _parent_of_calm_processes() -> Iterator[None]:
    """Processes that are started in here do not hear Ctrl-C, and this one may start them though it is a daemon."""
    me = multiprocessing.current_process()
    daemon, me.daemon = me.daemon, False  # a daemon could leave orphans behind, but ours look after their parent
    calm = hasattr(signal, "sigtimedwait")
    if calm:
        resource_tracker.ensure_running()  # which unblocks the signals when it starts
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # is inherited, from the first instruction on
    try:
        yield
    finally:
        if calm:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        me.daemon = daemon


def _obey(worker: int) -> None:
    """In a reading process: end when the parent says so, or has gone; what the user signals is the parent's to hear."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is None or not hasattr(signal, "sigtimedwait"):
        return

    def listen(parent: int) -> None:
        while os.getppid() == parent:
            told = signal.sigtimedwait({signal.SIGTERM}, 0.1)
            if told is not None and told.si_pid == parent:
                break
        os._exit(0)

    threading.Thread(target=listen, args=(parent.pid,), daemon=True).start()
