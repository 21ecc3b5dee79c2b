"""The weights of a run as a plain state dict: `model.load_state_dict(ab.load_weights("RUN"))`."""

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from accordion_bench.options.checks import ConfigError
from accordion_bench.runs import durable, tensor_file
from accordion_bench.runs.folder import RunFolder, damaged
from accordion_bench.runs.manifest import Damaged

FINAL, BEST = "weights.pt", "best.pt"


def save_weights(path: Path, state: Mapping[str, Tensor]) -> tensor_file.Written:
    """Write a model's state dict; the file is replaced as a whole. Returns its size and checksum.

    Raises:
        ConfigError: the disk is full.
    """
    part = path.with_name(f"{path.name}.part")
    with durable.room(path.parent):
        try:
            written = tensor_file.write(part, dict(state))
            durable.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    return written


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """The weights of a run, compared with their checksum; on the CPU.

    Args:
        path: `weights.pt` or `best.pt` of a run, or its folder, for the weights of its last epoch.

    Raises:
        ConfigError: the file is missing, or not as the run has written it; a ValueError.

    Example:
        model.load_state_dict(ab.load_weights("results/runs/RUN"))
    """
    file = Path(path) / FINAL if os.path.isdir(path) else Path(path)
    try:
        return tensor_file.read(file, _written(file))
    except Damaged as damage:
        raise ConfigError(damaged(file, str(damage))) from None


def _written(file: Path) -> tensor_file.Written | None:
    """As the summary of the run has it; None of a run that goes on, or of an earlier version."""
    if not (file.parent / "summary.json").exists():
        return None
    written = RunFolder(file.parent).read_json("summary.json").get("files")
    found = written.get(file.name) if isinstance(written, dict) else None
    return (found[0], found[1]) if isinstance(found, list) and len(found) == 2 else None
