"""Reports: run folders as pandas tables, statistics and figures.

import accordion_bench as ab
ab.report.load_metrics("results/runs")          # one row per run and epoch
ab.report.compare("results/runs")               # one row per arm, with intervals
ab.report.figure("results/runs", "comparison")  # a matplotlib Figure
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import accordion_bench.report.compare  # noqa: F401  imported first: later, the package would shadow the function
from accordion_bench.options import checks

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from accordion_bench.report.compare.arms import Arm
    from accordion_bench.report.read import Run, load_metrics, load_runs, read_runs

__all__ = ["compare", "figure", "load_metrics", "load_runs", "read_runs"]

Runs = Union["Run", str, Path, Iterable[Union["Run", str, Path]]]

FORMATS = ("md", "csv", "latex", "html")
FIGURES = ("png", "pdf", "svg")
BANDWIDTHS = (1e8, 1e9, 1e10)  # bit/s
PAPERS = {"one-column": 3.3, "two-column": 7.0}  # width of a figure in inches


@dataclass(frozen=True)
class Print:
    """Output settings of figures.

    Args:
        paper: key of PAPERS: the figure is one column or two columns wide.
        formats: a subset of FIGURES. A PNG is always written, because the page and README use it.
        bandwidths: bandwidths in bit/s of the links in the figure of modelled time.
    """

    paper: str = "two-column"
    formats: tuple[str, ...] = ("png",)
    bandwidths: tuple[float, ...] = BANDWIDTHS


AS_PNG = Print()


def compare(runs: Runs) -> "pd.DataFrame":
    """Compare arms: return one row per arm with the numbers of table.csv and the name of its setting.

    Args:
        runs: run folders, files of metrics rows, folders that contain some, or the result of `read_runs`.

    Returns:
        `setting`, then the columns of `tidy`: bytes, seconds and the metric (an accuracy as a share) with half widths
        of 95 % intervals and the difference to dense. Empty if no run has finished.

    Example:
        >>> ab.report.compare(runs)["arm"].tolist()  # runs = "results/runs", say
        ['dense', 'PowerSGD rank 2']
    """
    import pandas as pd

    from accordion_bench.report.compare.columns import tidy

    tables = [tidy(arms).assign(setting=name) for name, arms in _settings(runs).items()]
    found = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["setting"])
    return found[["setting", *(name for name in found if name != "setting")]]


def figure(runs: Runs, kind: str = "comparison", setting: str | None = None) -> "Figure":
    """Draw one figure of the report with matplotlib.

    Args:
        runs: as for `compare`.
        kind: name of a figure, as in the report's file names: `comparison`, `accuracy_bytes`, `tradeoff`, `levels`, ...
        setting: value of the `setting` column of `compare`; None = the only one.

    Raises:
        ConfigError: there is no such kind or setting, or the runs lack the data for it; a subclass of ValueError.

    Example:
        >>> drawn = ab.report.figure(runs, "comparison")
        >>> drawn.savefig("comparison.png")
    """
    from accordion_bench.report.render import figures
    from accordion_bench.report.render.figures.sheet import styled

    checks.choice("kind", kind, figures.NAMES)
    found = _settings(runs)
    if not found:
        raise checks.ConfigError("runs must be some of which one has finished, got none; type figure('results/runs')")
    with styled():
        if kind == "workers":
            drawn = figures.workers(list(found.values()))
        else:
            if setting is None and len(found) > 1:
                raise checks.ValueRefused("setting", f"one of the {len(found)} of compare()", None, next(iter(found)))
            name = next(iter(found)) if setting is None else checks.choice("setting", setting, list(found))
            drawn = figures.KINDS[kind].draw(found[name], BANDWIDTHS)
    if drawn is None:
        raise checks.ValueRefused("kind", "a figure for which these runs have the numbers", kind, "comparison")
    return drawn


def _settings(runs: Runs) -> "dict[str, list[Arm]]":
    """Return the arms of each setting by its name; runs that cannot be compared are omitted, as in reports."""
    from accordion_bench.report.compare.columns import tidy
    from accordion_bench.report.read import Run, read_runs
    from accordion_bench.report.render.captions import headings
    from accordion_bench.report.render.write import group_sound_runs

    given = [runs] if isinstance(runs, str | Path | Run) else list(runs)
    read = [run for one in given for run in ([one] if isinstance(one, Run) else read_runs([one]))]
    _, parts, _, _ = group_sound_runs(read, lambda parts: list(map(tidy, parts)))
    return dict(zip(headings(parts), parts, strict=True))


def __getattr__(name: str) -> Any:
    """Import the functions that read runs on first use, so that the command line can print before the slow import.

    Raises:
        AttributeError: the name is unknown.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from accordion_bench.report import read

    return getattr(read, name)
