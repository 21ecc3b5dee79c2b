"""Base class of all trackers, which is `tracker=none`, the CSV tracker, and one that forwards to several others."""

import csv
import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accordion_bench.options.component import Component
from accordion_bench.options.instantiate import Config, build
from accordion_bench.options.option import Choice, with_options
from accordion_bench.runs import durable
from accordion_bench.runs.folder import RunFolder, log

FILE = "metrics.csv"
BY_STEP = "train_loss_by_step"
FIGURES = "log figures of this run at its end; takes a few seconds, outside all measured times"


def send_figures(folder: Path, summary: dict[str, Any], send: Callable[[list[Path]], object], place: str) -> None:
    """Draw the figures of one run and pass their PNG files to `send`; an error is only logged, naming `place`.

    The run need not have a done marker yet; `summary` is its final summary, not yet written. The files are deleted.
    """
    from accordion_bench.report.compare.grouping import group
    from accordion_bench.report.read import read_run
    from accordion_bench.report.render.figures import draw_all

    try:
        arms, _ = group([replace(read_run(folder), summary=summary, problem="")])
        with tempfile.TemporaryDirectory() as out:
            send(draw_all(arms, Path(out)))
    except Exception:  # a failed figure must not fail the run
        log.exception("the figures for %s could not be drawn", place)


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


@with_options
class CSV(Tracker):
    """Tracker that writes the numbers of every row to the run folder's `metrics.csv`; nested ones as `plan/batch_size`.

    A column that first occurs in a later row is appended at the right, and the file is rewritten.
    """

    chosen_as = {"csv": Choice("a table of all rows, metrics.csv in the run folder")}

    def begin(self, cfg: dict[str, Any], folder: Path) -> None:
        self.folder, self.columns = folder, list[str]()
        self.rows = [scalars(row) for row in RunFolder(folder).read_metrics()]  # non-empty if the run is resumed
        if self.rows:
            self._write()

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(scalars(row))
        if self.rows[-1].keys() <= set(self.columns):
            with durable.room(self.folder):
                durable.append_line(self.folder / FILE, self._text(self.rows[-1:]).rstrip("\n"))
        else:
            self._write()

    def _write(self) -> None:
        self.columns = list(dict.fromkeys(name for row in self.rows for name in row))
        heading = {name: name for name in self.columns}
        with durable.room(self.folder):
            durable.write_text(self.folder / FILE, self._text([heading, *self.rows]))

    def _text(self, rows: Sequence[Mapping[str, Any]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self.columns, lineterminator="\n").writerows(rows)
        return text.getvalue()


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
