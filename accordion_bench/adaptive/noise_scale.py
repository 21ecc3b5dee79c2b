"""Grow the batch as the gradient noise scale grows."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.base import Policy
from accordion_bench.adaptive.batch_limits import LR_SCALINGS, most, scaled
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import Ladder, Plan, RunFacts, Signals, SquareNorms
from accordion_bench.requests import GradientNoise, Request


def _smoke_options(options: Config, knob: str) -> Config:
    return {"every": 1}


@with_options
class NoiseScale(Policy):
    """B_simple = tr Sigma / |G|^2, both estimated from the workers' gradients; B_simple > threshold x A B -> B <- 2 B.

    Every `every` exchanges the mean of |g_w|^2 and |mean g|^2 give unbiased estimates of tr Sigma and |G|^2 (see
    `noise_and_signal`); their exponential averages over the measurements of the run are divided at the end of an
    epoch. The batch doubles at most once per epoch, never shrinks, and ends at the largest doubling within `cap`. An
    estimate of |G|^2 that is not positive says that the noise is beyond measure, and counts as a large noise scale.

    With a dense exchange a measurement costs 8 bytes and the broadcast of the plan; any other exchange does not know
    the mean gradient, and one dense all-reduce per measurement is charged to control_bytes.

    Where gradients shrink faster than the averages forget, the noise scale stays that of the past.

    Source: McCandlish et al. 2018 (arXiv 1812.06162) for the noise scale; the rule of growth is ours.
    """

    every: int = option("exchanges from one measurement to the next; more = cheaper and noisier", default=5, at_least=1)
    ema: float = option(
        "weight of the past in the averages at each measurement; higher = smoother and later",
        default=0.5,
        at_least=0,
        below=1,
    )
    threshold: float = option(
        "the noise scale must exceed so many times the batch of all workers", default=1.0, above=0
    )
    cap: int | None = option(
        "samples per worker and step; null = all samples of a worker", default=None, at_least=1, instead=256
    )
    lr_scaling: str = option("the learning rate as the batch grows", default="linear", choices=LR_SCALINGS)

    chosen_as = {
        "noise_scale": Choice("double the batch while the gradient noise scale exceeds it (McCandlish et al. 2018)")
    }

    description = replace(Policy.description, smoke_options=_smoke_options)

    drives = "batch"
    needs_gradients = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.noise = self.signal = 0.0  # averages, which start at 0 ...
        self.weight = 0.0  # ... and are divided by this
        self._decision: dict[str, Any] = {}

    def needs_at(self, exchange: int) -> frozenset[Request]:
        return frozenset([GradientNoise()]) if self.due(exchange) else frozenset()

    def due(self, exchange: int) -> bool:
        return exchange % self.every == 0

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        if run.workers < 2:
            raise ConfigError(
                "workers must be at least 2 for adaptive.noise_scale, which compares gradients of workers with their "
                f"mean, got {run.workers}",
                {"workers": 2},
            )
        limit = most(run)
        self.workers, self.first, self.epochs = run.workers, run.batch_size, run.epochs
        self.most = limit if self.cap is None else self.cap
        if 2 * self.first > limit:
            raise ConfigError(
                f"batch_size must be at most {limit // 2}, half of the samples that a worker sees per epoch, for "
                f"adaptive.noise_scale to double it, got {self.first}",
                {"batch_size": max(limit // 20, 1)},
            )
        if not 2 * self.first <= self.most <= limit:
            rule = f"at least {2 * self.first}, twice the batch_size, and at most {limit}, the samples that a worker "
            raise ValueRefused("cap", rule + "sees per epoch", self.cap, limit)
        return plan

    def update(self, signals: Signals, plan: Plan) -> Plan:
        self._decision = {}
        if signals.square_norms is None:
            return self.grown(plan)
        noise, signal = noise_and_signal(signals.square_norms, self.workers)
        self.noise += (1 - self.ema) * (noise - self.noise)
        self.signal += (1 - self.ema) * (signal - self.signal)
        self.weight += (1 - self.ema) * (1 - self.weight)
        return plan

    def grown(self, plan: Plan) -> Plan:
        """The plan at the end of an epoch."""
        if not self.weight:
            return plan
        noise, signal = self.noise / self.weight, self.signal / self.weight
        scale: float | None
        if noise <= 0 and signal <= 0:
            scale = None
        elif signal > 0:
            scale = noise / signal
        else:
            scale = math.inf
        grows = scale is not None and scale > self.threshold * self.workers * plan.batch_size
        finite = scale if scale is not None and math.isfinite(scale) else None
        self._decision = {"noise": noise, "signal": signal, "noise_scale": finite, "grows": grows}
        batch = 2 * plan.batch_size
        if not grows or batch > self.most:
            return plan
        factor = scaled(self.lr_scaling, batch / self.first)
        self._decision |= {"batch_size": batch, "lr_factor": factor}
        return replace(plan, batch_size=batch, lr_factor=factor)

    def later_batches(self, first: int) -> Iterable[int]:
        doublings = int(math.log2(self.most / first)) if first <= self.most else 0
        return [first * 2**k for k in range(1, min(doublings, self.epochs - 1) + 1)]

    def decision(self) -> dict[str, Any]:
        return self._decision

    def state_dict(self) -> dict[str, Any]:
        return {"noise": self.noise, "signal": self.signal, "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noise, self.signal, self.weight = state["noise"], state["signal"], state["weight"]


def noise_and_signal(found: SquareNorms, workers: int) -> tuple[float, float]:
    """Unbiased estimates of (tr Sigma, |G|^2): one sample's gradient has mean G and covariance Sigma.

        tr Sigma = (|g_w|^2 - |g|^2) / (1/b - 1/(A b)),     |G|^2 = (A b |g|^2 - b |g_w|^2) / (A b - b)

    Args:
        found: |g_w|^2 of batches of b samples, |g|^2 of their mean.
        workers: A, at least 2.

    Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1.
    """
    b, B = found.batch_size, found.batch_size * workers
    return (found.small - found.big) / (1 / b - 1 / B), (B * found.big - b * found.small) / (B - b)
