"""Size of a compressor's state in bytes."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from accordion_bench.exchange.exchange import Exchange


def state_bytes(exchange: Exchange, share: float = 1.0) -> float:
    """Return the bytes of a compressor's state in a process with the given share of the exchange's workers."""
    rows = [(key.endswith("_W"), value) for own in exchange.state.values() for key, value in own.items()]
    return sum((share if of_workers else 1) * size_of(tensors_in(value)) for of_workers, value in rows)


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(x.numel() * x.element_size() for x in tensors)


def tensors_in(node: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested containers."""
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from tensors_in(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from tensors_in(value)
