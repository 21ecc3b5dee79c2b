"""Whether a run has learned anything: its end beside chance, and beside its start."""

import math
from collections.abc import Sequence

from accordion_bench.runs.metrics import Metric

WITHIN = 2.0  # standard errors of a share, inside which it cannot be told from chance


def not_learned(
    judged: Metric, value: float, losses: Sequence[float], chance: float | None = None, samples: int = 0
) -> str | None:
    """What a run that has learned nothing should be told; None for one that has.

    A share p of n samples has the standard error sqrt(p (1 - p) / n).

    Args:
        judged: the metric.
        value: of it, at the end.
        losses: the training loss of each epoch.
        chance: the metric of a guess: 1 / classes, or the size of the vocabulary; None = unknown.
        samples: of the test set.
    """
    if chance is not None and judged.percent:
        noise = WITHIN * math.sqrt(chance * (1 - chance) / max(samples, 1))
        at_chance = value <= chance + noise
    else:
        at_chance = chance is not None and not judged.better(value, chance)
    if at_chance and chance is not None:
        return (
            f"the {judged.name} is that of a guess ({judged.show(chance)}): nothing has been learned; type another "
            "optimizer.lr, or more epochs"
        )
    if losses and losses[-1] > losses[0]:
        return (
            f"the training loss ended above its start ({losses[-1]:.4g} after {losses[0]:.4g}); type a smaller "
            "optimizer.lr"
        )
    return None
