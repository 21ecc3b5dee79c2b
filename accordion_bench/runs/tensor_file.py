"""One file of tensors on the disk, as torch.save writes it; read only where it is as it was written."""

import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from accordion_bench.runs import durable, untrusted
from accordion_bench.runs.manifest import Damaged

Written = tuple[int, int]  # size in bytes, checksum (CRC-32)


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


def write(path: Path, content: dict[str, Any]) -> Written:
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


def read(path: Path, written: Written | None) -> dict[str, Any]:
    """What a file holds, tensors on the CPU.

    Args:
        path: of the file.
        written: what `write` has returned of it; None where nobody has kept that: then the checksums count that torch
            has put beside each tensor, which torch itself does not look at.

    Raises:
        Damaged: it is missing, or not as it was written.
    """
    name = path.name
    try:
        data = untrusted.read_bytes(path, most=None)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except (OSError, untrusted.Refused):
        raise Damaged(f"{name} cannot be read") from None
    if written is not None and len(data) != written[0]:
        raise Damaged(f"{name} has {len(data):,} of {written[0]:,} bytes")
    if written is not None and zlib.crc32(data) != written[1]:
        raise Damaged(f"{name} is not as it was written")
    try:
        changed = None if written else zipfile.ZipFile(io.BytesIO(data)).testzip()
        content = dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except Exception:  # random bytes may raise anything
        raise Damaged(f"{name} {'cannot be read' if data else 'is empty'}") from None
    if changed is not None:
        raise Damaged(f"{name} is not as it was written")
    return content
