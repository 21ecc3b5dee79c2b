"""ALQ and AMQ: policy that fits the quantiser's levels to the distribution of the normalised coordinates."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.adaptive.distributions import POWER, Distribution, Histogram, TruncatedNormals
from accordion_bench.adaptive.level_solvers import Fit, alq, alqg, amq, psi
from accordion_bench.adaptive.policy import Policy
from accordion_bench.compressors.quantiser import exponential
from accordion_bench.options import checks
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import (
    BucketMoments,
    BucketStatistic,
    CoordinateHistogram,
    Ladder,
    Plan,
    PooledMoments,
    Request,
    RunFacts,
    Signals,
)

FITS = ["mixture", "single", "empirical"]


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Policy.description.idle(cls, options, context)
    fit = options.get("fit")
    if fit in ("single", "empirical"):
        yield "num_components", f"{context.group}.fit is {fit}"
    if fit == "single":
        yield "norm_weight", f"{context.group}.fit is {fit}"
    if options.get("method") == "amq":
        yield "sweeps", f"{context.group}.method is amq"
    elif options.get("solver") == "official":
        yield "sweeps", f"{context.group}.solver is official, which has a fixed number of sweeps"


@with_options
class FittedCodebook(Policy):
    """Fit the codebook L to the gradients, for every number of bits in the ladder:

        L = argmin psi(L),   psi(L) = sum_j integral of (L_(j+1) - r)(r - L_j) dF

    The policy decides after the exchanges in `update_at` and after every `update_every` exchanges. The statistics are
    those of the buckets that all workers exchange in the last `stat_samples` exchanges, before residual and momentum;
    there are no extra backward passes. The expected relative error of buckets of d coordinates is d psi(L).

    The levels of `alq` (coordinate descent) and `alqg` (safeguarded gradient descent) are free; those of `amq` are
    +-p^j. F is one of: a `mixture` of truncated normals, one per bucket, weighted by the bucket's length and norm; a
    `single` normal for all coordinates (ALQ-N, AMQ-N); or `empirical`, the weighted histogram of the coordinates, which
    represents heavy tails. The expected size of a coordinate depends on the length of its bucket. The weight of a
    coordinate is its bucket's norm `squared`, as in the error, or to the `first` power; with `single` all coordinates
    have equal weight. More components are slower and cost more control bytes (a mixture keeps `num_components` buckets
    of each length); more samples reduce noise. The `official` solver supports alq and amq only, without a zero level.

    Source: Faghri et al. 2020 (arXiv 2010.12460) and its official code.
    """

    method: str = option(default="alq", choices=("alq", "alqg", "amq"))
    fit: str | None = option(
        "distribution to fit; null = mixture where all buckets are equally long (the paper's), else empirical",
        default=None,
        choices=FITS,
    )
    norm_weight: str = option(
        "squared, first (the official code), none: weight of a bucket by its norm",
        default="squared",
        choices=tuple(POWER),
    )
    num_components: int = option(
        "components of the mixture per bucket length: the buckets of largest norm", default=20, at_least=1
    )
    stat_samples: int = option(
        "exchanges measured before an update; with sync=every_step an exchange is a step", default=10, at_least=1
    )
    update_at: Sequence[int] = option("exchanges after which the levels are fitted", default=(0, 100, 2000))
    update_every: int | None = option(
        "further updates, after every so many exchanges; null = none", default=10_000, at_least=1
    )
    initial: str = option(
        "levels before the first update", default="exponential", choices=("exponential", "compressor")
    )
    sweeps: int | None = option(
        "upper bound on passes over the levels, alq and alqg only; null = 100 for alq, 30 for alqg (not converged)",
        default=None,
        at_least=1,
        instead=1000,
    )
    solver: str = option(
        "official = iterate as the published code does", default="exact", choices=("exact", "official")
    )

    chosen_as = {
        "alq": Choice("quantisation levels by coordinate descent (Faghri et al. 2020)"),
        "alqg": Choice("as alq, by safeguarded gradient descent", {"method": "alqg"}),
        "alqn": Choice("as alq, fitted to one normal for all coordinates", {"fit": "single"}),
        "amq": Choice("one fitted multiplier p, levels p^j (Faghri et al. 2020)", {"method": "amq"}),
        "amqn": Choice("as amq, fitted to one normal for all coordinates", {"method": "amq", "fit": "single"}),
    }

    description = replace(
        Policy.description,
        display_names={"alq": "ALQ", "alqn": "ALQ-N", "alqg": "ALQ-G", "amq": "AMQ", "amqn": "AMQ-N"},
        idle=_idle,
        smoke_options=lambda options, knob: {"stat_samples": 1, "update_at": [0], "num_components": 2},
    )

    drives = "codebook"
    when = "exchange"

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = self.update_at
        if not isinstance(steps, list | tuple) or not all(type(step) is int and step >= 0 for step in steps):
            raise checks.ValueRefused("update_at", "a list of exchanges of at least 0", steps, [0, 100, 2000])
        if self.solver == "official" and self.method == "alqg":
            raise checks.ValueRefused("solver", "exact where method is alqg", self.solver, "exact")

    def due(self, exchange: int) -> bool:
        return exchange in self.update_at or bool(self.update_every and exchange and exchange % self.update_every == 0)

    @property
    def signals(self) -> frozenset[BucketStatistic]:
        """Statistics that the fit may need; with `fit` null, the bucket lengths decide which one is collected."""
        if self.fit == "single":
            return frozenset([PooledMoments()])
        moments, histogram = BucketMoments(self.num_components, self.norm_weight), CoordinateHistogram(self.norm_weight)
        if self.fit is None:
            return frozenset([replace(moments, lengths="equal"), replace(histogram, lengths="differ")])
        return frozenset([moments if self.fit == "mixture" else histogram])

    def needs_at(self, exchange: int) -> frozenset[Request]:
        near = any(self.due(exchange + ahead) for ahead in range(self.stat_samples))
        return self.signals if near else frozenset()

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        books = dict(plan.codebooks)
        if self.solver == "official" and any(0.0 in book for book in books.values()):
            rule = "exact where the codebook has a zero level (compressor.zero_level=true)"
            raise checks.ValueRefused("solver", rule, "official", "exact")
        if self.initial == "exponential":
            books = {bits: rounded(exponential(bits, 0.0 in book)) for bits, book in books.items()}
        return replace(plan, codebooks=books)

    def distribution(self, statistics: Mapping[BucketStatistic, Tensor]) -> Distribution | None:
        """Return F from the statistics, or None where all gradients so far are zero."""
        for statistic, data in statistics.items():
            if statistic not in self.signals or not data.numel():
                continue
            if isinstance(statistic, CoordinateHistogram):
                return Histogram.from_arrays(data) if data[0].sum() > 0 else None
            if isinstance(statistic, PooledMoments):
                total, square, count = data.tolist()
                if not count:
                    return None
                mu, variance = total / count, square / count
                return TruncatedNormals(*(data.new_tensor([x]) for x in (mu, variance**0.5, 1.0)))
            mean, sigma, weight = data.unbind(1)
            return TruncatedNormals(mean, sigma, weight) if weight.sum() > 0 else None
        return None

    def solve(self, dist: Distribution, bits: int, previous: tuple[float, ...]) -> Fit:
        """Return the fitted codebook for one number of bits."""
        zero_level = 0.0 in previous
        if self.method == "amq":
            return amq(dist, bits, zero_level, previous[-2], self.solver)
        if self.method == "alqg":
            return alqg(dist, bits, zero_level, previous, self.sweeps or 30)
        return alq(dist, bits, zero_level, previous, self.sweeps or 100, solver=self.solver)

    def update(self, signals: Signals, plan: Plan) -> Plan:
        dist = self.distribution(signals.statistics)
        self._decision = {}
        if dist is None:
            return plan
        start, books, fits = time.perf_counter(), {}, {}
        judged = dist if self.solver == "official" else dist.symmetric()  # as `Fit.psi`
        for bits, previous in plan.codebooks.items():
            fit = self.solve(dist, bits, previous)
            books[bits] = rounded(fit.levels)
            before = float(psi(judged, previous))
            fits[str(bits)] = {"levels": list(books[bits]), "psi": fit.psi, "psi_before": before, "sweeps": fit.sweeps}
        self._decision = {"step": signals.step, "fits": fits, "solve_seconds": time.perf_counter() - start}
        return replace(plan, codebooks=books)


def rounded(levels: Sequence[float]) -> tuple[float, ...]:
    """Round the levels to float32, the precision of a plan."""
    return tuple(torch.tensor(levels, dtype=torch.float32).tolist())
