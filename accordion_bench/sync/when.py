"""Schedule of a round: the steps after which workers send, and those after which they apply averages."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class When:
    """Schedule of a round: the steps, counted from its start, after which workers send and apply averages.

    Args:
        period: H, steps per round; it may change from round to round.
        slots: number of equal parts of a round. Each sends one message, with one of as many fragments of the tensors.
        delay: steps between sending and applying; 0 = blocking, None = one round.
        ahead: whether a message is sent `delay` steps before the end of its slot and applied there; otherwise it is
            sent at the end of the slot.
        groups: (period, size) of worker groups that average more often than all workers.
    """

    period: int
    slots: int = 1
    delay: int | None = 0
    ahead: bool = False
    groups: Sequence[tuple[int, int]] = ()

    def slot(self, period: int) -> int:
        """Return the number of steps of a slot."""
        return period // self.slots

    def sends(self, since: int, period: int) -> int | None:
        """Return the largest tier that sends after `since` steps of a round; None = none."""
        if self.groups:
            return max((i for i, (own, _) in enumerate(self.groups) if since % own == 0), default=None)
        return 0 if self.sent(since, period) > self.sent(since - 1, period) else None

    def sent(self, steps: int, period: int) -> int:
        """Return the number of messages of all workers in `steps` steps."""
        early = self.delay or 0 if self.ahead else 0
        return (steps + early) // self.slot(period)

    def uses(self, since: int, period: int) -> bool:
        """Whether averages in flight are applied after `since` steps of a round."""
        return self.used(since, period) > self.used(since - 1, period)

    def used(self, steps: int, period: int) -> int:
        """Return how often averages are applied in `steps` steps, those from `Round.at_the_start` included."""
        late = period - min(self.delay or period, period)
        return steps // self.slot(period) if self.ahead else (steps + late) // period

    @property
    def in_next_round(self) -> bool:
        """Whether averages are applied in the round after their launch."""
        return self.delay != 0 and not self.ahead
