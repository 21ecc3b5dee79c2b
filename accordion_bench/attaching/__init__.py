"""Compressors in anybody's training loop."""
