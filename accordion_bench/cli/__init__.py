"""What the command line adds to a run: sweeps, presets, smoke tests, what runs together."""
