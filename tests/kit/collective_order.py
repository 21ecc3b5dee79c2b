"""Which collectives a process makes, in which order; and whether the processes of a run agree on it.

gloo and NCCL match the collectives of a group by their order alone: one that comes too early in one process meets
another one's, hangs, or adds what does not belong together. NCCL also hangs where two groups take turns differently.
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
    """One collective, as one process makes it.

    Args:
        group: the ranks that take part.
        operation: of torch.distributed.
        dtype: of the tensor; "" without one.
        size: its coordinates; of an all-gather those of one process.
        detail: what else all must say alike: source, operation of a reduction, ranks of a new group.
        sent, received: of an all-to-all, coordinates to and from each process.
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
        """From `asdict()`, also after JSON."""
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})


class Disagreement(AssertionError):
    """Two processes do not make the same collectives in the same order."""


@contextlib.contextmanager
def recorded() -> Iterator[list[Call]]:
    """The collectives that this process makes from now on, of all its threads."""
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
    """Refuse logs, by rank, of which two differ in what both processes take part in.

    Raises:
        Disagreement: names the first difference.
    """
    for a, b in itertools.combinations(range(len(logs)), 2):
        common = [[call for call in logs[rank] if {a, b} <= set(call.group)] for rank in (a, b)]
        for at, (mine, other) in enumerate(itertools.zip_longest(*common)):
            if mine is None or other is None or not _meet(mine, a, other, b):
                raise Disagreement(f"collective {at} of ranks {a} and {b}: {mine} meets {other}")


def _meet(mine: Call, a: int, other: Call, b: int) -> bool:
    """Whether two processes' calls are the same collective."""
    plain = [(call.group, call.operation, call.dtype, call.size, call.detail) for call in (mine, other)]
    if plain[0] != plain[1]:
        return False
    if not mine.sent and not other.sent:
        return True
    at, there = mine.group.index(a), mine.group.index(b)
    return mine.sent[there] == other.received[at] and other.sent[at] == mine.received[there]


def to_json(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """For a file."""
    return [asdict(call) for call in calls]
