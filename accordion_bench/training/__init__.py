"""The training loop of one run."""
