"""Comparison of arms: grouping of runs, statistics over seeds, table columns, and verdicts in words."""
