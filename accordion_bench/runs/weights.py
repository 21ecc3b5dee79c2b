"""Weight files: checksummed files of tensors, and loading of the weights that a run has saved."""

import io
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from accordion_bench.options.checks import ConfigError
from accordion_bench.runs import durable, untrusted
from accordion_bench.runs.folder import RunFolder, damaged

Written = tuple[int, int]  # size in bytes, checksum (CRC-32)


class Damaged(Exception):
    """A checkpoint is damaged; `str()` names the file."""


class Counted:
    """Writable file that records the size, the checksum (CRC-32) and the error of the write that failed."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.checksum = file, 0, 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write data; called by torch.save."""
        self.checksum = zlib.crc32(data, self.checksum)
        self.size += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Do nothing; called by torch.save."""


def write(path: Path, content: dict[str, Any], dump: Callable[[Any, Any], object] = torch.save) -> Written:
    """Write `content` by `dump(content, file)`, and wait until the file is on disk; return its size and checksum.

    Raises:
        OSError: for instance, the disk is full.
    """
    with durable.new_file(path) as file:
        counted = Counted(file)
        try:
            dump(content, cast(IO[bytes], counted))
        except RuntimeError as of_torch:  # torch's error about its archive hides that of the disk
            raise counted.error or of_torch from None
        file.flush()
        os.fsync(file.fileno())
    return counted.size, counted.checksum


def read(path: Path, written: Written | None) -> dict[str, Any]:
    """Read a file of tensors, on the CPU.

    `written` is the size and checksum returned by `write`. If it is None, the checksums that torch stores with each
    tensor are verified, which torch itself does not do.

    Raises:
        Damaged: the file is missing or damaged.
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
        if path.suffix == SAFETENSORS:
            return dict(_safetensors().load(data))
        changed = None if written else zipfile.ZipFile(io.BytesIO(data)).testzip()
        content = dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except Exception:  # random bytes may raise anything
        raise Damaged(f"{name} {'cannot be read' if data else 'is empty'}") from None
    if changed is not None:
        raise Damaged(f"{name} is not as it was written")
    return content


FINAL, BEST = "weights", "best"
OF_TORCH, SAFETENSORS = ".pt", ".safetensors"


def _safetensors() -> Any:
    """Import safetensors.torch, of the extra `safetensors`."""
    import safetensors.torch

    return safetensors.torch


def _dump_tensors(state: Mapping[str, Tensor], file: BinaryIO) -> None:
    """Write in the safetensors format; tied tensors, which it does not support, are written separately."""
    file.write(_safetensors().save({name: tensor.contiguous().clone() for name, tensor in state.items()}))


def save_weights(path: Path, state: Mapping[str, Tensor]) -> Written:
    """Write a model's state dict, replacing the file atomically; return its size and checksum.

    The suffix of `path` selects the format: `.pt` or `.safetensors`.

    Raises:
        ConfigError: the disk is full.
    """
    part = path.with_name(f"{path.name}.part")
    with durable.room(path.parent):
        try:
            written = write(part, dict(state), _dump_tensors if path.suffix == SAFETENSORS else torch.save)
            durable.replace(part, path)
            for other in {OF_TORCH, SAFETENSORS} - {path.suffix}:  # left by a resumed run that used the other format
                path.with_suffix(other).unlink(missing_ok=True)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    return written


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Load the weights of a run on the CPU, verified against their checksum.

    Args:
        path: path of `weights.pt`, `best.pt` or such a file in safetensors, or of a run, for its last epoch's.

    Raises:
        ConfigError: the file is missing or damaged; a subclass of ValueError.

    Example:
        >>> torch.save({"weight": torch.ones(2)}, "best.pt")  # as a run does
        >>> ab.load_weights("best.pt")
        {'weight': tensor([1., 1.])}
    """
    file = Path(path)
    if os.path.isdir(path):
        safe = file / f"{FINAL}{SAFETENSORS}"
        file = safe if safe.exists() else file / f"{FINAL}{OF_TORCH}"
    try:
        return read(file, _written(file))
    except Damaged as damage:
        raise ConfigError(damaged(file, str(damage))) from None


def _written(file: Path) -> Written | None:
    """Return size and checksum from the run's summary; None for an unfinished run or one of an earlier version."""
    if not (file.parent / "summary.json").exists():
        return None
    written = RunFolder(file.parent).read_json("summary.json").get("files")
    found = written.get(file.name) if isinstance(written, dict) else None
    return (found[0], found[1]) if isinstance(found, list) and len(found) == 2 else None
