"""What the user of an attachment is warned of, once each."""

import logging

from accordion_bench.attaching.loop_position import LoopPosition
from accordion_bench.compressors.base import Compressor
from accordion_bench.methods.build import Methods

log = logging.getLogger("accordion_bench")
UNUSED = 10  # backward passes in a row after which another optimizer may be the one that steps
LONG = 10_000  # steps in one epoch after which its end may have been forgotten


class Reminders:
    """Warnings about a loop that does not use an attachment as it is meant; the leader prints them.

    Args:
        methods: what the attachment communicates.
        compressor_name: of these.
        position: where the loop stands.
        leader: whether this process prints.
    """

    def __init__(self, methods: Methods, compressor_name: str, position: LoopPosition, leader: bool) -> None:
        self.compressor_name, self.position, self.leader = compressor_name, position, leader
        self._by_epoch = [name for name, policy in methods.policies.items() if policy.when == "epoch"]
        self._unused = 0  # steps in a row whose gradients no optimizer has used
        self._told_of_epochs = self._told_of_updates = False

    def gradients_unused(self) -> None:
        """Gradients have come, and those of the step before were never used; that may happen, but not for ever."""
        self._unused += 1
        if self._unused == UNUSED and self.leader:
            log.warning(
                "the gradients of %d backward passes in a row were used by no optimizer of ab.attach; call the step of "
                "the optimizer that was passed, or all workers train alone",
                UNUSED,
            )

    def update_lost(self, compressor: Compressor) -> None:
        """A second backward pass has come before the optimizer's step, and a compressor was to take that step."""
        if self._told_of_updates or not compressor.traits.optimizer.owns:
            return
        self._told_of_updates = True
        if self.leader:
            log.warning(
                "two backward passes before optimizer.step(): compressor=%s takes the step itself, and what came of "
                "the first one is given up; write `with comm.no_sync():` around it, if gradients are to be added up",
                self.compressor_name,
            )

    def gradients_used(self) -> None:
        """An optimizer has used the gradients; a policy that decides by epoch may wait for its end in vain."""
        self._unused = 0
        patience = 2 * (self.position.known_steps or LONG)
        if self._by_epoch and not self._told_of_epochs and self.position.step_in_epoch >= patience:
            self._told_of_epochs = True
            if self.leader:
                log.warning(
                    "adaptive=%s decides at the end of an epoch, and none has ended in %d steps; call comm.end_epoch() "
                    "after each",
                    self._by_epoch[0],
                    self.position.step_in_epoch,
                )
