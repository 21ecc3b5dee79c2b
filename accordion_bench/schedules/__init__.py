"""Schedules: the learning rate as a multiple of `optimizer.lr`, as a function of the epoch."""
