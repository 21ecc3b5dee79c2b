"""The run folder: what is written there, and when a run is the same as another."""
