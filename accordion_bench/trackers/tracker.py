"""Base class of all trackers, which is `tracker=none`, and a tracker that forwards to several others."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accordion_bench.options.component import Component
from accordion_bench.options.instantiate import Config, build
from accordion_bench.options.option import Choice, with_options

BY_STEP = "train_loss_by_step"
FIGURES = "log figures of this run at its end; takes a few seconds, outside all measured times"


@contextlib.contextmanager
def figures_of(folder: Path, summary: dict[str, Any]) -> Iterator[Sequence[tuple[str, Path]]]:
    """Draw the figures of one run and yield a (name, PNG file) pair for each; the files are deleted after the block.

    The run need not have a done marker yet; `summary` is its final summary, not yet written.
    """
    from accordion_bench.report.compare.grouping import group
    from accordion_bench.report.read.load import read_run
    from accordion_bench.report.render.figures import draw_all

    arms, _ = group([replace(read_run(folder), summary=summary, problem="")])
    with tempfile.TemporaryDirectory() as out:
        yield [(png.stem, png) for png in draw_all(arms, Path(out))]


@with_options
class Tracker(Component):
    """Receives every metrics row in addition to metrics.jsonl; this base class ignores it.

    Attributes:
        by_step: whether the tracker also wants the loss of each step.
    """

    by_step = False
    chosen_as = {"none": Choice("rows go to no other place than the run folder")}

    def begin(self, cfg: dict[str, Any], folder: Path) -> None:
        """Start logging a run, or continue a resumed one."""

    def log_losses(self, step: int, losses: Sequence[float]) -> None:
        """Log the training losses of an epoch's steps, before its row; for a resumed epoch only the steps since then.

        Args:
            step: number of steps taken by the run, including the last of these.
            losses: one per step: mean over the workers of the first process, so that no communication is needed.
        """

    def log(self, row: dict[str, Any]) -> None:
        """Log the row of one epoch."""

    def finish(self, summary: dict[str, Any]) -> None:
        """End logging: the run is complete."""


class Several(Tracker):
    """Tracker that forwards every call to several trackers, in order."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = trackers
        self.by_step = any(tracker.by_step for tracker in trackers)

    def begin(self, cfg: dict[str, Any], folder: Path) -> None:
        for tracker in self.trackers:
            tracker.begin(cfg, folder)

    def log_losses(self, step: int, losses: Sequence[float]) -> None:
        for tracker in self.trackers:
            tracker.log_losses(step, losses)

    def log(self, row: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(row)

    def finish(self, summary: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.finish(summary)


def build_tracker(nodes: Sequence[Config]) -> Tracker:
    """Build the tracker of a run from the options of each tracker; several are combined into one.

    Raises:
        ConfigError: a tracker refuses an option, or its package is missing.
    """
    trackers = [build(node, "tracker") for node in nodes]
    return trackers[0] if len(trackers) == 1 else Several(trackers)


def tags_of(cfg: Config) -> list[str]:
    """Return the tags that a run can be found by: the names of its choices and the user's tags, sorted."""
    choices = (name.strip() for value in cfg["choices"].values() for name in value.split(","))
    return sorted({*filter(None, choices), *(cfg.get("tags") or [])})


def scalars(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a row, nested ones as `plan/batch_size`, `plan/levels/fc.weight`; omit lists."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = value
    return found
