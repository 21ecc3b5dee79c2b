"""What the user of an attachment is warned of: options without effect, a loop that does not use it as it is meant."""

import logging
from collections.abc import Iterator
from dataclasses import replace

from accordion_bench.attaching.loop_position import LoopPosition
from accordion_bench.compressors import assemble
from accordion_bench.compressors.compressor import Compressor
from accordion_bench.methods.build import Methods
from accordion_bench.methods.compatibility import Chosen
from accordion_bench.options.component import Surroundings, idle_options
from accordion_bench.options.conf_dir import read_options, yaml_files
from accordion_bench.options.instantiate import Config, target


def without_effect(chosen: Chosen, methods: Methods) -> list[str]:
    """A sentence for each option that differs from its default and changes nothing here.

    Args:
        chosen: names and options.
        methods: built of them.
    """
    context = Surroundings(
        epochs=methods.run.epochs,
        workers=methods.run.workers,
        gradients=methods.sync.gradient_exchange,
        knob=methods.wrapped.compressor.traits.knob or "",
        steered_by=tuple(name for name, policy in methods.policies.items() if policy.drives == "level"),
        weight_decay=chosen.optimizer.get("weight_decay", 0.0),
    )
    return list(
        dict.fromkeys(told for group, name, node in _nodes(chosen) for told in _idle(group, name, node, context))
    )


def _nodes(chosen: Chosen) -> Iterator[tuple[str, str, Config]]:
    """Group, name and options of each choice."""
    yield "compressor", chosen.compressor_name, chosen.compressor
    yield "sync", chosen.sync_name, chosen.sync
    yield from (("adaptive", name, node) for name, node in chosen.adaptive.items())


def _idle(group: str, name: str, node: Config, context: Surroundings) -> Iterator[str]:
    default = read_options(yaml_files(group)[name])
    here = replace(context, group=f"{group}.{name}" if group == "adaptive" else group, choice=name)
    found = assemble.idle(node, here) if group == "compressor" else idle_options(target(node, group), node, here)
    for key, why in found:
        if key in node and node[key] != default.get(key):
            yield f"{key}={node[key]!r} of {name} has no effect here: {why}"


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
