"""Sync: what happens between the gradients and the parameters."""
