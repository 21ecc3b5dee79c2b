"""Checkpoints written beside training: a thread writes a copy of the state, and training goes on meanwhile.

Training stops while the state is copied into the host's memory, which takes a few percent of writing it. Each process
writes its own files and then a receipt of them; the leader's thread waits for all receipts and gives the folder its
name. So a checkpoint appears as soon as its last file is on the disk, whatever the main threads do, and no collective
is made for it. A failure is told where the processes meet: at the end of an epoch, and before the next checkpoint.
"""

import contextlib
import copy
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs import durable
from accordion_bench.runs.saving import AtOnce, Files, Saving

POLL = 0.05  # seconds between two looks for the receipts of other processes
PATIENCE = 10.0  # seconds after an error in which the other processes' files may come
RECEIPT = "receipt-{}.json"


class HostCopy:
    """Copies of nested state in the host's memory, which is kept from one copy to the next."""

    def __init__(self) -> None:
        self._memory: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, state: Any, place: tuple[Any, ...] = ()) -> Any:
        """The same state in tensors that no training step writes; they are written anew by the next copy."""
        if isinstance(state, Tensor):
            return self._of_tensor(state.detach(), place)
        if isinstance(state, Mapping):
            copied = copy.copy(state)
            for key, value in state.items():
                copied[key] = self(value, (*place, key))  # type: ignore[index]
            return copied
        if isinstance(state, list | tuple):
            return type(state)(self(value, (*place, index)) for index, value in enumerate(state))
        return copy.deepcopy(state)

    def _of_tensor(self, x: Tensor, place: tuple[Any, ...]) -> Tensor:
        kept = self._memory.get(place)
        if kept is None or kept.shape != x.shape or kept.dtype != x.dtype or kept.stride() != x.stride():
            kept = self._memory[place] = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        return kept.copy_(x)


class Background(AtOnce):
    """Writes one checkpoint at a time beside training.

    Args:
        comm: of all workers.
    """

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        self.copied = HostCopy()
        self._thread: threading.Thread | None = None
        self._saving: Saving | None = None
        self._written, self._given_up = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def write(self, saving: Saving, states: dict[str, dict[str, Any]]) -> None:
        """Copy the state and begin to write it; the last checkpoint is finished.

        Args:
            saving: the checkpoint that is begun.
            states: of this process, by file name.
        """
        copied = self.copied(states)
        self._saving, self._error = saving, None
        self._written.clear()
        self._given_up.clear()
        self._thread = threading.Thread(target=self._write, args=(saving, copied), name="checkpoint", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Has writing failed in a process? Waits for no writing; every process calls it.

        Raises:
            ConfigError: a disk is full; all raise the same.
        """
        if any(self.comm.everyones(self._error is not None)):
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is whole; every process calls it.

        Raises:
            ConfigError: a disk is full; all raise the same, and what was half written is gone.
        """
        saving, thread = self._saving, self._thread
        if saving is None or thread is None:
            return
        self._written.wait()
        try:
            self._agree(saving)  # all files are there, or the leader would wait for receipts that never come
            thread.join()
            self._agree(saving)
        finally:
            self._saving = self._thread = None

    def close(self) -> None:
        """Training ends, by an error perhaps: what is being written may still become whole, and none waits for long."""
        if self._thread is not None:
            self._written.wait()
            self._thread.join(PATIENCE)
            self._given_up.set()
            self._thread.join()  # a thread that outlives the interpreter may abort it

    def _agree(self, saving: Saving) -> None:
        error = self._error
        told = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}" if error else ""
        heard = [told for told in self.comm.everyones(told) if told]
        if not heard:
            return
        self._given_up.set()
        if self._thread is not None:
            self._thread.join()
        if self.comm.leader:
            saving.drop()
        if error is not None and not isinstance(error, ConfigError):
            raise error
        raise ConfigError(heard[0])

    def _write(self, saving: Saving, states: dict[str, dict[str, Any]]) -> None:
        """What the thread does."""
        self._try(saving, lambda: self._own(saving, states))
        self._written.set()  # after the error, which is told as soon as this is set
        if self.comm.leader and self._error is None:
            self._try(saving, lambda: self._whole(saving))

    def _try(self, saving: Saving, work: Callable[[], None]) -> None:
        try:
            with durable.room(saving.run):
                work()
        except BaseException as error:
            self._error = error

    def _own(self, saving: Saving, states: dict[str, dict[str, Any]]) -> None:
        receipt = saving.part / RECEIPT.format(self.comm.rank)
        durable.write_text(receipt, json.dumps(saving.write(states)))

    def _whole(self, saving: Saving) -> None:
        if (files := self._of_all(saving)) is not None:
            saving.end(files)

    def _of_all(self, saving: Saving) -> Files | None:
        """The files of all processes, by their receipts, which go; None where one of them has failed."""
        found: Files = {}
        for rank in range(self.comm.processes):
            receipt = saving.part / RECEIPT.format(rank)
            while not receipt.exists():
                if self._given_up.wait(POLL):
                    return None
            files = json.loads(receipt.read_text(encoding="utf-8"))
            found |= {name: (size, checksum) for name, (size, checksum) in files.items()}
            with contextlib.suppress(FileNotFoundError):
                receipt.unlink()
        return found
