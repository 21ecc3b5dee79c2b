"""The report's figures of the run that has just ended."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any


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
