"""Run folders as tidy tables: what there is, what is finished, what is missing."""
