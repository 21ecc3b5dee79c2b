"""The run folder: its files, its checkpoints, and the search for earlier equal runs."""
