"""Timeline files: recorder, and reader of times at which gradients were ready, step durations, and buckets."""

import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from accordion_bench.comm.stages import EXCLUSIVE
from accordion_bench.plan import TensorSpec

if TYPE_CHECKING:
    from accordion_bench.comm.clock import Clock  # imports torch, which a reader does not need

FORMAT = 2  # format 1 has no step_seconds


class NoTimeline(ValueError):
    """A file is no timeline of this model; the message is a clause with the reason."""


class RecordedBucket(NamedTuple):
    """Bucket of a recorded exchange."""

    tensors: tuple[int, ...]  # indices of the tensors
    codec: float  # seconds of encoding and decoding
    rounds: float  # number of rounds with the workers of the timeline


@dataclass(frozen=True)
class RecordedStep:
    """Typical step of a timeline; times are seconds from its start."""

    specs: tuple[TensorSpec, ...]  # the trained tensors, in the model's order
    ready: tuple[float, ...]  # time at which each gradient was ready; `backward_end` for a tensor without a gradient
    backward_end: float  # time at which only waiting for the exchange remained
    update: float  # duration of the optimizer's step
    steps: tuple[float, ...]  # duration of each step; empty = not recorded
    workers: int  # number of workers of the training
    buckets: tuple[RecordedBucket, ...]  # buckets in the order of their exchange; empty = not recorded
    # model, device: their names; "" = not recorded
    model: str
    device: str


def read_timeline(path: str | Path) -> RecordedStep:
    """Read a file of `comm.timeline()`; NoTimeline if it cannot be read, or has other contents."""
    found = _read(Path(path))
    tensors = _part(found, "tensors", list)
    specs = tuple(_spec(tensor) for tensor in tensors)
    if not specs:
        raise NoTimeline("tensors must be a list of at least one, got none")
    seconds = _part(found, "seconds", dict)
    data, compute, update = (_number(f"seconds.{part}", seconds.get(part)) for part in ("data", "compute", "update"))
    ready: list[float | None] = []
    for spec, row in zip(specs, tensors, strict=True):
        value = row.get("ready_seconds")
        ready.append(None if value is None else _number(f"ready_seconds of {spec.name}", value))
    backward_end = max(data + compute, *(moment or 0.0 for moment in ready))
    steps = _part(found, "step_seconds", list) if found["format"] > 1 else []
    workers = found.get("workers", 1)
    if type(workers) is not int or workers < 1:
        raise NoTimeline(f"workers must be an integer of at least 1, got {json.dumps(workers)[:40]}")
    model, device = ("" if found.get(key) is None else str(found[key]) for key in ("model", "device"))
    return RecordedStep(
        specs=specs,
        ready=tuple(backward_end if moment is None else moment for moment in ready),
        backward_end=backward_end,
        update=update,
        steps=tuple(_number(f"step_seconds[{i}]", value) for i, value in enumerate(steps)),
        workers=workers,
        buckets=_buckets(found, specs),
        model=model,
        device=device,
    )


def refuse_other_model(step: RecordedStep, specs: Sequence[TensorSpec]) -> None:
    """Raise NoTimeline for the first tensor of a timeline that differs from the model's trained tensors."""
    for recorded, wanted in itertools.zip_longest(step.specs, specs):
        if recorded != wanted:
            has, wants = (f"{s.name} {list(s.shape)}" if s else "no further tensor" for s in (recorded, wanted))
            raise NoTimeline(f"it must be of the same model, got {has} where the model has {wants}")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NoTimeline(f"it cannot be read ({error.strerror})") from None
    except ValueError:
        raise NoTimeline("it must hold one JSON object, got something else") from None
    if not isinstance(found, dict):
        raise NoTimeline(f"it must hold one JSON object, got {type(found).__name__}")
    version = found.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= FORMAT:
        raise NoTimeline(f"its format must be a number from 1 to {FORMAT}, got {json.dumps(version)}")
    return found


def _part(found: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(found.get(key), kind):
        what = "a list" if kind is list else "an object"
        raise NoTimeline(f"{key} must be {what}, got {json.dumps(found.get(key))[:40]}")
    return found[key]


def _spec(tensor: Any) -> TensorSpec:
    entry = tensor if isinstance(tensor, dict) else {}
    name, shape = entry.get("name"), entry.get("shape")
    sizes: list[Any] = shape if isinstance(shape, list) else [None]
    if not isinstance(name, str) or any(type(size) is not int or size < 0 for size in sizes):
        raise NoTimeline(f"a tensor must have a name and a shape, got {json.dumps(tensor)[:60]}")
    return TensorSpec(name, tuple(sizes))


def _buckets(found: dict[str, Any], specs: Sequence[TensorSpec]) -> tuple[RecordedBucket, ...]:
    index, buckets = {spec.name: i for i, spec in enumerate(specs)}, []
    for row in _part(found, "buckets", list):
        entry = row if isinstance(row, dict) else {}
        members = tuple(index.get(str(name), -1) for name in _part(entry, "parameters", list))
        codec = sum(_number(part, entry.get(part)) for part in ("encode_seconds", "decode_seconds"))
        rounds = _number("rounds", entry.get("rounds"), "number")
        buckets.append(RecordedBucket(members, codec, rounds))
    held = sorted(i for bucket in buckets for i in bucket.tensors)
    if buckets and held != list(range(len(specs))):
        raise NoTimeline(f"its buckets must hold each of its {len(specs)} tensors once, got {len(held)} tensors")
    return tuple(buckets)


def _number(key: str, value: Any, what: str = "number of seconds") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise NoTimeline(f"{key} must be a finite {what} of at least 0, got {json.dumps(value)[:40]}")
    return float(value)


OWN = ("data", "compute", "update")  # parts of a step without waiting for other workers


class Timeline:
    """Recorder of a number of steps after the current one, and writer of the JSON file, if there is a path."""

    def __init__(self, clock: "Clock", steps: int, path: Path | None) -> None:
        self.clock, self.wanted, self.path = clock, steps, path
        self.taken: dict[str, list[float]] = defaultdict(list)
        self.ready: dict[int, list[float]] = defaultdict(list)
        self._began: Any = None
        self._marks: dict[int, Any] = {}
        self._before: dict[Any, float] = {}

    def begin_step(self) -> None:
        """Start a step; ignore time before it."""
        self._marks.clear()
        self._before = self.clock.read()
        self._began = self.clock.mark()

    def arrived(self, i: int) -> None:
        """Note that the gradient of one tensor is ready."""
        if self._began is not None:
            self._marks[i] = self.clock.mark()

    def end_step(self) -> bool:
        """End a step; return whether it was the last one."""
        if self._began is None:
            return False
        now = self.clock.read()
        for part in EXCLUSIVE:
            self.taken[part].append(now.get(part, 0.0) - self._before.get(part, 0.0))
        for i, mark in self._marks.items():
            self.ready[i].append(self.clock.between(self._began, mark))
        self._began = None
        return len(self.taken["compute"]) >= self.wanted

    def found(self, specs: list[TensorSpec], about: dict[str, Any], buckets: list[dict[str, Any]]) -> dict[str, Any]:
        """Return medians over the steps in seconds; `step_seconds` is the time of each step without waiting for others.

        `about` describes model and machine, `buckets` the times of the exchange of each bucket.
        """
        return {
            "format": FORMAT,
            **about,
            "steps": len(self.taken["compute"]),
            "seconds": {part: statistics.median(values) for part, values in self.taken.items()},
            "step_seconds": [sum(step) for step in zip(*(self.taken[part] for part in OWN), strict=True)],
            "tensors": [
                {
                    "name": spec.name,
                    "shape": list(spec.shape),
                    "ready_seconds": statistics.median(self.ready[i]) if self.ready[i] else None,
                }
                for i, spec in enumerate(specs)
            ],
            "buckets": buckets,
        }

    def write(self, found: dict[str, Any]) -> None:
        """Write the file, if there is a path."""
        if self.path is not None:
            self.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
