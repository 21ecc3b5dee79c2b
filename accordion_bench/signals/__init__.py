"""Signals that policies receive from gradients and exchanges, and the runner of the policies."""
