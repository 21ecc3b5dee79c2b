"""Schemes that average a part of the state at a time: a fragment, a few parameters, or one kind of buffers."""

from collections.abc import Mapping
from dataclasses import field, replace

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import RunFacts
from accordion_bench.position import Rate
from accordion_bench.sync.local_sgd import COME_AND_GO, SPARTA
from accordion_bench.sync.outer import OuterSGD, average_buffers
from accordion_bench.sync.round import Round
from accordion_bench.sync.scheme import LEFT
from accordion_bench.sync.when import When
from accordion_bench.sync.who import Nobody

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")  # names in torch's optimizers


@with_options
class StreamingDiLoCo(Round):
    """DiLoCo in P fragments: each slot of H/P steps averages the next one, with a delay of tau steps.

        tau steps before the end of slot k, p = k mod P:   launch D = exchange(z_p - x_p,w)
        at the end of slot k:                              z_p <- SGD(z_p, D);  x_p,w <- (1 - a) z_p + a x_p,w

    The exchange overlaps the next steps (`comm.overlap`); with policies it is blocking, and with `sparta` it overlaps
    one step only. The bytes equal those of DiLoCo, and the peak is the largest fragment. P = 1, tau = 0, a = 0 is
    DiLoCo. An average in flight at the end of the run is discarded.

    P = `fragments`, see `what.fragments`; more fragments reduce the peak. tau = `delay`, below H/P, so that one average
    is in flight at a time. a = `mixing`: 0 = a worker restarts from z, 1 = it ignores z. Each fragment has its own
    outer momentum, see `OuterSGD`.

    Source: Douillard et al. 2025 (arXiv 2501.18512).
    """

    period: int = option("steps between averagings of a coordinate; a multiple of `fragments`", default=30, at_least=1)
    fragments: int = option(
        "each of every `fragments`-th layer; at most as many as the model has layers", default=2, at_least=1
    )
    delay: int = option("steps that an average travels; below period / fragments", default=5, at_least=0)
    mixing: float = option("what a worker keeps of its own parameters, 0 to 1", default=0.5, at_least=0, at_most=1)
    outer_lr: float = option("not scheduled", default=0.7, above=0)
    outer_momentum: float = option(default=0.9, at_least=0, below=1)
    outer_nesterov: bool = option(default=True)
    sparta: float | None = option(SPARTA, default=None, above=0, at_most=1, instead=0.005)
    elastic: bool = option(COME_AND_GO, default=False)
    min_workers: int | None = option(LEFT, default=None, at_least=1, instead=2)

    chosen_as = {
        "streaming_diloco": Choice(
            "DiLoCo a fragment at a time: a lower peak of bytes, which travel behind the next steps (Douillard et al. "
            "2025)"
        )
    }

    description = replace(
        Round.description,
        display_names={"streaming_diloco": "Streaming DiLoCo"},
        shares={"sparta": "SPARTA"},
        smoke_options=lambda options, knob: {"period": 4, "fragments": 2, "delay": 1},
    )

    late = True
    outer_optimizer = "sgd"

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_slots(self.period, self.fragments, self.delay)
        outer = OuterSGD(self.outer_lr, self.outer_momentum, self.outer_nesterov)
        when = When(self.period, slots=self.fragments, delay=self.delay, ahead=True)
        super().__init__(when, outer=outer, pull=1 - self.mixing)

    @classmethod
    def in_every_step(cls, options: Config) -> Config:
        return {**options, "period": options["fragments"], "delay": 0}

    def refuse_driven(self, drivers: Mapping[str, str], run: RunFacts) -> None:
        if "period" in drivers:
            raise ConfigError(
                f"adaptive={drivers['period']} drives the period between averagings, got a scheme whose fragments "
                f"divide a fixed one into slots",
                {"sync": "diloco", "adaptive": drivers["period"]},
            )
        super().refuse_driven(drivers, run)


def refuse_slots(period: int, fragments: int, delay: int) -> None:
    """Check that fragments divide the period into slots longer than the delay."""
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


@with_options
class Sparta(Round):
    """Local steps, each followed by x_w[mask] <- mean_w x_w[mask], with a common random mask.

    Nothing else is exchanged, except for an exact average after the last step; the option `sync.sparta` of `LocalSGD`
    combines it with averagings of all coordinates. See `SparseAverage`.

    Source: "Improving the Efficiency of Distributed Training using Sparse Parameter Averaging" (openreview stFPf3gzq1),
    and EXO Gym.
    """

    period: int = field(init=False, default=1)
    sparta: float = option(
        "share of the parameters in a step; lower = fewer bytes, 1 = average all", default=0.005, above=0, at_most=1
    )

    chosen_as = {
        "sparta": Choice(
            "workers average a few of their parameters in every step, drawn by one key for all (SPARTA; openreview "
            "stFPf3gzq1)"
        )
    }

    description = replace(
        Round.description,
        display_names={"sparta": "SPARTA"},
        shares={"sparta": "SPARTA"},
        smoke_options=lambda options, knob: {},
    )

    every_local_step = True
    without_averages = "which averages a share of the parameters in every step, as they are"

    def __post_init__(self) -> None:
        super().__post_init__()
        super().__init__(When(1), Nobody())

    def new_exchange(self, comm: Comm | None = None) -> Exchange:
        return self.sparse_average(comm or self.comm)

    def between(self) -> list[Exchange]:
        return []

    @property
    def exchange(self) -> Exchange:
        return self.sparse if self.forked and self.sparse else self.every_step.exchange


@with_options
class DesLoc(Round):
    """Local steps of the inner optimizer on gradients g_w <- clip(g_w, rho), clipped by coordinate:

        every K_x steps:  x_w <- mean x_w;    every K_u:  u_w <- mean u_w;    every K_v:  v_w <- mean v_w

    u are the inner optimizer's first moments (momenta of AdamW, Muon and SGD), v its second moments. Moments are sent
    uncompressed; a compressor applies to differences of parameters. If a policy changes K_x, K_u and K_v change in
    proportion. Payload in K_x steps: 4 N (1 + K_x/K_u + K_x/K_v) bytes, 1.5 models with the defaults. To limit the norm
    of the gradient, use `clip_norm`.

    Source: Iacob et al. 2025 (arXiv 2505.22549).
    """

    description = replace(Round.description, display_names={"desloc": "DES-LOC"})

    keeps = (*Round.keeps, "meetings")
    period: int = option("steps between averagings of the parameters; longer = fewer bytes", default=32, at_least=1)
    momentum_period: int | None = option(
        "of first moments; a multiple of period; null = 3 periods", default=None, at_least=1, instead=96
    )
    variance_period: int | None = option(
        "of second moments; a multiple of period; null = 6 periods", default=None, at_least=1, instead=192
    )
    clip: float | None = option(
        "largest absolute value of a coordinate of a worker's gradient; null = any", default=None, above=0, instead=1.0
    )

    chosen_as = {
        "desloc": Choice(
            "local Adam whose moments are averaged ever more seldom than its parameters (Iacob et al. 2025); usual: "
            "optimizer=adamw"
        )
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.buffers = "average"
        super().__init__(When(self.period))
        self.first = self._multiple("momentum_period", self.momentum_period, 3)
        self.second = self._multiple("variance_period", self.variance_period, 6)
        self.meetings = 0  # number of averagings

    def _multiple(self, key: str, value: int | None, usual: int) -> int:
        """Return a period in multiples of K_x."""
        if value is None:
            return usual
        if value % self.period:
            raise ValueRefused(key, f"a multiple of period={self.period}", value, usual * self.period)
        return value // self.period

    def buffer_interval(self, key: str) -> int:
        return self.second if key in SECOND_MOMENTS else self.first

    @torch.no_grad()
    def before_step(self, lr: Rate) -> CompletedExchange | None:
        completed = super().before_step(lr)
        if self.clip is not None and self.forked:
            torch._foreach_clamp_min_(self.axis.gradients_W, -self.clip)
            torch._foreach_clamp_max_(self.axis.gradients_W, self.clip)
        return completed

    def treat_buffers(self) -> None:
        self.meetings += 1
        average_buffers(self.inner, lambda key: self.meetings % self.buffer_interval(key) == 0)
