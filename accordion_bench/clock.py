"""Clock: where the time of a run goes.

`lap(part)` gives the time since the last mark to `part`; the exclusive parts sum to the total. The exchange
(`exposed`) is also split into encode, comm and decode by the marks that `Comm` leaves around its collectives. On a GPU
marks are CUDA events, read only once an epoch, so that measuring never waits for the device.
"""

import time
from collections import defaultdict
from typing import Any

import torch

EXCLUSIVE = ("data", "compute", "exposed", "update", "policy")
CONCURRENT = ("encode", "comm", "decode")


class Clock:
    """Laps of one process.

    Args:
        device: where the work runs; its kind decides how marks are taken.

    Attributes:
        warm: until set, everything counts as warm-up.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.warm = False
        self.totals: dict[str, float] = defaultdict(float)
        self._spans: list[tuple[str, Any, Any]] = []
        self._collectives: list[tuple[Any, Any]] = []
        self.start()

    def mark(self) -> Any:
        """A point in time, on the host or in the device's queue."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Start anew: what happened since the last lap (evaluation, writing) belongs to no part."""
        self._last = self.mark()
        self._collectives.clear()

    def collective(self, start: Any) -> None:
        """A collective that began at `start` has ended."""
        self._collectives.append((start, self.mark()))

    def lap(self, part: str) -> None:
        """Give the time since the last mark to `part`; split `exposed` at the collectives inside it."""
        start, now = self._last, self.mark()
        self._last = now
        if not self.warm:
            self._add("warmup", start, now)
            self._collectives.clear()
            return
        self._add(part, start, now)
        if part == "exposed" and self._collectives:
            for begin, end in self._collectives:
                self._add("encode", start, begin)
                self._add("comm", begin, end)
                start = end
            self._add("decode", start, now)
            self._collectives.clear()

    def _add(self, part: str, start: Any, end: Any) -> None:
        if self.cuda:
            self._spans.append((part, start, end))
        else:
            self.totals[part] += end - start

    def read(self) -> dict[str, float]:
        """Seconds so far per part; waits for the device."""
        if self._spans:
            torch.cuda.synchronize()
            for part, start, end in self._spans:
                self.totals[part] += start.elapsed_time(end) / 1000
            self._spans.clear()
        return dict(self.totals)

    def columns(self, measures_comm: bool) -> dict[str, float | None]:
        """Time columns of a metrics row: `seconds` of training, its exclusive parts, and what ran inside `exposed`.

        Args:
            measures_comm: false where a process hosts several workers: no communication time can be measured then.
        """
        totals = self.read()
        parts: dict[str, float | None] = {f"{part}_seconds": totals.get(part, 0.0) for part in EXCLUSIVE + CONCURRENT}
        if not measures_comm:
            parts["comm_seconds"] = None
        return {
            "seconds": sum(totals.get(part, 0.0) for part in EXCLUSIVE),
            **parts,
            "warmup_seconds": totals.get("warmup", 0.0),
        }
