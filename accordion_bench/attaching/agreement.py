"""Checks that processes of an attachment have equal arguments and parameters; errors of lost workers."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.members import communication_error_text, is_timeout
from accordion_bench.comm.membership import LeftBehind
from accordion_bench.options.checks import ConfigError
from accordion_bench.tensors.same_shape import as_real

log = logging.getLogger("accordion_bench")
ROUNDING = 1e-4  # relative to the norm: different processors may round an optimizer step differently


def answer(argument: str, function: Callable[..., Any], *given: Any) -> Any:
    """Return the result of a user's function, passed as `argument`; ConfigError if it raises an exception."""
    try:
        return function(*given)
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(
            f"{argument} must be a function that takes what it is called with, got one that raises "
            f"{type(error).__name__} ({said}) for {given[0]!r}; pass another {argument}"
        ) from None


class LostWorker(RuntimeError):
    """Another process has ended, or did not respond within the timeout."""


@contextlib.contextmanager
def lost_worker_told(where: str, timeout: float) -> Iterator[None]:
    """Context of collectives that turns errors of the backend about a lost process into LostWorker.

    The message starts with `where` and contains the first words of the backend's; `timeout` is that of the processes.
    """
    try:
        yield
    except LeftBehind as left:
        raise LostWorker(f"{where}: {left}") from None
    except RuntimeError as error:
        if isinstance(error, LostWorker) or not (said := communication_error_text(error)):
            raise
        first = " ".join(said.partition(". This is typically")[0].split())[:300]
        what = f"did not answer within timeout={timeout:g} s" if is_timeout(said) else "has ended"
        raise LostWorker(f"{where}: another worker {what}, as its own output may say ({first})") from None


def refuse_differences(comm: Comm, passed: Mapping[str, Any] | ConfigError, own: Any = None) -> list[Any]:
    """Compare the arguments of all processes by name; return `own`, which may differ, of each process, by rank.

    `passed` may be the error of this process's own checks.

    Raises:
        ConfigError: on all processes. If the checks of one process failed, it raises that error itself; otherwise the
            message names the first difference.
    """
    refused = str(passed) if isinstance(passed, ConfigError) else ""
    heard = comm.gather_objects((refused, {} if isinstance(passed, ConfigError) else dict(passed), own))
    if isinstance(passed, ConfigError):
        raise passed
    for rank, (sentence, *_) in enumerate(heard):
        if sentence:
            raise ConfigError(f"all processes must pass what can be used, got a refusal on rank {rank}: {sentence}")
    for rank, (_, other, _) in enumerate(heard):
        if differs := first_difference(heard[0][1], other):
            key, ours, theirs = differs
            raise ConfigError(
                f"all processes must pass the same, got {key}={ours} on rank 0 and {key}={theirs} on rank {rank}; pass "
                "the same on all"
            )
    return [theirs for *_, theirs in heard]


def first_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the first key with different values, and the repr of both; None = there is none.

    A missing option equals None, because older states lack options that were added later.
    """
    first, other = flat(ours), flat(theirs)
    for key in [*first, *(key for key in other if key not in first)]:
        shown = [repr(said[key]) if key in said else "nothing" for said in (first, other)]
        if repr(first.get(key)) != repr(other.get(key)):
            return key.removesuffix(".name"), shown[0], shown[1]
    return None


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten `{"a": {"b": 1}}` to `{"a.b": 1}`; the keys of list items are their indices."""
    if isinstance(node, Mapping):
        pairs = [(str(key), value) for key, value in node.items()]
    elif isinstance(node, list | tuple):
        pairs = [(str(key), value) for key, value in enumerate(node)]
    else:
        return {prefix: node}
    return {key: value for name, inner in pairs for key, value in flat(inner, f"{prefix}.{name}".lstrip(".")).items()}


def is_due(step: int) -> bool:
    """Return whether parameters are compared after a step: 1, 10, 100, and every thousandth."""
    return step in (1, 10, 100) or step % 1000 == 0


@torch.no_grad()
def refuse_drift(comm: Comm, values: Sequence[Tensor], step: int, tell: bool = True) -> bool:
    """Return whether the parameters of workers differ by rounding; 8 control bytes if not. All processes must call it.

    The leader warns of them if `tell`. ConfigError is raised if they differ by more than `ROUNDING`.
    """
    if comm.same(checksum(values)):
        return False
    first = [value.clone(memory_format=torch.contiguous_format) for value in values]
    comm.broadcast_(first, "control")
    away = torch.stack([(a.double() - b.double()).square().sum() for a, b in zip(values, first, strict=True)]).sum()
    size = torch.stack([b.double().square().sum() for b in first]).sum()
    apart = [float(d) for d in comm.gather_objects(float((away / size).sqrt()))]
    rank = max(range(len(apart)), key=lambda r: apart[r] if apart[r] == apart[r] else float("inf"))
    if not apart[rank] <= ROUNDING:
        raise ConfigError(
            f"parameters must be the same on all ranks, got ones that differ by {apart[rank]:.2g} of their norm on "
            f"ranks 0 and {rank} after step {step}; change or load them alike on all, or before ab.attach"
        )
    if comm.leader and tell:
        log.warning(
            "the parameters of rank %d differ from rank 0's by %.1e of their norm after step %d, as rounding of "
            "different processors would have it; gradients are still exchanged",
            *(rank, apart[rank], step),
        )
    return True


def checksum(values: Sequence[Tensor]) -> int:
    """Return a checksum of the bits of tensors."""
    sums = []
    for value in values:
        bits = as_real(value.detach()).contiguous().view(-1).view(torch.uint8)
        wide = bits.view(torch.int32) if bits.numel() % 4 == 0 else bits
        sums.append(wide.sum(dtype=torch.int64))
    return int(torch.stack(sums).sum())
