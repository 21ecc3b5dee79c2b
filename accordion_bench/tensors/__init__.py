"""Storage of tensors, and random numbers that depend on a key alone."""
