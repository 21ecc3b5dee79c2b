"""Subjects of the advice's validation: models, arms and links; and files of results, written cell by cell."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accordion_bench.options.checks import ConfigError
from scripts.packed import read_packed, write_packed

KNOWN = {  # batches with which a step computes for a tenth to a third of a second on one thread
    "resnet20": ["model=resnet20", "dataset=synthetic", "dataset.train_size=4096", "batch_size=32"],
    "resnet18": ["model=resnet18", "dataset=synthetic", "batch_size=8"],
    "lstm": [
        *("model=lstm_small", "dataset=synthetic_text", "dataset.vocabulary=8000", "dataset.train_words=200000"),
        "batch_size=16",
    ],
}
UNSEEN = {  # likewise; they were not looked at while the advice's model was made
    "vgg16": ["model=vgg16", "model.width=16", "dataset=synthetic", "batch_size=16"],
    "gpt": ["model=gpt_nano", "dataset=pydocs_bytes", "dataset.context=128", "batch_size=8"],
    "vit": ["model=vit_tiny", "dataset=synthetic", "batch_size=4"],
}
MODELS = {**KNOWN, **UNSEEN}
ALONE = "no communication"
PERIOD = 8
ARMS = {
    ALONE: [],
    "dense": [],
    "DDP": ["comm.engine=ddp"],
    "bf16": ["compressor=bf16"],
    "PowerSGD 1": ["compressor=powersgd", "compressor.rank=1"],
    "PowerSGD 4": ["compressor=powersgd", "compressor.rank=4"],
    "TopK": ["compressor=topk", "compressor.density=0.01"],
    "EF-sign": ["compressor=efsignsgd"],
    "dist-EF": ["compressor=distefblocksgd"],
    "QSGD": ["compressor=qsgd"],
    "local SGD": ["sync=local_sgd", f"sync.period={PERIOD}"],
    "DiLoCo": ["sync=diloco", f"sync.period={PERIOD}"],
}
LOCAL = ("local SGD", "DiLoCo")
FOLDER = Path("results/advice")
CELL = ("model", "hosts", "rate")
Cell = dict[str, Any]


def period(arm: str) -> int:
    """Return the number of steps from one exchange to the next."""
    return PERIOD if arm in LOCAL else 1


def read(path: Path) -> list[Cell]:
    """Return the cells of a file; none if the file does not exist.

    Raises:
        ConfigError: the file does not contain cells.
    """
    if not path.exists():
        return []
    try:
        cells = json.loads(read_packed(path))["rows"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path} must be a file of cells, got something else; type another file, or move this one away"
        ) from None
    return cells


def written(path: Path, command: str) -> list[Cell]:
    """Return the cells of a file that an earlier subcommand has written.

    Raises:
        ConfigError: the file has no cells.
    """
    cells = read(path)
    if not cells:
        raise ConfigError(
            f"{path} must hold cells of {command}, got none; type python -m scripts.studies.validate_advice {command}"
        )
    return cells


def find(cells: Sequence[Cell], **key: Any) -> Cell | None:
    """Return the cell with this key."""
    return next((cell for cell in cells if all(cell[name] == value for name, value in key.items())), None)


def keep(path: Path, cell: Cell, key: Sequence[str]) -> None:
    """Add a cell to the file, replacing the one with the same key."""
    write(path, [*(other for other in read(path) if any(other[name] != cell[name] for name in key)), cell])


def write(path: Path, cells: Sequence[Cell]) -> None:
    """Write the cells of a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_packed(path, json.dumps({"rows": plain(cells)}, indent=1) + "\n")


def plain(value: Any) -> Any:
    """Round floats to six digits, because people read the file."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
