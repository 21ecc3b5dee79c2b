"""Whether all processes have passed the same: else they would wait for each other, or drift apart."""

from collections.abc import Mapping
from typing import Any

from accordion_bench.comm.collectives import Comm
from accordion_bench.options.checks import ConfigError


def refuse_differences(comm: Comm, passed: Mapping[str, Any] | ConfigError, own: Any = None) -> list[Any]:
    """Compare what every process has passed.

    Args:
        comm: of all processes.
        passed: by name, values may hold others; or why this process refuses what it was passed.
        own: what may differ from process to process.

    Returns:
        `own` of each process, by rank.

    Raises:
        ConfigError: on all processes; where one refuses what it was passed, its own sentence there, else naming the
            first difference.
    """
    refused = str(passed) if isinstance(passed, ConfigError) else ""
    heard = comm.everyones((refused, {} if isinstance(passed, ConfigError) else dict(passed), own))
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
    """The first key whose values differ, and both as one writes them; None = there is none.

    An option that is null is as good as none: what was saved before there was that option lacks it.
    """
    first, other = flat(ours), flat(theirs)
    for key in [*first, *(key for key in other if key not in first)]:
        shown = [repr(said[key]) if key in said else "nothing" for said in (first, other)]
        if repr(first.get(key)) != repr(other.get(key)):
            return key.removesuffix(".name"), shown[0], shown[1]
    return None


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; lists are cut by index."""
    if isinstance(node, Mapping):
        pairs = [(str(key), value) for key, value in node.items()]
    elif isinstance(node, list | tuple):
        pairs = [(str(key), value) for key, value in enumerate(node)]
    else:
        return {prefix: node}
    return {key: value for name, inner in pairs for key, value in flat(inner, f"{prefix}.{name}".lstrip(".")).items()}
