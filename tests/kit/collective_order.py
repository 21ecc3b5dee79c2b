"""Record the collectives of each process in order, and compare the order between the processes of a run.

gloo and NCCL match the collectives of a group only by their order: a collective that one process starts too early is
matched with another one, hangs, or adds unrelated data. NCCL also hangs if processes interleave two groups differently.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Call:
    """One collective call of one process.

    Args:
        group: the ranks that take part.
        operation: name of the function of torch.distributed.
        dtype: dtype of the tensor; "" without a tensor.
        size: number of coordinates; for an all-gather those of one process.
        detail: further arguments that must be equal on all ranks: source, reduction, ranks of a new group.
        sent, received: for an all-to-all, number of coordinates to and from each process.
    """

    group: tuple[int, ...]
    operation: str
    dtype: str = ""
    size: int = 0
    detail: str = ""
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()

    @classmethod
    def of_dict(cls, saved: dict[str, Any]) -> "Call":
        """Create a call from `asdict()`, also after JSON."""
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})


class Disagreement(AssertionError):
    """Two processes do not call the same collectives in the same order."""


@contextlib.contextmanager
def recorded() -> Iterator[list[Call]]:
    """Record the collectives that all threads of this process call within the context."""
    calls: list[Call] = []

    def listening(name: str, describe: Callable[..., dict[str, Any]]) -> Callable:
        original = getattr(dist, name)

        def call(*args: Any, **named: Any) -> Any:
            group = named.get("group")
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            calls.append(Call(tuple(ranks), name, **describe(*args, **named)))
            return original(*args, **named)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for name, describe in DESCRIBED.items():
            patched.setattr(dist, name, listening(name, describe))
        yield calls


def _tensor(x: Tensor, **more: Any) -> dict[str, Any]:
    return {"dtype": str(x.dtype), "size": x.numel(), **more}


def _all_to_all(out: Tensor, x: Tensor, received: Sequence[int] = (), sent: Sequence[int] = (), **named: Any) -> dict:
    return {"dtype": str(x.dtype), "sent": tuple(sent), "received": tuple(received)}


DESCRIBED: dict[str, Callable[..., dict[str, Any]]] = {
    "all_reduce": lambda x, op=dist.ReduceOp.SUM, group=None: _tensor(x, detail=str(op)),
    "all_gather_into_tensor": lambda out, x, group=None: _tensor(x),
    "all_to_all_single": _all_to_all,
    "broadcast": lambda x, group=None, group_src=0: _tensor(x, detail=f"from {group_src}"),
    "all_gather_object": lambda heard, said, group=None: {},
    "barrier": lambda group=None: {},
    "new_group": lambda ranks, **named: {"detail": str(ranks)},
}


def compare(logs: Sequence[Sequence[Call]]) -> None:
    """Check that the logs of any two ranks agree on the collectives in which both take part.

    Raises:
        Disagreement: they do not; names the first difference.
    """
    for a, b in itertools.combinations(range(len(logs)), 2):
        common = [[call for call in logs[rank] if {a, b} <= set(call.group)] for rank in (a, b)]
        for at, (mine, other) in enumerate(itertools.zip_longest(*common)):
            if mine is None or other is None or not _meet(mine, a, other, b):
                raise Disagreement(f"collective {at} of ranks {a} and {b}: {mine} meets {other}")


def _meet(mine: Call, a: int, other: Call, b: int) -> bool:
    """Return whether the calls of two processes are the same collective."""
    plain = [(call.group, call.operation, call.dtype, call.size, call.detail) for call in (mine, other)]
    if plain[0] != plain[1]:
        return False
    if not mine.sent and not other.sent:
        return True
    at, there = mine.group.index(a), mine.group.index(b)
    return mine.sent[there] == other.received[at] and other.sent[at] == mine.received[there]


def to_json(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Convert calls to JSON."""
    return [asdict(call) for call in calls]
