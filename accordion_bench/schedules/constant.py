"""Linear warm-up, then a constant learning rate."""

from accordion_bench.options.option import Choice, with_options
from accordion_bench.schedules.base import Schedule


@with_options
class Constant(Schedule):
    """factor(e) = warm-up(e), constant within an epoch; for policies that lower the learning rate themselves."""

    chosen_as = {
        "constant": Choice("linear warm-up, then constant: for policies that lower the learning rate themselves")
    }

    def __call__(self, epoch: float) -> float:
        return self.warmed(int(epoch))
