"""Timeline of some steps: times at which gradients are ready, and step times, for advice on other links."""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from accordion_bench.comm.clock import EXCLUSIVE, Clock
from accordion_bench.network.timeline_file import FORMAT
from accordion_bench.plan import TensorSpec

OWN = ("data", "compute", "update")  # parts of a step without waiting for other workers


class Timeline:
    """Recorder of a number of steps.

    Args:
        clock: clock of the process.
        steps: number of steps to record, after the current one.
        path: path of the JSON file to write; None = none.
    """

    def __init__(self, clock: Clock, steps: int, path: Path | None) -> None:
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

        Args:
            specs: the tensors.
            about: description of model and machine.
            buckets: times of the exchange of each bucket.
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
