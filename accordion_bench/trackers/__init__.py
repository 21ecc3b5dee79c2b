"""Trackers: other places that get the metrics rows."""
