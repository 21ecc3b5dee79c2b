"""TensorBoard."""

import importlib.util
from pathlib import Path
from typing import Any

from accordion_bench.options.checks import ConfigError
from accordion_bench.runs.folder import RunFolder
from accordion_bench.trackers.base import Tracker, scalars


class TensorBoard(Tracker):
    """Writes every row as scalars over steps into the run folder's `tensorboard/`."""

    def __init__(self) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("tracker=tensorboard needs the package tensorboard; type pip install tensorboard")

    def begin(self, cfg: dict[str, Any], folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        rows = RunFolder(folder).read_metrics()
        # of a resumed run: what it had written beyond its checkpoint is written again
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=rows[-1]["step"] + 1 if rows else None)

    def log(self, row: dict[str, Any]) -> None:
        for name, value in scalars(row).items():
            self.writer.add_scalar(name, value, row["step"])
        self.writer.flush()

    def finish(self, summary: dict[str, Any]) -> None:
        self.writer.close()
