"""0/1 Adam: Adam with ever rarer updates of the variance, then a frozen one and local steps averaged by signs.

    x_w   parameters of worker w (a replica)      z   the last consensus      H   period

Tensor suffixes: W local workers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.compressors.assemble import CompressorSetup
from accordion_bench.compressors.description import OptimizerPart
from accordion_bench.compressors.onebitadam import AdamSigns, OneBitAdam, declare_dead, inverse_root, warm_up_steps
from accordion_bench.compressors.uncoded import Dense
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import RunFacts
from accordion_bench.position import Rate
from accordion_bench.sync.outer import exact_average
from accordion_bench.sync.scheme import Placed, Sync, SyncContext
from accordion_bench.tensors.same_shape import Blocks


@with_options
class ZeroOneAdam(Sync):
    """CA: two-way signs with error feedback; r = sqrt(v) + eps; no bias correction.

        T_w steps:  m <- b1 m + (1 - b1) G;  x <- x - eta (m / r + lambda x)
                    every kappa-th step: G = mean g_w, v <- b2 v + (1 - b2) G^2;  between them: G = CA(g_w), v stays
        then:       m_w <- b1 m_w + (1 - b1) g_w;  x_w <- x_w - eta (m_w / r + lambda x_w);  S <- S + eta
        every H:    D = CA((z - x_w) r);  m_w <- D / S;  z <- z - D / r;  x_w <- z;  S <- 0

    kappa starts at 1 and doubles after every `refreshes` updates of v. H starts at 1 and doubles after every
    `doubling_steps` local steps. Coordinates with zero gradients at all updates of v (v = 0) do not move. b1, b2 and
    eps are those of the optimizer, AdamW, which only applies the weight decay.

    Source: Lu et al. 2022 (arXiv 2202.06009) and its official code.
    """

    freeze_step: int | None = option(
        "steps before the variance is frozen and local steps begin; null = 15 % of the run",
        default=None,
        at_least=1,
        instead=100,
    )
    refreshes: int = option("of the variance, before the steps between two of them double", default=16, at_least=1)
    doubling_steps: int = option("local steps before the period doubles", default=32678, at_least=1)
    longest_period: int = option("steps between averagings, at most", default=16, at_least=1)
    final: bool = option("average all after the last step", default=True)

    chosen_as = {
        "zerooneadam": Choice(
            "Adam by signs and ever seldomer variances, then local steps averaged by signs (Lu et al. 2022); "
            "optimizer=adamw"
        )
    }

    description = replace(
        Sync.description,
        display_names={"zerooneadam": "0/1 Adam"},
        requires={"optimizer": "adamw"},
        smoke_options=lambda options, knob: {
            "freeze_step": 3,
            "refreshes": 1,
            "doubling_steps": 1,
            "longest_period": 2,
        },
    )

    local = True
    grows = True
    weighs = False
    keeps = ("forked", "interval", "refreshed", "current_period", "counted", "since", "sums", "variance")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.required_facts = frozenset() if self.freeze_step else frozenset({"epochs", "steps_per_epoch"})
        self.switch_step = self.freeze_step or 1
        self.interval, self.refreshed = 1, 0  # kappa; updates of v since it doubled
        self.current_period, self.counted = 1, 0  # H; local steps since it doubled
        self.since = 0  # local steps since the last averaging
        self.sums: list[float] = []  # S, per tensor
        self.forked = False

    def messages(self) -> CompressorSetup:
        signs = AdamSigns()
        part = OptimizerPart(frozenset({"momentum", "lr"}), fits=OneBitAdam.traits.optimizer.fits)
        signs.traits = replace(signs.traits, optimizer=part)
        return CompressorSetup(signs, collective="two_way")

    def check(self, run: RunFacts, workers_per_process: int) -> None:
        try:
            self.switch_step = warm_up_steps("freeze_step", self.freeze_step, run)
        except ValueRefused as refused:
            raise refused.under("sync") from None

    def local_steps(self, run: RunFacts) -> int:
        return max(0, run.steps - self.switch_step)

    def _averaged(self, steps: int) -> tuple[int, int]:
        """Return the number of averagings in `steps` local steps, and the number of steps after the last one."""
        averagings, period, since = 0, 1, 0
        for step in range(1, steps + 1):
            since += 1
            if since >= period:
                averagings, since = averagings + 1, 0
            if step % self.doubling_steps == 0:
                period = min(self.longest_period, 2 * period)
        return averagings, since

    def ends_apart(self, steps: int, period: int) -> bool:
        return self.final and self._averaged(steps)[1] > 0

    def makes(self, run: RunFacts) -> Sequence[tuple[Exchange, int]]:
        exact, interval, refreshed = 0, 1, 0
        for step in range(1, self.switch_step + 1):
            if step % interval == 0:
                exact, refreshed = exact + 1, refreshed + 1
                if refreshed == self.refreshes:
                    interval, refreshed = 2 * interval, 0
        averagings, _ = self._averaged(self.local_steps(run))
        kinds = self.exact, self.runner.new_exchange(), self.runner.new_exchange(of_differences=True)
        return list(zip(kinds, (exact, self.switch_step - exact, averagings), strict=True))

    def begin(self, context: SyncContext) -> None:
        super().begin(context)
        options = self.inner.common.param_groups[0]
        self.betas, self.eps = tuple(options["betas"]), options["eps"]
        specs, like = self.axis.specs, self.axis.shared[0]
        self.names = [spec.name for spec in specs]
        self.momentum_W = Blocks(specs, self.comm.local_workers, like).tensors
        self.variance = [torch.zeros_like(m_W[0]) for m_W in self.momentum_W]
        self.inverse = [torch.zeros_like(v) for v in self.variance]
        self.exact = self.runner.new_exchange(wrapped=CompressorSetup(Dense()))
        self.exact.what = "exact gradient"
        self.signs = self.runner.new_exchange()

    def fork(self) -> None:
        """Give each worker its own parameters; discard the residuals of gradients."""
        self.axis.fork()
        self.inner.fork()
        self.signs = self.runner.new_exchange(of_differences=True)
        self.forked = True
        self.divide_by_variance()

    def divide_by_variance(self) -> None:
        """Update 1 / r after a change of the variance."""
        self.inverse = [inverse_root(v, self.eps) for v in self.variance]
        declare_dead(self.signs.state, dict(zip(self.names, self.variance, strict=True)))

    @property
    def refreshing(self) -> bool:
        """Whether the gradients of the next step are sent uncompressed."""
        return not self.forked and (self.position.step + 1) % self.interval == 0

    @property
    def exchange(self) -> Exchange:
        return self.exact if self.refreshing else self.signs

    def exchanges(self) -> list[Placed]:
        name = f"pseudo_gradient-{self.comm.workers}" if self.forked else "gradient"
        return [Placed(name, self.signs, range(self.comm.local_workers))]

    @property
    def switched(self) -> bool:
        """Whether the next step is a local one."""
        return self.position.step >= self.switch_step

    def gradient_exchange_of_next_step(self) -> Exchange | None:
        return None if self.switched else self.exchange

    @property
    def averaging(self) -> bool:
        return self.forked

    @torch.no_grad()
    def before_step(self, lr: Rate) -> CompletedExchange | None:
        axis = self.axis
        self.rates = [float(lr)] * len(self.names) if isinstance(lr, int | float) else list(lr)
        if self.switched and not self.forked:
            self.runner.units_change()
            self.fork()
        if self.forked:
            self.exchange.refuse_non_finite(axis.gradients_W, "gradient")
            torch._foreach_lerp_(self.momentum_W, axis.gradients_W, 1 - self.betas[0])
            kept = [param.grad for param in axis.params if param.grad is not None]
            torch._foreach_zero_([*axis.gradients_W, *kept])  # the optimizer only applies the weight decay
            return None
        refreshing = self.refreshing
        completed = self.runner.run([self.exchange], [axis.gradients_W], lr)
        (gradients,) = completed.updates
        rows = [gradient.expand_as(m_W) for gradient, m_W in zip(gradients, self.momentum_W, strict=True)]
        torch._foreach_lerp_(self.momentum_W, rows, 1 - self.betas[0])
        if refreshing:
            self.refresh(gradients)
        axis.apply([torch.zeros_like(gradient) for gradient in gradients])
        return completed

    def refresh(self, gradients: Sequence[Tensor]) -> None:
        """Update the variance by mean gradients [...], and the interval until the next update."""
        torch._foreach_mul_(self.variance, self.betas[1])
        torch._foreach_addcmul_(self.variance, list(gradients), list(gradients), 1 - self.betas[1])
        self.divide_by_variance()
        self.refreshed += 1
        if self.refreshed == self.refreshes:
            self.interval, self.refreshed = 2 * self.interval, 0

    @torch.no_grad()
    def after_step(self, lr: Rate) -> CompletedExchange | None:
        if not self.forked:
            self.move(self.axis.shared, 0)
            self.clock.lap("update")
            return None
        for row in range(len(self.axis.replicas)):
            self.move(self.axis.values(row), row)
        self.clock.lap("update")
        self.since += 1
        self.counted += 1
        self.sums = [total + rate for total, rate in zip(self.sums or [0.0] * len(self.names), self.rates, strict=True)]
        completed = self.average() if self.since >= self.current_period else None
        if self.counted == self.doubling_steps:
            self.current_period, self.counted = min(self.longest_period, 2 * self.current_period), 0
        self.clock.lap("update")
        return completed

    def move(self, values: Sequence[Tensor], row: int) -> None:
        """x <- x - eta m / r for one local worker."""
        steps = torch._foreach_mul([m_W[row] for m_W in self.momentum_W], self.inverse)
        torch._foreach_mul_(steps, self.rates)
        torch._foreach_sub_(list(values), list(steps))

    def average(self) -> CompletedExchange:
        """Step z by the mean difference, exchanged in units of the momentum; restart all workers at z."""
        axis, everyone = self.axis, range(self.comm.local_workers)
        moved_W = axis.differences(axis.shared, everyone)
        for x_W, inverse in zip(moved_W, self.inverse, strict=True):
            x_W.div_(inverse).masked_fill_(inverse == 0, 0)
        completed = self.runner.run([self.signs], [moved_W])
        (means,) = completed.updates
        for m_W, mean, total in zip(self.momentum_W, means, self.sums, strict=True):
            if total:
                m_W.copy_(mean / total)
        torch._foreach_sub_(axis.shared, list(torch._foreach_mul(means, self.inverse)))
        axis.restart(axis.shared, everyone)
        self.since, self.sums = 0, []
        return completed

    def consensus(self) -> list[Tensor]:
        return self.axis.mean_replica("eval") if self.forked and self.since else self.axis.shared

    def finish(self) -> None:
        """Average the workers exactly if there were local steps since the last averaging."""
        if self.forked and self.since and self.final:
            exact_average(self.axis)
            self.since = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("forked") and not self.forked:
            self.fork()
        super().load_state_dict(state)
        self.divide_by_variance()

    def derived(self) -> list[Tensor]:
        return self.inverse

    def own(self, row: int) -> dict[str, Any]:
        return {"momentum": dict(zip(self.names, (m_W[row] for m_W in self.momentum_W), strict=True))}
