"""Run folders as tidy tables, statistics and figures.

from accordion_bench.report import load_metrics, load_runs
load_metrics(["results/runs"])     # one row per run and epoch
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accordion_bench.report.read.load import load_metrics, load_runs

__all__ = ["load_metrics", "load_runs"]


def __getattr__(name: str) -> Any:
    """What reads runs, imported when it is first asked for: the command line has its first words before.

    Raises:
        AttributeError: there is nothing of that name.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from accordion_bench.report.read import load

    return getattr(load, name)
