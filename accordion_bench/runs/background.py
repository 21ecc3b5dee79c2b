"""Asynchronous checkpoints: a thread writes a copy of the state while training continues.

Training blocks only while the state is copied to host memory, a few percent of the time of writing it. Each process
writes its own files and then a receipt that lists them. The leader's thread waits for all receipts and renames the
folder. A checkpoint therefore appears as soon as its last file is on disk, independently of the main threads, and
needs no collective. A failure is reported where the processes synchronise: at the end of an epoch, and before the next
checkpoint.
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
from accordion_bench.runs.saving import BlockingWriter, Files, Saving

POLL = 0.05  # seconds between checks for the receipts of other processes
PATIENCE = 10.0  # seconds after an error to wait for the other processes' files
RECEIPT = "receipt-{}.json"


class HostCopy:
    """Copies nested state to host memory, which is reused by the next copy."""

    def __init__(self) -> None:
        self._memory: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, state: Any, place: tuple[Any, ...] = ()) -> Any:
        """Return a copy that no training step writes to; the next copy overwrites its tensors."""
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


class Background(BlockingWriter):
    """Writer of checkpoints that writes one at a time, concurrently with training."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm)
        self.copied = HostCopy()
        self._thread: threading.Thread | None = None
        self._saving: Saving | None = None
        self._written, self._given_up = threading.Event(), threading.Event()
        self._error: BaseException | None = None

    def write(self, saving: Saving, states: dict[str, dict[str, Any]]) -> None:
        """Copy this process's state, by file name, and start to write it; the previous checkpoint must be finished."""
        copied = self.copied(states)
        self._saving, self._error = saving, None
        self._written.clear()
        self._given_up.clear()
        self._thread = threading.Thread(target=self._write, args=(saving, copied), name="checkpoint", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Check whether writing has failed in any process, without waiting for it; every process calls this.

        Raises:
            ConfigError: a disk is full; all processes raise the same error.
        """
        if any(self.comm.gather_objects(self._error is not None)):
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint being written is complete; every process calls this.

        Raises:
            ConfigError: a disk is full; all processes raise the same error, and the partial checkpoint is removed.
        """
        saving, thread = self._saving, self._thread
        if saving is None or thread is None:
            return
        self._written.wait()
        try:
            self._agree(saving)  # all processes have written, or the leader would wait for receipts that never arrive
            thread.join()
            self._agree(saving)
        finally:
            self._saving = self._thread = None

    def close(self) -> None:
        """End writing when training ends, possibly by an error; the checkpoint may still complete within `PATIENCE`."""
        if self._thread is not None:
            self._written.wait()
            self._thread.join(PATIENCE)
            self._given_up.set()
            self._thread.join()  # a thread that outlives the interpreter may abort it

    def _agree(self, saving: Saving) -> None:
        error = self._error
        told = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}" if error else ""
        heard = [told for told in self.comm.gather_objects(told) if told]
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
        self._try(saving, lambda: self._own(saving, states))
        self._written.set()  # after _error: it is read as soon as this event is set
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
        """Collect the files of all processes from their receipts, and remove these; None if a process has failed."""
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
