"""What every tracker is, and several as one; `tracker=none` is the base class itself."""

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
FIGURES = "of this run, drawn at its end; a few seconds, in no measured time"


@contextlib.contextmanager
def figures_of(folder: Path, summary: dict[str, Any]) -> Iterator[Sequence[tuple[str, Path]]]:
    """(name, PNG file) of each figure of a run alone, which is not marked as done yet; the files end with the block.

    Args:
        folder: of the run.
        summary: that it will have.
    """
    from accordion_bench.report.compare.grouping import group
    from accordion_bench.report.read.load import read_run
    from accordion_bench.report.render.figures import draw_all

    arms, _ = group([replace(read_run(folder), summary=summary, problem="")])
    with tempfile.TemporaryDirectory() as out:
        yield [(png.stem, png) for png in draw_all(arms, Path(out))]


@with_options
class Tracker(Component):
    """Gets every metrics row beside metrics.jsonl; this one does nothing with it.

    Attributes:
        by_step: whether it wants the loss of each step, too.
    """

    by_step = False
    chosen_as = {"none": Choice("rows go to no other place than the run folder")}

    def begin(self, cfg: dict[str, Any], folder: Path) -> None:
        """The run starts (or goes on)."""

    def log_losses(self, step: int, losses: Sequence[float]) -> None:
        """The training losses of an epoch's steps, before its row; of a resumed epoch those since then.

        Args:
            step: how many steps the run has taken after the last one of them.
            losses: of each, the mean over the workers of the first process, so that nothing is sent for them.
        """

    def log(self, row: dict[str, Any]) -> None:
        """One epoch's row."""

    def finish(self, summary: dict[str, Any]) -> None:
        """The run has come to its end."""


class Several(Tracker):
    """Each row goes to several trackers, in their order.

    Args:
        trackers: that get it.
    """

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
    """The tracker of a run, or all of them as one.

    Args:
        nodes: the options of each.

    Raises:
        ConfigError: one refuses an option, or lacks its package.
    """
    trackers = [build(node, "tracker") for node in nodes]
    return trackers[0] if len(trackers) == 1 else Several(trackers)


def tags_of(cfg: Config) -> list[str]:
    """What a run can be found by: the names of its choices, and the tags that were typed."""
    choices = (name.strip() for value in cfg["choices"].values() for name in value.split(","))
    return sorted({*filter(None, choices), *(cfg.get("tags") or [])})


def scalars(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row; nested ones as `plan/batch_size`, `plan/levels/fc.weight`. Lists are left out."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = value
    return found
