"""Keyed random numbers: a draw depends on its key alone, not on what was drawn before, nor on the global RNG."""

import hashlib

import torch


def key(*parts: object) -> int:
    """A 63-bit seed from the parts, e.g. `key(seed, "dropout", step, worker)`; equal on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*parts: object) -> torch.Generator:
    """A private CPU generator for one key; draw on the CPU and move, so that CPU and GPU runs see the same numbers."""
    return torch.Generator().manual_seed(key(*parts))
