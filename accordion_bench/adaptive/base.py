"""What every policy is."""

from typing import Any

from accordion_bench.plan import Ladder, Plan, Signals


class Policy:
    """A policy edits the plan at the end of an epoch or between steps; it sees signals, never a compressor.

    Class attributes:
        drives: what it steers: `level` (the compressor's rank, density or bits) or `codebook` (its quantisation
            levels). Two policies may not drive the same.
        when: `epoch`: `update` runs at the end of every epoch; `step`: after the steps that are `due`.
    """

    drives: str = "level"
    when: str = "epoch"

    def ladder(self, knob: str, pair: tuple[float, float]) -> tuple[float, ...]:
        """The values that this policy chooses from, strong first; `pair` is the compressor's own (strong, weak)."""
        raise NotImplementedError

    def needs(self, epoch: int) -> frozenset[str]:
        """The signals to collect during this epoch; what nobody needs is not computed."""
        return frozenset()

    def due(self, step: int) -> bool:
        """Whether to decide after this step, where `when` is `step`."""
        return False

    def needs_at(self, step: int) -> frozenset[str]:
        """The bucket statistics to collect in this step."""
        return frozenset()

    def start(self, plan: Plan, ladder: Ladder) -> Plan:
        """The plan before the first step."""
        return plan

    def update(self, signals: Signals, plan: Plan) -> Plan:
        """The plan after an epoch, or a step. Runs on the leader alone; the result is broadcast."""
        return plan

    def decision(self) -> dict[str, Any]:
        """What the last update saw and decided, for the metrics row."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, strings and containers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
