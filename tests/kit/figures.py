"""The report's figures, not written but looked at."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.render.figures import BANDWIDTHS, rooms


def figures_of(
    arms: Sequence[Arm], bandwidths: Sequence[float] = BANDWIDTHS, only: Sequence[str] = ()
) -> dict[str, Figure]:
    """The figures of one setting by name, in the order of NAMES; those that would say nothing are left out.

    Args:
        only: their names; () = all.
    """
    drawn = {name: draw() for name, draw in rooms(arms, bandwidths).items() if not only or name in only}
    return {name: figure for name, figure in drawn.items() if figure is not None}
