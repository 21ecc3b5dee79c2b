"""Schemes with random computing times, for error as a function of simulated wall-clock time.

    T_w = constant_w + mean_w Exp(1)   seconds of worker w per gradient      A   workers      K   `first`

    k_sync    average the first K gradients of a step, discard the others; the clock advances by the K-th smallest T
    k_async   average the next K gradients that are ready, each computed at the parameters that its worker read when it
              last took part; these K workers read the new parameters, the others continue with theirs
    anytime   every worker computes for T seconds; the mean is weighted by samples, n_w = floor(b_w T / T_w)

Results do not depend on real time, and execution is synchronous: all workers compute in every step, and the clock is
simulated. Discarded gradients have weight 0 in the mean, see `Comm.weigh`.
"""

import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, ClassVar

import torch

from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import RunFacts
from accordion_bench.position import Rate
from accordion_bench.sync.every_step import EveryStep
from accordion_bench.sync.scheme import Sync, SyncContext
from accordion_bench.tensors import keyed_rng

RULES = ("k_sync", "k_async", "anytime")


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Sync.description.idle(cls, options, context)
    if options.get("rule") == "anytime":
        yield "first", "sync.rule is anytime"
    else:
        yield "budget", "sync.rule is not anytime"


def _label_suffix(options: Config) -> str:
    rule = {"k_sync": "K-sync", "k_async": "K-async"}.get(str(options.get("rule")), str(options.get("rule")))
    first = options.get("first")
    return f", {rule}" + (f" {first}" if first is not None and rule != "anytime" else "")


@with_options
class DrawnTimes(EveryStep):
    """Averages the gradients of workers that are ready by simulated times; see the module for the rules.

    `first=K` with `rule=k_sync` is K-sync SGD, or SGD with b = A - K backup workers: a quorum without residual. The
    staleness of a gradient is the number of updates between reading its parameters and applying it. A gradient uses the
    batch of the step in which it is ready, which has the same distribution. Learning rate and epochs depend on steps.

    Attributes:
        now: simulated seconds since the start.
        ready: simulated time at which each worker's gradient is ready.
        draws: number of times drawn so far for each worker.
        read_at: number of the update after which each worker read its parameters.
        used, staleness: number of averaged gradients so far, and the sum of their staleness.

    Source: Chen et al. 2016 (arXiv 1604.00981, backup workers); Dutta et al. 2018 (arXiv 1803.01113, K-sync, K-async);
    Ferdinand et al. 2019 (arXiv 1810.02976, anytime minibatch).
    """

    description = replace(
        Sync.description, display_names={"drawn_times": "drawn times"}, idle=_idle, label_suffix=_label_suffix
    )

    elastic: bool | None = field(init=False, default=None)
    min_workers: int | None = field(init=False, default=None)
    without_averages = "which averages the gradients of some workers, as they come"
    keeps: ClassVar[tuple[str, ...]] = ("now", "ready", "draws", "read_at", "used", "staleness")
    rule: str = option(
        "k_sync (the first gradients, the others dropped), k_async (stale ones as they come), anytime",
        default="k_sync",
        choices=RULES,
    )
    first: int | None = option("gradients of an update; null = all workers'", default=None, at_least=1, instead=3)
    worker_times: Any = option(
        "seconds of a gradient: a constant and the mean of an exponential part; or a pair for each worker",
        default=(1.0, 1.0),
    )
    budget: float | None = option(
        "anytime: seconds that each worker computes; null = what a worker takes on average",
        default=None,
        above=0,
        instead=1.0,
    )

    chosen_as = {
        "drawn_times": Choice(
            "workers whose computing times are drawn: K-sync with backup workers, K-async, anytime minibatch (Dutta et "
            "al. 2018)"
        )
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.several = _is_pairs(self.worker_times)
        self.pairs = [_checked(pair, self.worker_times) for pair in self.worker_times] if self.several else []
        if not self.several:
            self.pairs = [_checked(self.worker_times, self.worker_times)]
        self.now, self.staleness, self.used = 0.0, 0, 0
        self.ready: list[float] = []
        self.draws: list[int] = []
        self.read_at: list[int] = []
        self.arrived: list[int] = []

    def check(self, run: RunFacts, workers_per_process: int) -> None:
        A = run.workers
        if self.first is not None and self.first > A:
            raise ValueRefused("sync.first", f"at most {A}, the number of workers", self.first, A)
        if self.several and len(self.pairs) != A:
            fitting = [list(self.pairs[worker % len(self.pairs)]) for worker in range(A)]
            rule = f"[constant, mean], or a list of such a pair for each of {A} workers"
            raise ValueRefused("sync.worker_times", rule, self.worker_times, fitting)
        self.pairs = self.pairs if self.several else self.pairs[:1] * A

    def begin(self, context: SyncContext) -> None:
        super().begin(context)
        A = self.comm.workers
        self.draws, self.read_at = [0] * A, [0] * A
        self.ready = [0.0] * A
        if self.rule == "k_async":
            self.axis.fork()
            self.ready = [self.drawn(worker) for worker in range(A)]

    def drawn(self, worker: int) -> float:
        """Draw the seconds of a worker's next gradient; depends only on seed, worker and number."""
        constant, mean = self.pairs[worker]
        generator = keyed_rng.generator(self.runner.seed, "worker time", worker, self.draws[worker])
        self.draws[worker] += 1
        uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
        return constant - mean * math.log1p(-uniform)

    def samples_used(self, batches: Sequence[int]) -> list[int]:
        """Return how many samples of each worker count in the mean of the next step; advance the clock."""
        if self.rule == "anytime":
            return self._within_budget(batches)
        A = self.comm.workers
        if self.rule == "k_sync":
            self.ready = [self.now + self.drawn(worker) for worker in range(A)]
        order = sorted(range(A), key=lambda worker: (self.ready[worker], worker))
        self._come(order[: self.first or A])
        self.now = max(self.ready[worker] for worker in self.arrived)
        return [n * (worker in self.arrived) for worker, n in enumerate(batches)]

    def _within_budget(self, batches: Sequence[int]) -> list[int]:
        """Return the samples of each worker within T seconds; if all are 0, wait for the fastest worker."""
        times = [self.drawn(worker) for worker in range(self.comm.workers)]
        budget = self.budget or sum(constant + mean for constant, mean in self.pairs) / len(self.pairs)
        samples = [min(n, math.floor(n * budget / time)) for n, time in zip(batches, times, strict=True)]
        if not any(samples):
            each = [time / n for n, time in zip(batches, times, strict=True)]
            budget, fastest = min(each), each.index(min(each))
            samples[fastest] = 1
        self.now += budget
        self._come([worker for worker, n in enumerate(samples) if n])
        return samples

    def _come(self, workers: Sequence[int]) -> None:
        """Note the workers whose gradients are used in the next update."""
        updates = self.position.step
        self.arrived = list(workers)
        self.used += len(workers)
        if self.rule == "k_async":
            self.staleness += sum(updates - self.read_at[worker] for worker in workers)

    @property
    def cuts(self) -> bool:
        """Whether a worker's batch is cut to the counted samples, at least one."""
        return self.rule == "anytime"

    @torch.no_grad()
    def after_step(self, lr: Rate) -> None:
        super().after_step(lr)
        if self.rule != "k_async":
            return
        for worker in self.arrived:
            if worker in self.comm.local:
                row = worker - self.comm.first_worker
                self.axis.restart(self.axis.shared, range(row, row + 1))
            self.read_at[worker] = self.position.step + 1
            self.ready[worker] = self.now + self.drawn(worker)

    def columns(self) -> dict[str, Any]:
        """Return for metrics rows simulated seconds, and mean number and staleness of averaged gradients."""
        steps = self.position.step
        return {
            "simulated_seconds": self.now,
            "took_part": self.used / steps if steps else None,
            "staleness": self.staleness / self.used if self.used else None,
        }


def _is_pairs(given: Any) -> bool:
    return isinstance(given, list | tuple) and bool(given) and all(isinstance(own, list | tuple) for own in given)


def _checked(pair: Any, given: Any) -> tuple[float, float]:
    """Check and return (constant, mean) in seconds, at least 0 and not both 0."""
    numbers = isinstance(pair, list | tuple) and [type(own) in (int, float) and 0 <= own < math.inf for own in pair]
    if numbers != [True, True] or not any(pair):
        rule = "[constant, mean] in seconds, at least 0 and not both 0, or a list of such a pair for each worker"
        raise ValueRefused("worker_times", rule, given, [1.0, 1.0])
    return float(pair[0]), float(pair[1])
