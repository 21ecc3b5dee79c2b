"""Overlap Local-SGD and CoCoD-SGD: averages are used some steps late, to travel behind the computation."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.on_device import copy_on_cpu, restore_
from accordion_bench.exchange.runner import CompletedExchange
from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import RunFacts
from accordion_bench.sync.base import SyncContext
from accordion_bench.sync.buffers import treat_buffers
from accordion_bench.sync.exact_average import exact_average
from accordion_bench.sync.in_flight import InFlight
from accordion_bench.sync.local_sgd import LocalSGD
from accordion_bench.tensors.same_shape import Blocks


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from LocalSGD.description.idle(cls, options, context)
    if options.get("merge") == "cocod":
        yield "merge_alpha", "sync.merge is cocod"


class OverlapLocalSGD(LocalSGD):
    """Every H steps the workers launch z' <- mean(z - gamma v_w) and go on; `delay` steps later they are pulled to it.

        launch:  v_w <- beta v_w + (z - x_w) / gamma;   D = exchange(gamma v_w)
        later:   z <- z - D;   x_w <- (1 - merge_alpha) x_w + merge_alpha z       (merge: pull_back)
                 x_w <- x_w + mean x_old - x_old,w                                (merge: cocod)

    gamma is the inner learning rate at the start of the round; while it is 0, D = exchange(z - x_w) and v stays. D
    travels while the workers go on (`comm.overlap`); with policies, which look at what has arrived, it is waited for.

    Args:
        delay: steps from launch to use; null = H, one whole round (the paper).
        merge: `pull_back` or `cocod` (which keeps the mean of the workers, and needs beta = 0).
        merge_alpha: how far workers are pulled, in (0, 1]; below 1 where the delay is H.
        beta: momentum of the differences, [0, 1).
        period, switch_step, buffers, final: see `LocalSGD`.

    Source: Wang, Liang, Joshi 2020 (arXiv 2002.09539) and its official code; Shen et al. 2019 (CoCoD).
    """

    description = replace(LocalSGD.description, display_names={"overlap_local_sgd": "overlap local SGD"}, idle=_idle)

    late = True

    def __init__(
        self,
        period: int = 2,
        delay: int | None = None,
        merge: str = "pull_back",
        merge_alpha: float = 0.6,
        beta: float = 0.7,
        switch_step: int | None = 0,
        buffers: str | None = None,
        final: bool = True,
    ) -> None:
        super().__init__(period, switch_step, buffers=buffers, final=final)
        self.merge = checks.choice("merge", merge, ["pull_back", "cocod"])
        self.beta = checks.number("beta", beta, at_least=0, below=1, instead=0.7)
        self.merge_alpha = checks.number("merge_alpha", merge_alpha, above=0, at_most=1, instead=0.6)
        if delay is not None:
            checks.integer("delay", delay, at_least=1, instead=1)
            if delay > period:
                rule = f"at most period={period}, because one average is in flight at a time"
                raise ValueRefused("delay", rule, delay, period)
        self.delay = delay
        if merge == "pull_back" and merge_alpha == 1 and (delay is None or delay == period):
            rule = "below 1 where the delay is a whole period, or the consensus would stay at the start for ever"
            raise ValueRefused("merge_alpha", rule, merge_alpha, 0.6)
        if merge == "cocod" and beta:
            raise ValueRefused("beta", "0 with merge=cocod", beta, 0)
        self.momentum_W: list[Tensor] = []
        self.launched_W: list[Tensor] = []
        self.finished = False

    def refuse_driven(self, drivers: Mapping[str, str], run: RunFacts) -> None:
        if "period" in drivers and self.merge == "pull_back" and self.merge_alpha == 1:
            rule = (
                f"below 1 where adaptive={drivers['period']} drives the period, or the consensus would stay where it "
                "is as soon as the delay is a whole period"
            )
            raise ValueRefused("sync.merge_alpha", rule, 1, 0.6)
        super().refuse_driven(drivers, run)

    def buffer_averagings(self, steps: int, period: int) -> int:
        return super().buffer_averagings(steps + period - min(self.delay or period, period), period)

    def ends_apart(self, steps: int, period: int) -> bool:
        return self.final and steps > 0

    def begin(self, context: SyncContext) -> None:
        self.in_flight = InFlight(context.runner)
        super().begin(context)

    def fork(self) -> None:
        super().fork()
        axis = self.axis
        rows = self.comm.local_workers
        if self.beta:
            self.momentum_W = Blocks(axis.specs, rows, axis.shared[0]).tensors
        if self.merge == "cocod":
            self.launched_W = Blocks(axis.specs, rows, axis.shared[0]).tensors
            self.note_launched()
        # the average of equal workers, launched at the start
        self.in_flight.updates = [torch.zeros_like(value) for value in axis.shared]

    def after_local_step(self) -> CompletedExchange | None:
        period = self.period or 1
        if self.in_flight and self.since >= min(self.delay or period, period):
            self.use()
        return self.launch() if self.since >= period else None

    @torch.no_grad()
    def launch(self) -> CompletedExchange | None:
        """Send what the workers have moved since the consensus; returns the exchange where it was waited for."""
        axis, gamma = self.axis, self.round_lr
        if self.merge == "cocod":
            self.note_launched()
        moved_W = axis.differences(axis.shared, range(self.comm.local_workers))
        if self.beta and gamma:
            torch._foreach_mul_(self.momentum_W, self.beta)
            torch._foreach_add_(self.momentum_W, moved_W, alpha=1 / gamma)
            for moved, v_W in zip(moved_W, self.momentum_W, strict=True):
                torch.mul(v_W, gamma, out=moved)
        self.since = 0
        return self.in_flight.launch(self.exchange, moved_W)

    def land(self) -> None:
        self.in_flight.land()

    @torch.no_grad()
    def use(self) -> None:
        """Let the workers know of the average that was launched last."""
        axis = self.axis
        torch._foreach_sub_(axis.shared, self.in_flight.take())
        if self.merge == "cocod":
            for row in range(len(axis.replicas)):
                values = axis.values(row)
                torch._foreach_add_(values, axis.shared)
                torch._foreach_sub_(values, [x_W[row] for x_W in self.launched_W])
        else:
            axis.pull(axis.shared, self.merge_alpha)
        treat_buffers(self.inner, self.buffers)

    def note_launched(self) -> None:
        for row in range(len(self.axis.replicas)):
            torch._foreach_copy_([x_W[row] for x_W in self.launched_W], self.axis.values(row))

    def consensus(self) -> list[Tensor]:
        return self.axis.mean_replica("eval") if self.forked and not self.finished else self.axis.shared

    def finish(self) -> None:
        """Drop what is in flight, then one exact average."""
        self.land()
        if self.forked and self.final:
            self.in_flight.drop()
            exact_average(self.axis)
            self.finished = True

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "in_flight": dict(zip(self.names, self.in_flight.copies(), strict=False))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["forked"]:
            self.in_flight.load(state["in_flight"].values())

    def worker_state(self, row: int) -> dict[str, Any]:
        kept = {"momentum": self.momentum_W, "launched": self.launched_W}
        return {
            key: {name: copy_on_cpu(x_W[row]) for name, x_W in zip(self.names, values, strict=False)}
            for key, values in kept.items()
        }

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        for key, values in (("momentum", self.momentum_W), ("launched", self.launched_W)):
            for name, x_W in zip(self.names, values, strict=False):
                restore_(x_W[row], state[key][name])
