"""Runs that can be compared: one whose files nobody foresaw is left out, and told, instead of ending the report."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.grouping import group, settings
from accordion_bench.report.read.load import Run
from accordion_bench.report.read.printable import printable

T = TypeVar("T")
Parts = list[list[Arm]]


def sound(runs: Sequence[Run], say: Callable[[Parts], T]) -> tuple[list[Run], Parts, list[Run], T]:
    """The runs by setting, and what is said of them.

    Args:
        runs: finished and unfinished ones.
        say: makes the texts of all settings; raises where a run is too strange for it.

    Returns:
        all runs, those that are too strange with this as their problem; the arms of each setting; the runs that repeat
        a seed of their arm; what `say` has returned.
    """
    try:
        return _compared(runs, say)
    except Exception:  # of which of them is found out below
        alone = [run if not run.finished else _unless_strange(run, [], say) for run in runs]
    try:
        return _compared(alone, say)
    except Exception:  # of several that do not go together: each must go with those before it
        kept: list[Run] = []
        for run in alone:
            kept.append(run if not run.finished else _unless_strange(run, kept, say))
        return _compared(kept, say)


def _compared(runs: Sequence[Run], say: Callable[[Parts], T]) -> tuple[list[Run], Parts, list[Run], T]:
    arms, repeats = group(runs)
    parts = settings(arms)
    return list(runs), parts, repeats, say(parts)


def _unless_strange(run: Run, beside: Sequence[Run], say: Callable[[Parts], T]) -> Run:
    """The run; unfinished where it cannot be compared with others, or by itself."""
    try:
        _compared([*beside, run], say)
    except Exception as error:
        return replace(run, problem=printable(f"cannot be compared ({type(error).__name__}: {error})", longest=500))
    return run
