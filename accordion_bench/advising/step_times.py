"""What a step computes, and when each of its gradients is there.

The times come from a trial, from an estimate, or from what `comm.timeline()` has recorded in a user's loop.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from accordion_bench.network.timeline_file import NoTimeline, read_timeline, refuse_other_model
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec

FEWEST = 10  # steps from which something may be predicted without a warning
WIDEST = 0.3  # relative spread, likewise
INSTEAD = "record one with comm.timeline() of ab.attach"


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
        """Whether the step is not timed."""
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


def step_times_from(path: str | Path, specs: Sequence[TensorSpec] | None = None) -> StepTimes:
    """Read when gradients were ready and what a step took.

    A gradient that no step has had counts as ready at the end of the backward pass. Of format 1, which lacks it, the
    spread of the steps is not known.

    Args:
        path: of the JSON file.
        specs: trained tensors of the model that advice is for; None = whatever is in the file.

    Raises:
        ConfigError: there is no such file, it is none of `comm.timeline()`, or of another model.
    """
    try:
        step = read_timeline(path)
        if specs is not None:
            refuse_other_model(step, specs)
    except NoTimeline as why:
        told = f"timeline must be a file that comm.timeline() has written, got {path}: {why}; {INSTEAD}"
        raise ConfigError(told) from None
    return StepTimes(
        specs=step.specs if specs is None else tuple(specs),
        ready=step.ready,
        backward_end=step.backward_end,
        update=step.update,
        steps=step.steps,
        batch_size=0,
        model=step.model,
        device=step.device,
        source=str(path),
        on=f"the {'CPU' if step.device == 'cpu' else 'GPU'} of {Path(path).name}" if step.device else "",
    )
