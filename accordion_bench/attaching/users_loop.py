"""Position of a user's loop, and warnings about options without effect and about loops that misuse an attachment."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from accordion_bench.compressors import assemble
from accordion_bench.compressors.compressor import Compressor
from accordion_bench.methods.build import Methods
from accordion_bench.methods.compatibility import MethodOptions
from accordion_bench.options.component import RunContext, idle_options
from accordion_bench.options.conf_dir import read_options, yaml_files
from accordion_bench.options.instantiate import Config, target
from accordion_bench.plan import Plan
from accordion_bench.position import Position

UNKNOWN = 2**31  # number of epochs, or of steps per epoch, that is not known


class LoopPosition(Position):
    """Current step and epoch of a user's loop.

    Args:
        rate: returns the current learning rate of the first tensor.
        schedule: function from the time in epochs to the learning rate; None = only the current one is known.
        epochs, steps: number of epochs, and of optimizer steps per epoch; None = unknown.
    """

    def __init__(
        self,
        plan: Plan,
        rate: Callable[[], float],
        schedule: Callable[[float], float] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
    ) -> None:
        super().__init__(plan, 1.0, schedule or (lambda _: 1.0), epochs or UNKNOWN, lambda _: steps or UNKNOWN)
        self.rate, self.scheduled, self.known_steps = rate, schedule is not None, steps
        self.epoch_lr = self.step_lr = rate()
        self.next_lr: float | None = None  # at the start of the next epoch, while an epoch ends

    def note_rate(self) -> None:
        """Set the learning rate of the next step to the current one."""
        self.step_lr = self.rate()
        if self.step_in_epoch == 0:
            self.epoch_lr = self.step_lr

    def lr(self, step_in_epoch: int | None = None, epoch: int | None = None) -> float:
        """Return the learning rate of a step: that of the schedule, else the current one or that of the first step."""
        if self.scheduled:
            return super().lr(step_in_epoch, epoch)
        if epoch is not None and epoch > self.epoch:
            return self.step_lr if self.next_lr is None else self.next_lr
        return self.epoch_lr if step_in_epoch == 0 else self.step_lr

    def end_lr(self) -> float:
        return super().end_lr() if self.scheduled else self.step_lr

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rates": [self.epoch_lr, self.step_lr]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.epoch_lr, self.step_lr = state["rates"]


def idle_clipping(norm: float | None, at: str | None) -> list[str]:
    """Return a sentence if `clip_at` was passed without `clip_norm`."""
    return [f"clip_at={at!r} has no effect here: clip_norm is None"] if at is not None and norm is None else []


def options_without_effect(chosen: MethodOptions, methods: Methods) -> list[str]:
    """Return a sentence for each option that differs from its default and has no effect in the methods built of it."""
    context = RunContext(
        epochs=methods.run.epochs,
        workers=methods.run.workers,
        gradients=methods.sync.gradient_exchange,
        knob=methods.wrapped.compressor.traits.knob or "",
        steered_by=tuple(name for name, policy in methods.policies.items() if policy.drives == "level"),
        weight_decay=chosen.optimizer.get("weight_decay", 0.0),
    )
    nodes = [("compressor", chosen.compressor_name, chosen.compressor), ("sync", chosen.sync_name, chosen.sync)]
    nodes += [("adaptive", name, node) for name, node in chosen.adaptive.items()]
    return list(dict.fromkeys(told for choice in nodes for told in _idle(*choice, context)))


def _idle(group: str, name: str, node: Config, context: RunContext) -> Iterator[str]:
    default = read_options(yaml_files(group)[name])
    here = replace(context, group=f"{group}.{name}" if group == "adaptive" else group, choice=name)
    found = assemble.idle(node, here) if group == "compressor" else idle_options(target(node, group), node, here)
    for key, why in found:
        if key in node and node[key] != default.get(key):
            yield f"{key}={node[key]!r} of {name} has no effect here: {why}"


log = logging.getLogger("accordion_bench")
UNUSED = 10  # consecutive unused backward passes after which a warning is issued
LONG = 10_000  # steps of an epoch after which a warning is issued that it never ends


class Reminders:
    """Warnings about loops that misuse an attachment; the leader prints them."""

    def __init__(self, methods: Methods, compressor_name: str, position: LoopPosition, leader: bool) -> None:
        self.compressor_name, self.position, self.leader = compressor_name, position, leader
        self._by_epoch = [name for name, policy in methods.policies.items() if policy.when == "epoch"]
        self._unused = 0  # number of consecutive steps with unused gradients
        self._told_of_epochs = self._told_of_updates = False

    def gradients_unused(self) -> None:
        """Note that gradients of the previous step were not used, and warn if this happens `UNUSED` times in a row."""
        self._unused += 1
        if self._unused == UNUSED and self.leader:
            log.warning(
                "the gradients of %d backward passes in a row were used by no optimizer of ab.attach; call the step of "
                "the optimizer that was passed, or all workers train alone",
                UNUSED,
            )

    def update_lost(self, compressor: Compressor) -> None:
        """Warn of a second backward pass before the optimizer's step, if the compressor performs that step."""
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
        """Note that gradients were used; warn if a policy acts per epoch and no epoch has ended for long."""
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
