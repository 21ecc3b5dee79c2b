"""What a step computes, and when each of its gradients is there."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from accordion_bench.plan import TensorSpec

FEWEST = 10  # steps from which something may be predicted without a warning
WIDEST = 0.3  # relative spread, likewise


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a training step of one worker alone on its device; medians over some steps.

    Args:
        specs: the trained tensors, in the model's order.
        ready: of each tensor, from the start of the step until its gradient was there.
        backward_end: from the start of the step until the backward pass was over.
        update: of the optimizer's step.
        steps: what each measured step took in all, for spread and intervals; () = not known.
        batch_size: samples of a step; 0 = not known.
        model: what it is called.
        device: `cpu`, `cuda`.
        source: where the times come from: `a trial here`, or a file; "" = they are estimated.
        on: on which device, as one says it; "" = on one like `device`.
    """

    specs: tuple[TensorSpec, ...]
    ready: tuple[float, ...]
    backward_end: float
    update: float
    steps: tuple[float, ...]
    batch_size: int
    model: str
    device: str
    source: str
    on: str = ""

    @property
    def place(self) -> str:
        """On which device the step computes, as one says it: `THIS CPU`, `an NVIDIA H100 (estimated)`."""
        return self.on or ("a CPU" if self.device == "cpu" else "a GPU")

    @property
    def estimated(self) -> bool:
        """Whether nobody has timed the step."""
        return not self.source

    @property
    def compute(self) -> float:
        """Seconds of a step without any communication."""
        return self.backward_end + self.update

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles of the measured steps, over their median."""
        return relative_spread(self.steps)

    def scaled(self, factor: float) -> "StepTimes":
        """The same on a device that takes so many times as long."""
        longer = tuple(factor * seconds for seconds in self.ready)
        return replace(self, ready=longer, backward_end=factor * self.backward_end, update=factor * self.update)

    def doubts(self) -> list[str]:
        """Why a prediction from these times may be wrong, one sentence each."""
        found: list[str] = []
        if self.estimated:
            return found
        if not self.steps:
            return [f"{self.source} does not say what each step took, so their spread is not known: record it again"]
        if len(self.steps) < FEWEST:
            found.append(
                f"{self.source} has {len(self.steps)} steps, fewer than {FEWEST}: record more before you rely on this"
            )
        if self.spread > WIDEST:
            found.append(
                f"the steps of {self.source} differ by {100 * self.spread:.0f} % about their median, more than "
                f"{100 * WIDEST:.0f} %: measure again on a quiet machine"
            )
        return found


def relative_spread(seconds: Sequence[float]) -> float:
    """Half of the distance between the quartiles, over the median; 0 of a single value."""
    if len(seconds) < 2:
        return 0.0
    lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
    return (upper - lower) / 2 / median
