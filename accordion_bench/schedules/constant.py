"""Linear warm-up, then a constant learning rate."""

from accordion_bench.schedules.base import Schedule


class Constant(Schedule):
    """factor(e) = warm-up(e), constant within an epoch; for policies that lower the learning rate themselves.

    Args:
        epochs, workers, warmup_epochs, lr_scaling: see `Schedule`.
    """

    def __call__(self, epoch: float) -> float:
        return self.warmup(int(epoch))
