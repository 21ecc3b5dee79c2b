"""Inner optimizers, torch's and ours."""
