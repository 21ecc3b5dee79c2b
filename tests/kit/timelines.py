"""Synthetic timelines in the format of `Attached.timeline()`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from accordion_bench.plan import TensorSpec


def specs_of(model: nn.Module) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(param.shape)) for name, param in model.named_parameters()]


def made(
    specs: Sequence[TensorSpec],
    ready: Sequence[float | None],
    wait: float,
    buckets: Sequence[tuple[Sequence[int], float, float]] = (),
    workers: int = 4,
    **changed: Any,
) -> dict[str, Any]:
    """Return the content of the file; buckets are (tensor indices, codec seconds, rounds)."""
    found = {
        "format": 2,
        "workers": workers,
        "steps": 20,
        "step_seconds": [wait] * 20,
        "seconds": {"data": 0.0, "compute": wait, "exposed": 0.0, "update": 0.0, "policy": 0.0},
        "tensors": [
            {"name": spec.name, "shape": list(spec.shape), "ready_seconds": at}
            for spec, at in zip(specs, ready, strict=True)
        ],
        "buckets": [
            {
                "parameters": [specs[i].name for i in members],
                "encode_seconds": codec,
                "decode_seconds": 0.0,
                "rounds": rounds,
            }
            for members, codec, rounds in buckets
        ],
    }
    return {**found, **changed}


def write(path: Path, found: dict[str, Any]) -> str:
    path.write_text(json.dumps(found))
    return str(path)
