"""Streaming DiLoCo: a fragment of the model at a time, averaged while the workers go on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import Config
from accordion_bench.options.units import counted
from accordion_bench.plan import RunFacts, TensorSpec
from accordion_bench.sync.base import SyncContext
from accordion_bench.sync.exact_average import exact_average
from accordion_bench.sync.fragments import fragments as fragments_of
from accordion_bench.sync.fragments import layers_of
from accordion_bench.sync.in_flight import InFlight
from accordion_bench.sync.local_sgd import LocalSGD
from accordion_bench.sync.outer import OUTER


def _smoke_options(options: Config, knob: str) -> Config:
    return {"period": 4, "fragments": 2, "delay": 1}


class StreamingDiLoCo(LocalSGD):
    """DiLoCo in P fragments: in each slot of H/P steps one of them is averaged, by turns, tau steps late.

        tau steps before the end of slot k, p = k mod P:   D starts to travel, D = exchange(z_p - x_p,w)
        at the end of slot k:                              z_p <- SGD(z_p, D);  x_p,w <- (1 - a) z_p + a x_p,w

    D travels while the workers go on (`comm.overlap`); with policies, which look at what has arrived, it is waited for.
    Every coordinate is averaged once in H steps, so that bytes are DiLoCo's; the largest fragment is the peak. P = 1,
    tau = 0, a = 0 is DiLoCo. What is in flight at the end of the run is dropped. With `sparta`, which exchanges in
    every step, D travels beside one step only.

    Args:
        period: H, steps between two averagings of a coordinate; a multiple of P; longer = fewer bytes.
        fragments: P, see `fragments.fragments`; at most as many as the model has layers; more = a lower peak of bytes.
        delay: tau, steps that an average travels; below H/P, so that one is in flight at a time.
        mixing: a, what a worker keeps of its own parameters, in [0, 1]: 0 = it restarts from z, 1 = it never learns of
            the others.
        switch_step: S, synchronous steps before; null = until the first decay of the learning rate.
        outer_lr, outer_momentum, outer_nesterov: see `OuterSGD`; each fragment has a momentum of its own.
        final: leave the mean behind after the last step.
        sparta: see `LocalSGD`.

    Source: Douillard et al. 2025 (arXiv 2501.18512).
    """

    description = replace(
        LocalSGD.description, display_names={"streaming_diloco": "Streaming DiLoCo"}, smoke_options=_smoke_options
    )

    late = True

    def __init__(
        self,
        period: int = 30,
        fragments: int = 2,
        delay: int = 5,
        mixing: float = 0.5,
        switch_step: int | None = 0,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        outer_nesterov: bool = True,
        final: bool = True,
        sparta: float | None = None,
    ) -> None:
        outer: dict[str, Any] = {
            "outer_lr": outer_lr,
            "outer_momentum": outer_momentum,
            "outer_nesterov": outer_nesterov,
        }
        super().__init__(period, switch_step, outer_optimizer="sgd", final=final, sparta=sparta, **outer)
        self.fragments = checks.integer("fragments", fragments, at_least=1, instead=2)
        self.delay = checks.integer("delay", delay, at_least=0, instead=5)
        self.mixing = checks.number("mixing", mixing, at_least=0, at_most=1, instead=0.5)
        refuse_slots(period, fragments, delay)
        self.slot = period // fragments
        self.partial = fragments > 1
        self.in_parts: list[Exchange] = []
        self.outers = [self.outer, *(OUTER["sgd"](**outer) for _ in range(1, fragments))]
        self.tensors: list[list[int]] = []  # of each fragment, by index
        self.finished = False

    @classmethod
    def in_every_step(cls, options: Config) -> Config:
        return {**options, "period": options["fragments"], "delay": 0}

    # ---- before the run

    def refuse_tensors(self, specs: Sequence[TensorSpec]) -> None:
        most = len(layers_of(specs).layers)
        if self.fragments > most:
            fitting = [p for p in range(1, most + 1) if (self.period or 1) % p == 0]
            rule = f"at most {most}, because the model has {counted(most, 'layer')}"
            raise ValueRefused("sync.fragments", rule, self.fragments, max(fitting, default=1))

    def refuse_driven(self, drivers: Mapping[str, str], run: RunFacts) -> None:
        if "period" in drivers:
            raise ConfigError(
                f"adaptive={drivers['period']} drives the period between averagings, got a scheme whose fragments "
                f"divide a fixed one into slots; type sync=diloco adaptive={drivers['period']}"
            )
        super().refuse_driven(drivers, run)

    def averagings(self, steps: int) -> list[int]:
        launched = (steps + self.delay) // self.slot
        return [len(range(p, launched, self.fragments)) for p in range(self.fragments)]

    def ends_apart(self, steps: int, period: int) -> bool:
        return self.final and (not self.meets or super().ends_apart(steps, period))

    @property
    def meets(self) -> bool:
        """Whether all workers are at one place after an averaging, as in DiLoCo."""
        return self.fragments == 1 and not self.mixing

    def begin(self, context: SyncContext) -> None:
        self.refuse_tensors(context.axis.specs)
        self.tensors = fragments_of(context.axis.specs, self.fragments)
        self.split = self.tensors if self.partial else None
        self.in_flight = InFlight(context.runner)
        super().begin(context)

    def fork(self) -> None:
        super().fork()
        self.in_parts = [self.exchange.part(p, own) for p, own in enumerate(self.tensors)] if self.partial else []

    @property
    def parts(self) -> list[Exchange]:
        return self.in_parts or super().parts

    # ---- the steps

    def after_local_step(self) -> CompletedExchange | None:
        completed = self.launch() if (self.since + self.delay) % self.slot == 0 else None
        if self.since % self.slot == 0:
            self.use()
        if self.since == self.period:
            self.since = 0
        return completed

    @property
    def turn(self) -> int:
        """The fragment of the slot in which the last step was."""
        return (self.since - 1) // self.slot

    def anchor(self, tensors: Sequence[int]) -> list[Tensor]:
        """z of some tensors."""
        return [self.axis.shared[i] for i in tensors]

    @torch.no_grad()
    def launch(self) -> CompletedExchange | None:
        """Send what the workers have moved a fragment; returns the exchange where it was waited for."""
        part, own = self.parts[self.turn], self.tensors[self.turn]
        moved_W = self.axis.differences(self.anchor(own), range(self.comm.local_workers), own)
        return self.in_flight.launch(part, moved_W, late=self.delay > 0)

    def land(self) -> None:
        self.in_flight.land()

    @torch.no_grad()
    def use(self) -> None:
        """The outer step of a fragment; the workers learn of it."""
        own = self.tensors[self.turn]
        z = self.anchor(own)
        self.outers[self.turn].step(z, self.in_flight.take(), self.round_lr)
        if self.mixing:
            self.axis.pull(z, 1 - self.mixing, own)
        else:
            self.axis.restart(z, range(self.comm.local_workers), own)

    # ---- the end, and in between

    def consensus(self) -> list[Tensor]:
        if self.finished or self.meets or not self.forked:
            return super().consensus()
        return self.axis.mean_replica("eval")

    def finish(self) -> None:
        """Drop what is in flight, then one exact average; none where an averaging of the whole model was the last."""
        self.in_flight.drop()
        if self.meets:
            super().finish()
        elif self.forked and self.final:
            exact_average(self.axis)
            self.since, self.finished = 0, True

    # ---- checkpoints

    def outer_state(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        for names, outer in zip(self.named, self.outers, strict=True):
            for key, values in outer.state_dict().items():
                found.setdefault(key, {}).update(zip(names, values, strict=True))
        return found

    def make_state(self) -> None:
        for own, outer in zip(self.tensors, self.outers, strict=True):
            outer.buffers(self.anchor(own))

    def load_outer(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        for names, own, outer in zip(self.named, self.tensors, self.outers, strict=True):
            known = {key: [kept[name] for name in names] for key, kept in state.items() if kept.keys() >= set(names)}
            outer.load_state_dict(known, self.anchor(own))

    def state_dict(self) -> dict[str, Any]:
        flying = zip(self.named[self.turn], self.in_flight.copies(), strict=False)
        return {**super().state_dict(), "in_flight": dict(flying)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.in_flight.load(state["in_flight"].values())

    @property
    def named(self) -> list[list[str]]:
        """The names of each fragment's tensors."""
        return [[self.names[i] for i in own] for own in self.tensors]


def refuse_slots(period: int, fragments: int, delay: int) -> None:
    """Refuse fragments that do not divide the period into slots which are longer than the delay.

    Raises:
        ValueRefused: with what fits.
    """
    if period % fragments:
        fitting = [p for p in range(1, fragments) if period % p == 0 and period // p > delay]
        if not fitting:
            rule = f"a multiple of fragments={fragments}, each of which has more than delay={delay} steps"
            raise ValueRefused("period", rule, period, fragments * (delay + 1))
        raise ValueRefused("fragments", f"a divisor of period={period}", fragments, fitting[-1])
    slot = period // fragments
    if delay >= slot:
        rule = f"below {slot}, the steps of a fragment's slot (period / fragments): one average is in flight at a time"
        raise ValueRefused("delay", rule, delay, slot - 1)
