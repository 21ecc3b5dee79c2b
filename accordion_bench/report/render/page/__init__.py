"""The report as one interactive HTML page that loads nothing else."""

from accordion_bench.report.render.page.build import INTERACTIVE, Section, missing, page

__all__ = ["INTERACTIVE", "Section", "missing", "page"]
