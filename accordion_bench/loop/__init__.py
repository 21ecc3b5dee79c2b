"""One training step with communication, for every training loop."""
