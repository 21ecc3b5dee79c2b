"""A timeline that `comm.timeline()` has recorded in somebody's loop, as the times of a step."""

from collections.abc import Sequence
from pathlib import Path

from accordion_bench.advising.step_times import StepTimes
from accordion_bench.network.timeline_file import NoTimeline, read_timeline, refuse_other_model
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec

INSTEAD = "record one with comm.timeline() of ab.attach"


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
