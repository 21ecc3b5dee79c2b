"""Steps as they may turn out: random numbers that depend on seed, step and worker alone."""

import numpy as np
from numpy.typing import NDArray

from accordion_bench.advising.disturbances import Disturbances
from accordion_bench.advising.step_times import StepTimes
from accordion_bench.options.checks import ValueRefused
from accordion_bench.tensors import keyed_rng

Array = NDArray[np.float64]  # a number for each worker, unless something else is said


def generator(*parts: object) -> np.random.Generator:
    """NumPy's, for one key: what it draws does not hang on what others have drawn."""
    return np.random.default_rng(keyed_rng.key(*parts))


class RandomSteps:
    """How many times as long as the median step each worker's takes.

    Args:
        times: the measured steps, whose median stands for 1.
        disturbances: `spread` and `slow`.
        workers: A. The draws of a worker do not hang on how many others there are.
        seed: for draws.

    Attributes:
        slow: of each worker, what is the same in all its steps.

    Raises:
        ValueRefused: steps are to be drawn from measured ones, and none was measured.
    """

    def __init__(self, times: StepTimes, disturbances: Disturbances, workers: int, seed: int) -> None:
        self.spread, self.workers, self.seed = disturbances.spread, workers, seed
        if self.spread is None and not times.steps:
            raise ValueRefused("spread", "a number where no single step is timed", None, 0.1)
        self.measured = np.asarray(times.steps) / np.median(times.steps) if times.steps else np.ones(1)
        self.slow = np.ones(workers)
        for worker, factor in disturbances.slow.items():
            self.slow[worker] = factor

    def factors(self, step: int) -> Array:
        """Of one step."""
        if self.spread == 0:
            return self.slow
        draws = generator(self.seed, "step", step)
        if self.spread is None:
            chosen = draws.random(self.workers) * len(self.measured)
            return self.slow * self.measured[chosen.astype(np.int64)]
        return self.slow * np.exp(self.spread * draws.standard_normal(self.workers))
