"""Notes of a run that was to compress and travels dense."""

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from accordion_bench.runs.folder import log


class DenseNotes:
    """Says what travels dense: before the first step, in run.log where it begins, and how many steps it lasted.

    Args:
        leader: whether this process tells anything.

    Attributes:
        steps: by sentence.
    """

    def __init__(self, leader: bool) -> None:
        self.leader = leader
        self.steps: Counter[str] = Counter()
        self._told: set[str] = set()

    def predict(self, sentences: Iterable[str]) -> None:
        """Warn before the run of what will be."""
        for sentence in dict.fromkeys(filter(None, sentences)):
            if self.leader:
                print(f"warning: {sentence}", file=sys.stderr, flush=True)

    def note(self, sentence: str, step: int) -> None:
        """A step under a plan of which this is true; "" = nothing travels dense."""
        if not sentence:
            return
        self.steps[sentence] += 1
        if self.leader and sentence not in self._told:
            log.warning("from step %d on: %s", step, sentence)
            self._told.add(sentence)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"went_dense": dict(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.steps = Counter(state["went_dense"])
