"""Run folders as tidy tables, statistics and figures.

from accordion_bench.report import load_metrics, load_runs
load_metrics(["results/runs"])     # one row per run and epoch
"""

from accordion_bench.report.read.load import load_metrics, load_runs

__all__ = ["load_metrics", "load_runs"]
