"""Weights & Biases."""

import importlib.util
from pathlib import Path
from typing import Any

from accordion_bench import check
from accordion_bench.check import ConfigError
from accordion_bench.trackers.base import Tracker, scalars


class Wandb(Tracker):
    """Logs every row to wandb.

    Args:
        mode: `offline` writes into the run folder and needs neither account nor network (`wandb sync` uploads it
            later); `online` uploads.
        project: wandb's project.
    """

    def __init__(self, mode: str = "offline", project: str = "accordion_bench") -> None:
        self.mode = check.choice("mode", mode, ["offline", "online"])
        self.project = project
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError("tracker=wandb needs the package wandb; type pip install wandb, or tracker=none")

    def begin(self, cfg: dict[str, Any], folder: Path) -> None:
        import wandb  # a second to import

        options: dict[str, Any] = {"project": self.project, "name": folder.name, "dir": str(folder), "mode": self.mode}
        self.run = wandb.init(config=cfg, settings={"silent": True}, reinit="create_new", **options)

    def log(self, row: dict[str, Any]) -> None:
        self.run.log(scalars(row), step=row["step"])

    def finish(self, summary: dict[str, Any]) -> None:
        self.run.summary.update(scalars(summary))
        self.run.finish()
