"""Keyed random numbers: a draw depends on its key only, neither on earlier draws nor on the global generator."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import torch


def key(*parts: object) -> int:
    """Return a 63-bit seed from the parts, e.g. `key(seed, "dropout", step, worker)`; equal on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def opened(*parts: object) -> bytes:
    """Return the common prefix of keys that begin with these parts, at least two; see `closed`."""
    return repr(parts)[:-1].encode()


def closed(beginnings: Sequence[bytes], *parts: object) -> list[int]:
    """Return `key(*first, *parts)` for each prefix of `opened(*first)`."""
    end = f", {', '.join(map(repr, parts))})".encode()
    digests = [hashlib.blake2b(first + end, digest_size=8).digest() for first in beginnings]
    return [int.from_bytes(digest, "little") >> 1 for digest in digests]


def generator(*parts: object) -> torch.Generator:
    """Return a CPU generator for one key; draw on the CPU and copy, so that CPU and GPU runs get the same numbers."""
    return torch.Generator().manual_seed(key(*parts))


@contextlib.contextmanager
def kept_rng(device: torch.device | str = "cpu") -> Iterator[None]:
    """Restore the state of torch's global generators on exit."""
    device = torch.device(device)
    cpu = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, device)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator inside the block, and restore its state on exit."""
    with kept_rng():
        torch.default_generator.manual_seed(seed)
        yield
