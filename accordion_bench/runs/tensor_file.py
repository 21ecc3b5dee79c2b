"""One file of tensors on the disk, as torch.save writes it."""

import os
import zlib
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from accordion_bench.runs import durable


class Counted:
    """A file that is being written: its size, its checksum (CRC-32), and why it could not be written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.checksum = file, 0, 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """For torch.save."""
        self.checksum = zlib.crc32(data, self.checksum)
        self.size += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """For torch.save."""


def write(path: Path, content: dict[str, Any]) -> tuple[int, int]:
    """Write a file and wait until it is on the disk; its size and checksum.

    Raises:
        OSError: the disk is full, say.
    """
    with durable.new_file(path) as file:
        counted = Counted(file)
        try:
            torch.save(content, cast(IO[bytes], counted))
        except RuntimeError as of_torch:  # of its archive, not of the disk
            raise counted.error or of_torch from None
        file.flush()
        os.fsync(file.fileno())
    return counted.size, counted.checksum
