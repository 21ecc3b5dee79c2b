"""The step time at which the answer flips: where computing takes less, compressing starts to pay."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from accordion_bench.advising.method_cost import MethodCost
from accordion_bench.advising.pipeline import Cluster, step
from accordion_bench.advising.step_times import StepTimes
from accordion_bench.advising.winners import GAIN

SHORTEST, LONGEST = 1e-5, 1e3  # seconds of a forward and backward pass that are looked at
PER_DECADE = 5


def pays_below(times: StepTimes, costs: Sequence[MethodCost], cluster: Cluster) -> float:
    """Seconds of a forward and backward pass below which some method is faster than dense fp32 and bf16, by 2 %.

    Local methods are left out, because they change the algorithm. Optimizer, codecs and links stay as they are.

    Args:
        times: of a step; gradients are ready at the same shares of it.
        costs: of the methods.
        cluster: where they run.

    Returns:
        0 = nobody is, however short it is; infinity = somebody is, however long.
    """
    every_step = [cost for cost in costs if not cost.local]

    def pays(seconds: float) -> bool:
        shorter = lasting(times, seconds)
        dense, others = (
            min(
                (step(shorter, cost, cluster).seconds for cost in every_step if cost.baseline is wanted),
                default=math.inf,
            )
            for wanted in (True, False)
        )
        return dense > (1 + GAIN) * others

    places = round(PER_DECADE * math.log10(LONGEST / SHORTEST)) + 1
    grid = np.geomspace(SHORTEST, LONGEST, places).tolist()
    last = next((i for i in reversed(range(places)) if pays(grid[i])), None)
    if last is None:
        return 0.0
    if last == places - 1:
        return math.inf
    low, high = grid[last], grid[last + 1]
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return float(low)


def lasting(times: StepTimes, seconds: float) -> StepTimes:
    """The same step with a forward and backward pass of so many seconds."""
    factor = seconds / times.backward_end
    return replace(times.scaled(factor), update=times.update, steps=tuple(factor * taken for taken in times.steps))
