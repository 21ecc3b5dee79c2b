"""Keyed random numbers: a draw depends on its key alone, not on what was drawn before, nor on the global RNG."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import torch


def key(*parts: object) -> int:
    """A 63-bit seed from the parts, e.g. `key(seed, "dropout", step, worker)`; equal on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def opened(*parts: object) -> bytes:
    """The beginning of keys whose first parts are these, at least two; see `closed`."""
    return repr(parts)[:-1].encode()


def closed(beginnings: Sequence[bytes], *parts: object) -> list[int]:
    """The keys of some beginnings and the same last parts: `key(*first, *parts)` of each."""
    end = f", {', '.join(map(repr, parts))})".encode()
    digests = [hashlib.blake2b(first + end, digest_size=8).digest() for first in beginnings]
    return [int.from_bytes(digest, "little") >> 1 for digest in digests]


def generator(*parts: object) -> torch.Generator:
    """A private CPU generator for one key; draw on the CPU and move, so that CPU and GPU runs see the same numbers."""
    return torch.Generator().manual_seed(key(*parts))


@contextlib.contextmanager
def kept_rng(device: torch.device | str = "cpu") -> Iterator[None]:
    """Leave torch's global generators as they were."""
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
    """Draw from torch's global CPU generator as if freshly seeded, and leave it as it was."""
    with kept_rng():
        torch.default_generator.manual_seed(seed)
        yield
