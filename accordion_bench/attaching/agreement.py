"""Whether all processes have passed the same: else they would wait for each other, or drift apart."""

from collections.abc import Mapping
from typing import Any

from accordion_bench.comm.collectives import Comm
from accordion_bench.options.checks import ConfigError


def refuse_differences(comm: Comm, passed: Mapping[str, Any]) -> None:
    """Compare what every process has passed.

    Args:
        comm: of all processes.
        passed: by name; values may hold others.

    Raises:
        ConfigError: on all processes, naming the first difference.
    """
    everyones = [flat(said) for said in comm.everyones(dict(passed))]
    first = everyones[0]
    for rank, other in enumerate(everyones):
        for key in [*first, *(key for key in other if key not in first)]:
            if first.get(key, "nothing") != other.get(key, "nothing"):
                raise ConfigError(
                    f"all processes must pass the same, got {key}={first.get(key, 'nothing')!r} on rank 0 and "
                    f"{key}={other.get(key, 'nothing')!r} on rank {rank}; pass the same on all"
                )


def flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; lists are cut by index."""
    if isinstance(node, Mapping):
        pairs = [(str(key), value) for key, value in node.items()]
    elif isinstance(node, list | tuple):
        pairs = [(str(key), value) for key, value in enumerate(node)]
    else:
        return {prefix: node}
    return {key: value for name, inner in pairs for key, value in flat(inner, f"{prefix}.{name}".lstrip(".")).items()}
