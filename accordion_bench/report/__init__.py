"""Run folders as tidy tables, statistics and figures.

import accordion_bench as ab
ab.report.load_metrics("results/runs")          # one row per run and epoch
ab.report.compare("results/runs")               # one row per arm, with intervals
ab.report.figure("results/runs", "comparison")  # as matplotlib draws it
"""

from typing import TYPE_CHECKING, Any

import accordion_bench.report.compare  # noqa: F401  first: imported later, the package would take the function's place
from accordion_bench.report.api import compare, figure

if TYPE_CHECKING:
    from accordion_bench.report.read.load import load_metrics, load_runs, read_runs

__all__ = ["compare", "figure", "load_metrics", "load_runs", "read_runs"]


def __getattr__(name: str) -> Any:
    """What reads runs, imported when it is first asked for: the command line has its first words before.

    Raises:
        AttributeError: there is nothing of that name.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from accordion_bench.report.read import load

    return getattr(load, name)
