"""The training loop of a run: steps, epochs, evaluation, checkpoints, progress output and process start."""
