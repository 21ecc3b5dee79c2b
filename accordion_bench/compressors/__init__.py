"""Compressors: what a worker sends of its gradient, and what everyone makes of it."""
