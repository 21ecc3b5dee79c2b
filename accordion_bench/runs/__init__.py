"""The run folder: its files, checkpoints, and the test of whether two runs are the same."""
