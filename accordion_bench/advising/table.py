"""The table of advice: one row for each method."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas as pd


class Interval(NamedTuple):
    """A number and the 95 % interval about it, from what was measured again and again."""

    value: float
    low: float
    high: float


class Pays(NamedTuple):
    """Where compressing starts to pay.

    below: seconds of a forward and backward pass; 0 = at no step time, infinity = at every one.
    on: the devices that this is said of; "" = those that the advice is for.
    """

    below: float
    on: str = ""


def limit_in_words(limit: float) -> str:
    """Of one that is no number; "" of one that is."""
    if math.isnan(limit):
        return "only on fast links"
    return "always" if math.isinf(limit) else "" if limit else "never"


@dataclass(frozen=True)
class AdviceRow:
    """What one method would do.

    Args:
        method: as reports spell it.
        overrides: what to type for it.
        step: seconds of a training step; of a local method, the mean over a period.
        over_fp32, over_bf16: how many times as fast as the dense baseline, overlapped; above 1 = faster.
        exposed: seconds of communication and codec that a step waits for.
        payload_bytes, wire_bytes: of one worker, per step.
        memory_bytes: that the method keeps in each worker.
        break_even_fp32, break_even_bf16: bit/s of the (outer) link below which it is faster than the baseline; 0 =
            never, infinity = at every bandwidth, NaN = only on fast links.
        period: steps between two exchanges.
        local: a local method: the shortest period with less than 5 % exposed, or the longest that was looked for.
        every_local_step: but for one that exchanges after every step.
        accuracy: what it has cost in runs at hand, in words; "" = not known.
        command: that would measure the accuracy.
    """

    method: str
    overrides: tuple[str, ...]
    step: Interval
    over_fp32: Interval
    over_bf16: Interval
    exposed: Interval
    payload_bytes: float
    wire_bytes: float
    memory_bytes: float
    break_even_fp32: float
    break_even_bf16: float
    period: int = 1
    local: bool = False
    every_local_step: bool = False
    accuracy: str = ""
    command: str = ""

    def flat(self) -> dict[str, Any]:
        """As columns: intervals as `step`, `step_low`, `step_high`; break-evens that are no bandwidth as words."""
        found: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Interval):
                found |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
            elif name == "overrides":
                found[name] = " ".join(value)
            elif name.startswith("break_even"):
                found[name] = limit_in_words(value) or value
            else:
                found[name] = value
        return found


@dataclass(frozen=True)
class Regions:
    """Step time of every method over bandwidth, or over workers: what the figures draw.

    Args:
        axis: `bandwidth` (bit/s of the outer link) or `workers`.
        at: where on the axis.
        here: the reader's own.
        steps: seconds of a step by method, one for each of `at`.
    """

    axis: str
    at: tuple[float, ...]
    here: float
    steps: dict[str, tuple[float, ...]]

    def fastest(self) -> list[str]:
        """The method that wins, at each place of the axis."""
        return [min(self.steps, key=lambda name: self.steps[name][i]) for i in range(len(self.at))]


@dataclass(frozen=True)
class Advice:
    """All that is said of one model on one cluster.

    Args:
        model, device: what was timed, and where.
        machines, workers_per_machine: of the cluster.
        network: the link's options, as `network=custom` takes them.
        compute: seconds of a step without communication.
        verdict: sentences, the answer first.
        doubts: why it may be wrong, a sentence each.
        rows: sorted by step time.
        by_bandwidth, by_workers: for the figures.
        left_out: methods that could not be timed, and why.
        on: the device that it is computed for, as one says it: `THIS CPU`, `an NVIDIA H100 (estimated)`.
        pays: the step time at which the answer flips; None = not looked for.
    """

    model: str
    device: str
    machines: int
    workers_per_machine: int
    network: dict[str, object]
    compute: Interval
    verdict: tuple[str, ...]
    doubts: tuple[str, ...]
    rows: tuple[AdviceRow, ...]
    by_bandwidth: Regions
    by_workers: Regions
    left_out: dict[str, str]
    on: str = ""
    pays: Pays | None = None

    @property
    def workers(self) -> int:
        """In all."""
        return self.machines * self.workers_per_machine

    def table(self) -> "pd.DataFrame":
        """One row for each method, as in the CSV."""
        import pandas as pd  # half a second that others need not wait

        return pd.DataFrame([row.flat() for row in self.rows])

    def row(self, method: str) -> AdviceRow:
        """That of one method."""
        return next(row for row in self.rows if row.method == method)


def by_step(rows: Sequence[AdviceRow]) -> list[AdviceRow]:
    """The fastest first."""
    return sorted(rows, key=lambda row: row.step.value)
