"""Policies: they see signals and edit the plan."""
