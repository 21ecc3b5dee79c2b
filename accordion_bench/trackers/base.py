"""What every tracker is; `tracker=none` is this class itself."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accordion_bench.options.component import Component
from accordion_bench.options.option import Choice, with_options


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


def scalars(row: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row; nested ones as `plan/batch_size`, `plan/levels/fc.weight`. Lists are left out."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = value
    return found
