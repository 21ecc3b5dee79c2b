"""Rounding to levels and to signs: bucket norms, stochastic rounding, packed codes, and sums of decoded messages.

A row of coordinates is cut into buckets of `bucket_size` consecutive ones (None: the whole row is one bucket); the last
bucket may be shorter and has a norm of its own. Everything goes tile by tile, so that a tile stays in the processor's
cache between the passes over it and a gradient is read from memory once for its norms and once for its codes. Who makes
the passes, torch or numpy, is decided once, see `passes`.
"""
