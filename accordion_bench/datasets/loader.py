"""Read batches ahead of use in separate processes, and copy them to the device."""

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
    """Tensors being copied to the device; complete after `event`."""

    tensors: list[Tensor]
    event: object


class Upload:
    """Copies to a device from pinned memory on a separate stream; a no-op on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.streams = device, on_device.streams_of(device)
        self._stream = self.streams.new()

    def send(self, tensors: tuple[Tensor, ...]) -> Uploaded:
        """Start copies to the device; non-blocking for pinned tensors."""
        with self.streams.on(self._stream):
            there = [x.to(self.device, non_blocking=True) for x in tensors]
            return Uploaded(there, self.streams.record())

    def receive(self, sent: Uploaded) -> list[Tensor]:
        """Return the copied tensors for use on this thread's current stream."""
        self.streams.wait(sent.event)
        self.streams.keep(sent.tensors)
        return sent.tensors


# signals by which a user, a closing terminal, a launcher or the kernel ends a run
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")
SIGNALS = {getattr(signal, name) for name in NAMES if hasattr(signal, name)}


class ErrorsAsItems(Dataset):
    """Data set that returns a `ConfigError` instead of raising it, which would add the traceback of the process."""

    def __init__(self, items: Dataset) -> None:
        self.items = items

    def __getitem__(self, key: Hashable) -> Any:
        try:
            return self.items[key]
        except ConfigError as wrong:
            return wrong


def together(items: list[Any]) -> Any:
    """Collate items to a batch; return the first `ConfigError` instead if there is one."""
    return next((item for item in items if isinstance(item, ConfigError)), None) or default_collate(items)


class NextBatches:
    """Batch sampler of a DataLoader whose batches are set before each pass."""

    batches: Iterable[list[Any]] = ()

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self.batches)


class Loader:
    """Reads batches of items by key, ahead of use and in the given order.

    Processes are spawned, not forked, because neither CUDA nor the threads of gloo and NCCL survive a fork. The first
    pass starts them, later passes reuse them, and they end with this process, even if it is killed.

    Args:
        items: items[key] is a tuple of tensors and numbers; pickled for every process.
        workers: processes per pass; 0 = read in this process, without reading ahead.
        pin: whether to put batches into pinned memory, for copies to a GPU.
    """

    def __init__(self, items: Dataset, workers: int, pin: bool) -> None:
        self.items, self.workers, self.pin = items, workers, pin
        self._idle: list[tuple[DataLoader, NextBatches]] = []

    def read(self, batches: Iterable[list[Hashable]]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the stacked items of each list of keys, or raise an item's `ConfigError`. Passes may overlap."""
        loader, next_batches = pair = self._idle.pop() if self._idle else self._new()
        try:
            next_batches.batches = batches
            with _parent_of_calm_processes() if self.workers else contextlib.nullcontext():
                passing = iter(loader)
            for batch in passing:
                if isinstance(batch, ConfigError):
                    raise batch
                yield batch
        finally:
            self._idle.append(pair)

    def _new(self) -> tuple[DataLoader, NextBatches]:
        keyed = keyed_rng.generator("loader")  # otherwise the DataLoader draws from the global generator
        options: dict[str, Any] = {"num_workers": self.workers, "pin_memory": self.pin, "generator": keyed}
        options["collate_fn"] = together
        if self.workers:
            options |= {"multiprocessing_context": "spawn", "worker_init_fn": _obey, "persistent_workers": True}
        next_batches = NextBatches()
        return DataLoader(ErrorsAsItems(self.items), batch_sampler=next_batches, **options), next_batches


@contextlib.contextmanager
def _parent_of_calm_processes() -> Iterator[None]:
    """Start processes that do not receive Ctrl-C, even if this process is a daemon."""
    me = multiprocessing.current_process()
    daemon, me.daemon = me.daemon, False  # daemons may not have children, but ours end with their parent
    calm = hasattr(signal, "sigtimedwait")
    if calm:
        resource_tracker.ensure_running()  # start it now, because its start unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # children inherit the mask from their start
    try:
        yield
    finally:
        if calm:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        me.daemon = daemon


def _obey(worker: int) -> None:
    """Make a reading process end only when its parent terminates it or has ended; ignore the user's signals."""
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
