"""Policies that adapt the batch size: AdaBatch, GrowBatch and NoiseScale, and their common functions."""

import itertools
import math
import struct
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.policy import Policy
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.options.units import counted
from accordion_bench.plan import GradientNoise, Ladder, Plan, Request, RunFacts, Signals, SquareNorms

LR_SCALINGS = ("linear", "sqrt", "none")
LARGEST = 2**24 - 1  # plans are broadcast in float32


def float32(value: float) -> float:
    """Round a number to float32, the precision of a plan."""
    return struct.unpack("f", struct.pack("f", value))[0]


def scaled(lr_scaling: str, ratio: float) -> float:
    """Return the learning-rate factor for a batch `ratio` times the first: `linear` ratio, `sqrt` root, `none` 1."""
    return float32({"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[lr_scaling])


def most(run: RunFacts) -> int:
    """Return the largest useful batch size: the number of samples per worker and epoch."""
    return min(run.per_worker, LARGEST)


def refuse_batch_at_limit(name: str, run: RunFacts) -> None:
    """Refuse an initial batch that already holds all samples of a worker."""
    limit = most(run)
    if run.batch_size >= limit:
        raise ConfigError(
            f"batch_size must be below {limit}, the samples that a worker sees per epoch, for adaptive.{name} to "
            f"enlarge it, got {run.batch_size}",
            {"batch_size": max(limit // 20, 1)},
        )


def _adabatch_idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Policy.description.idle(cls, options, context)
    if options.get("freq", 0) >= context.epochs:
        yield "freq", f"the run has {counted(context.epochs, 'epoch')}"


@with_options
class AdaBatch(Policy):
    """Every `freq` epochs B <- beta B and LR <- gamma LR; B is at most the number of samples of a worker.

    After k changes B_k = min(floor(B_0 beta^k), samples per worker), and the learning-rate factor is
    gamma^k B_k / (B_0 beta^k). Where the batch is capped, the learning rate falls instead, so that LR / B always
    follows (gamma / beta)^k.

    gamma / beta is the decay for a fixed batch, so this policy replaces a decaying schedule: its YAML file selects
    schedule=constant. A schedule that decays is refused unless gamma = beta; then LR / B follows the schedule, and the
    policy scales both by the same factor.

    Source: Devarakonda et al. 2017 (arXiv 1712.02029); that 0.375 and 0.75 belong to freq 20 is as recalled.
    """

    freq: int = option("epochs between two changes; 20 of 100 in the paper", default=20, at_least=1)
    beta: float = option("factor on the batch size", default=2.0, above=1)
    gamma: float = option(
        "factor on the learning rate (0.75 = 2 x 0.375); = beta with a schedule that decays by itself",
        default=0.75,
        above=0,
    )

    chosen_as = {
        "adabatch": Choice(
            "B <- beta B and LR <- gamma LR every freq epochs, in place of a decaying schedule (Devarakonda et "
            "al. 2017)",
            selects={"schedule": "constant"},
        )
    }

    description = replace(
        Policy.description,
        requires={"schedule": {"milestones": []}},
        idle=_adabatch_idle,
        smoke_options=lambda options, knob: {"freq": 1},
    )

    drives = "batch"

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        refuse_batch_at_limit("adabatch", run)
        self.first, self.most, self.epochs = plan.batch_size, most(run), run.epochs
        factors = [run.schedule(half / 2) for half in range(2 * run.epochs)]
        if self.gamma < self.beta and any(b < a for a, b in itertools.pairwise(factors)):
            rule = f"beta={checks.show(self.beta)} with a schedule that decays, or the learning rate would decay twice"
            raise ValueRefused("gamma", rule, self.gamma, f"{checks.show(self.beta)}, or schedule=constant")
        return plan

    def update(self, signals: Signals, plan: Plan) -> Plan:
        k, rest = divmod(signals.epoch + 1, self.freq)
        self._decision = {}
        if rest:
            return plan
        batch, capped = self.after(k, self.first)
        # beta^k alone may overflow
        factor = float32((self.gamma / self.beta) ** k * batch / self.first)
        self._decision = {"batch_size": batch, "lr_factor": factor, "capped": capped}
        return replace(plan, batch_size=batch, lr_factor=factor)

    def after(self, changes: int, first: int) -> tuple[int, bool]:
        """Return the batch size after so many changes, and whether it is capped."""
        capped = changes >= math.log(self.most / first, self.beta)
        return self.most if capped else min(int(first * self.beta**changes), self.most), capped

    def later_batches(self, first: int) -> Iterable[int]:
        return {self.after(k, first)[0] for k in range(1, (self.epochs - 1) // self.freq + 1)}


@with_options
class GrowBatch(Policy):
    """Where the schedule divides the learning rate by f, multiply the batch by f and keep the learning rate.

        wanted <- wanted * f,   B = min(round(wanted), cap),   LR = schedule * B / B_0

    SGD's noise scale LR N / (B (1 - m)) is proportional to LR / B, which always follows the schedule; from the cap on
    the learning rate decays. f is the ratio of the learning rates at the starts of two successive epochs. A rise
    (warm-up) changes nothing.

    Source: Smith et al., ICLR 2018 (arXiv 1711.00489).
    """

    cap: int | None = option(
        "samples per worker and step; null = a tenth of the training samples over all workers (35 with digits)",
        default=None,
        at_least=1,
        instead=320,
    )

    chosen_as = {
        "grow_batch": Choice(
            "where the schedule divides the learning rate, multiply the batch and keep the learning rate (Smith et al. "
            "2018)"
        )
    }

    description = replace(Policy.description, smoke_options=lambda options, knob: {"cap": 8})

    drives = "batch"
    keeps = ("wanted",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wanted = 0.0

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        refuse_batch_at_limit("grow_batch", run)
        limit = most(run)
        self.first, self.wanted = run.batch_size, float(run.batch_size)
        self.most = self.cap or min(run.train_size // (10 * run.workers), limit)
        self.factors = [run.schedule(float(epoch)) for epoch in range(run.epochs)]
        if run.epochs > 1 and not any(after < before for before, after in itertools.pairwise(self.factors)):
            raise ConfigError(
                "adaptive.grow_batch needs a schedule that lowers the learning rate from one epoch to the next, got "
                "one that never does",
                lowering(run.schedule),
            )
        if not self.first < self.most <= limit:
            tenth = f" (null is a tenth of the samples over all workers, {self.most})" if self.cap is None else ""
            rule = f"above batch_size={self.first} and at most {limit}, the samples that a worker sees per epoch{tenth}"
            raise ValueRefused("cap", rule, self.cap, limit)
        return plan

    def update(self, signals: Signals, plan: Plan) -> Plan:
        self._decision = {}
        if not signals.next_lr < signals.lr:
            return plan
        self.wanted *= ratio(signals.lr, signals.next_lr)
        batch = self.at(self.wanted, plan.batch_size)
        factor = float32(batch / self.first)
        self._decision = {"batch_size": batch, "lr_factor": factor, "capped": batch == self.most}
        return replace(plan, batch_size=batch, lr_factor=factor)

    def at(self, wanted: float, batch: int) -> int:
        """Return the batch size that follows `batch` for `wanted` samples; it never shrinks."""
        return self.most if wanted >= self.most else max(round(wanted), batch)

    def later_batches(self, first: int) -> Iterable[int]:
        wanted, batches = float(first), [first]
        for before, after in itertools.pairwise(self.factors):
            if after < before:
                wanted *= ratio(before, after)
                batches.append(self.at(wanted, batches[-1]))
        return batches[1:]


def ratio(before: float, after: float) -> float:
    """Return before / after for two learning rates, infinity where `after` is 0."""
    return before / after if after else math.inf


def lowering(schedule: Any) -> dict[str, Any]:
    """Return options that make a schedule lower the learning rate."""
    if getattr(schedule, "gamma", 0) == 1:
        return {"schedule.gamma": 0.1}
    if hasattr(schedule, "milestones"):
        return {"schedule.milestones": [0.5, 0.8333]}
    if hasattr(schedule, "final"):
        return {"schedule.final": 0} if schedule.final == 1 else {"schedule.warmup_epochs": 0}
    return {"schedule": "multistep"}


@with_options
class NoiseScale(Policy):
    """Double the batch while the gradient noise scale exceeds it: B_simple > threshold x A B -> B <- 2 B.

        B_simple = tr Sigma / |G|^2

    Every `every` exchanges, the mean of |g_w|^2 and |mean g|^2 give unbiased estimates of tr Sigma and |G|^2 (see
    `noise_and_signal`). At the end of an epoch the policy divides their exponential averages over all measurements of
    the run. The batch doubles at most once per epoch, never shrinks, and ends at the largest doubling within `cap`. An
    estimate of |G|^2 that is not positive counts as an infinite noise scale.

    With a dense exchange, a measurement costs 8 bytes and the broadcast of the plan; with any other, one more dense
    all-reduce, counted in control_bytes. Where gradients shrink faster than the averages forget, the noise scale
    remains that of earlier gradients.

    Source: McCandlish et al. 2018 (arXiv 1812.06162) for the noise scale; the rule of growth is ours.
    """

    every: int = option("exchanges between measurements; more = cheaper and noisier", default=5, at_least=1)
    ema: float = option(
        "weight of the old average at each measurement; higher = smoother and later",
        default=0.5,
        at_least=0,
        below=1,
    )
    threshold: float = option(
        "multiple of the batch of all workers that the noise scale must exceed", default=1.0, above=0
    )
    cap: int | None = option(
        "samples per worker and step; null = all samples of a worker", default=None, at_least=1, instead=256
    )
    lr_scaling: str = option("how the learning rate grows with the batch", default="linear", choices=LR_SCALINGS)

    chosen_as = {
        "noise_scale": Choice("double the batch while the gradient noise scale exceeds it (McCandlish et al. 2018)")
    }

    description = replace(Policy.description, smoke_options=lambda options, knob: {"every": 1})

    drives = "batch"
    needs_gradients = True
    keeps = ("noise", "signal", "weight")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.noise = self.signal = 0.0  # averages that start at 0 and are therefore biased
        self.weight = 0.0  # divisor that removes the bias

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
        """Return the plan at the end of an epoch, with twice the batch where the noise scale is large enough."""
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


def noise_and_signal(found: SquareNorms, workers: int) -> tuple[float, float]:
    """Return unbiased estimates of (tr Sigma, |G|^2), where a sample's gradient has mean G and covariance Sigma.

        tr Sigma = (|g_w|^2 - |g|^2) / (1/b - 1/(A b)),     |G|^2 = (A b |g|^2 - b |g_w|^2) / (A b - b)

    Args:
        found: |g_w|^2 of batches of b samples, and |g|^2 of their mean over workers.
        workers: A, number of workers, at least 2.

    Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1.
    """
    b, B = found.batch_size, found.batch_size * workers
    return (found.small - found.big) / (1 / b - 1 / B), (B * found.big - b * found.small) / (B - b)
