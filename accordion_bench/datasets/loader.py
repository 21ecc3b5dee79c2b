"""Batches of a data set: how they are read, and reach the device."""

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
