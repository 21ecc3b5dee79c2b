"""The report as one interactive HTML page that loads nothing else."""

from accordion_bench.report.render import loaded  # noqa: F401  before whoever imports matplotlib
from accordion_bench.report.render.page.build import FAILED, Section, missing, page

__all__ = ["FAILED", "Section", "missing", "page"]
