"""ALQ and AMQ: fit the quantiser's levels to the distribution of the normalised coordinates."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.adaptive.base import Policy
from accordion_bench.adaptive.distributions import POWER, Distribution, Histogram, TruncatedNormals
from accordion_bench.adaptive.level_solvers import Fit, alq, alqg, amq, psi
from accordion_bench.compressors import codebooks
from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import Ladder, Plan, RunFacts, Signals
from accordion_bench.requests import BucketMoments, BucketStatistic, CoordinateHistogram, PooledMoments, Request

FITS = ["mixture", "single", "empirical"]


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from Policy.description.idle(cls, options, context)
    fit = options.get("fit")
    if fit in ("single", "empirical"):
        yield "num_components", f"{context.group}.fit is {fit}"
    if fit == "single":
        yield "norm_weight", f"{context.group}.fit is {fit}"


def _smoke_options(options: Config, knob: str) -> Config:
    return {"stat_samples": 1, "update_at": [0], "num_components": 2}


class FittedCodebook(Policy):
    """L = argmin psi(L), psi(L) = sum_j integral of (L_(j+1) - r)(r - L_j) dF, for every number of bits in the ladder.

    Decided after the exchanges `update_at` and every `update_every`, from the buckets of what all workers exchange in
    the last `stat_samples` of them, before residual and momentum; no extra passes. A relative error of d psi(L) is
    expected of buckets of d coordinates.

    Args:
        method: `alq` (free levels, coordinate descent), `alqg` (free levels, safeguarded gradient descent), `amq` (one
            multiplier, levels +-p^j).
        fit: F is `mixture`: of truncated normals, one per bucket, which counts with its length and its norm; `single`:
            one truncated normal for all coordinates (ALQ-N, AMQ-N); `empirical`: the weighted histogram of the
            coordinates, which knows heavy tails. null = `mixture`, the paper's, where all buckets are equally long,
            else `empirical`: what is expected of a coordinate hangs on the length of its bucket.
        norm_weight: a coordinate counts with its bucket's norm `squared`, as in the error; `first` power (the official
            code); `none`. Not for `single`, where every coordinate counts alike.
        num_components: of the mixture, for each length: the buckets of largest norm, in place of all of that length;
            more = slower and more control bytes.
        stat_samples: exchanges up to the update that are looked at; more = less noise.
        update_at: exchanges after which the levels are fitted, counted from 0.
        update_every: and after every so many exchanges; null = never again.
        initial: levels before the first update: `exponential` (p = 1/2), or the `compressor`'s own.
        solver: `exact`, or `official`, which stops where the paper's code stops (no zero level; alq and amq only).

    Source: Faghri et al. 2020 (arXiv 2010.12460) and its official code.
    """

    description = replace(
        Policy.description,
        display_names={"alq": "ALQ", "alqn": "ALQ-N", "alqg": "ALQ-G", "amq": "AMQ", "amqn": "AMQ-N"},
        idle=_idle,
        smoke_options=_smoke_options,
    )

    drives = "codebook"
    when = "exchange"

    def __init__(
        self,
        method: str = "alq",
        fit: str | None = None,
        norm_weight: str = "squared",
        num_components: int = 20,
        stat_samples: int = 10,
        update_at: Sequence[int] = (0, 100, 2000),
        update_every: int | None = 10_000,
        initial: str = "exponential",
        solver: str = "exact",
    ) -> None:
        self.method = checks.choice("method", method, ["alq", "alqg", "amq"])
        self.fit = fit if fit is None else checks.choice("fit", fit, FITS)
        self.norm_weight = checks.choice("norm_weight", norm_weight, list(POWER))
        self.num_components = checks.integer("num_components", num_components, at_least=1, instead=20)
        self.stat_samples = checks.integer("stat_samples", stat_samples, at_least=1, instead=10)
        if not isinstance(update_at, list | tuple) or not all(type(s) is int and s >= 0 for s in update_at):
            raise checks.ValueRefused("update_at", "a list of exchanges of at least 0", update_at, [0, 100, 2000])
        self.update_at = set(update_at)
        self.update_every = update_every
        if update_every is not None:
            checks.integer("update_every", update_every, at_least=1, instead=10_000)
        self.initial = checks.choice("initial", initial, ["exponential", "compressor"])
        self.solver = checks.choice("solver", solver, ["exact", "official"])
        if solver == "official" and method == "alqg":
            raise checks.ValueRefused("solver", "exact where method is alqg", solver, "exact")
        self._decision: dict[str, Any] = {}

    def due(self, exchange: int) -> bool:
        return exchange in self.update_at or bool(self.update_every and exchange and exchange % self.update_every == 0)

    @property
    def signals(self) -> frozenset[BucketStatistic]:
        """The statistics that the fit may need; where the lengths of the buckets decide, one of them is collected."""
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
            books = {bits: rounded(codebooks.exponential(bits, 0.0 in book)) for bits, book in books.items()}
        return replace(plan, codebooks=books)

    def distribution(self, statistics: Mapping[BucketStatistic, Tensor]) -> Distribution | None:
        """F from the signal; None while nothing but zeros has been seen."""
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
        """The codebook for one number of bits."""
        zero_level = 0.0 in previous
        if self.method == "amq":
            return amq(dist, bits, zero_level, previous[-2], self.solver)
        if self.method == "alqg":
            return alqg(dist, bits, zero_level, previous)
        return alq(dist, bits, zero_level, previous, solver=self.solver)

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

    def decision(self) -> dict[str, Any]:
        return self._decision


def rounded(levels: Sequence[float]) -> tuple[float, ...]:
    """The levels as they travel, in float32."""
    return tuple(torch.tensor(levels, dtype=torch.float32).tolist())
