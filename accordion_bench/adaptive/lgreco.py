"""L-GreCo and Advised: per-tensor levels with the fewest bytes, or the shortest step, at the error of given levels.

Dynamic programming (`choose`) finds the best level of each tensor under a limit on the sum of the errors."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from accordion_bench.adaptive.policy import BITS, DENSE, Policy, check_level, is_positive
from accordion_bench.network.collective_costs import wire_and_rounds
from accordion_bench.network.timeline_file import (
    NoTimeline,
    RecordedBucket,
    RecordedStep,
    read_timeline,
    refuse_other_model,
)
from accordion_bench.options import checks
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import BLOCK, WHOLE_MODEL, Ladder, Plan, Probe, RecentMean, Request, RunFacts, Signals

CELLS = 10_000  # number of cells into which the error limit is divided


class Turn(NamedTuple):
    """Tensors that are sent together, after those of the preceding turn.

    ready: earliest start, in the unit of the costs.
    fixed: cost that does not depend on the levels.
    tensors: indices of the tensors.
    """

    ready: float
    fixed: float
    tensors: Sequence[int]


def total(table: np.ndarray, levels: Sequence[int]) -> float:
    """Return the sum over tensors of a table [tensors, levels], with one level per tensor."""
    return float(table[np.arange(len(levels)), levels].sum())


def end(costs: np.ndarray, levels: Sequence[int], turns: Sequence[Turn], wait: float = 0.0) -> float:
    """Return the end of the last turn, at least `wait`: end_k = max(ready_k, end_(k-1)) + fixed_k + sum_(l in k) costs.

    Args:
        costs: [tensors, levels]; the sum is over costs[l, r_l].
        levels: r, the level index of each tensor.
        turns: k, in sending order.
        wait: lower bound on the result; an earlier end has no advantage.
    """
    now = 0.0
    for turn in turns:
        now = max(turn.ready, now) + turn.fixed
        for i in turn.tensors:
            now += float(costs[i, levels[i]])
    return max(wait, now)


def choose(
    errors: np.ndarray,
    costs: np.ndarray,
    refined: Sequence[int],
    limit: float,
    turns: Sequence[Turn],
    wait: float = 0.0,
) -> list[int]:
    """Return the levels with the earliest end at an error of at most `limit`, and the smallest error among equals.

    Errors are rounded up to multiples of limit / 10,000, at least one.

    Args:
        errors, costs: [tensors, levels].
        refined: levels to return where no better ones are found.
        limit: upper bound on the sum of errors.
        turns, wait: see `end`.
    """
    within = total(errors, refined) <= limit
    if limit <= 0:  # compression is lossless, or no error is allowed
        return list(refined) if within else errors.argmin(1).tolist()
    cells = np.maximum(np.ceil(errors / (limit / CELLS)), 1)
    found = earliest_end(cells, costs, CELLS, turns, wait)
    if found is None:
        return list(refined) if within else errors.argmin(1).tolist()

    def worth(levels: Sequence[int]) -> tuple[float, float]:
        return end(costs, levels, turns, wait), total(errors, levels)

    return list(refined) if within and worth(refined) <= worth(found) else found


def earliest_end(
    cells: np.ndarray, costs: np.ndarray, limit: int, turns: Sequence[Turn], wait: float = 0.0
) -> list[int] | None:
    """Return argmin end(r) subject to sum_l cells[l, r_l] <= limit, with the fewest cells among equals.

    f(c) is the earliest end of the tensors sent so far at c cells. The recursion is exact for integer cells, because an
    earlier end of one tensor never delays the next:

        at the start of turn k    f(c) <- max(ready_k, f(c)) + fixed_k
        for each of its tensors   f(c) <- min_r f(c - cells[l, r]) + costs[l, r]

    Args:
        cells, costs: [tensors, levels]; cells are integers of at least 1.
        limit: upper bound on the sum of cells.
        turns, wait: see `end`; each tensor is in one turn.

    Returns:
        A level index per tensor; None where even the fewest cells exceed the limit.
    """
    best = np.full(limit + 1, np.inf)
    best[0] = 0
    choices = np.zeros((len(cells), limit + 1), dtype=np.int16)
    for turn in turns:
        best = np.maximum(turn.ready, best) + turn.fixed
        for row in turn.tensors:
            new = np.full(limit + 1, np.inf)
            for level, (step, cost) in enumerate(zip(cells[row], costs[row], strict=True)):
                if step > limit:
                    continue
                reached = best[: limit + 1 - int(step)] + cost
                better = reached < new[int(step) :]
                new[int(step) :][better] = reached[better]
                choices[row, int(step) :][better] = level
            best = new
    at = int(np.maximum(wait, best).argmin())
    if not np.isfinite(best[at]):
        return None
    found = [0] * len(cells)
    for row in reversed([row for turn in turns for row in turn.tensors]):
        found[row] = int(choices[row, at])
        at -= int(cells[row, found[row]])
    return found


MOST = 9  # upper bound on the number of default levels


def _smoke_options(options: Config, knob: str) -> Config:
    # codebooks of many bits take seconds to fit
    return {"samples": 1, "every": 1, **({"levels": [2, 3]} if knob == "bits" else {})}


@with_options
class LGreCo(Policy):
    """Choose levels that send the fewest bytes within an error limit, by dynamic programming:

        minimise  sum_l bytes(l, r_l)  subject to  sum_l err(l, r_l) <= alpha sum_l err(l, b_l)
        err(l, r) = ||p_l - C_r(p_l)||

    bytes(l, r) is sent by one worker's link. p_l is the mean of worker 0's messages (residual included) over the last
    `samples` exchanges; this mean is compressed once per level, from the compressor's current state (the published code
    takes five power iterations or an SVD for a rank). b is the uniform `reference`. Where an earlier policy drives the
    levels (adaptive=[accordion,lgreco]), b is its last decision, which applies until the next refinement.

    Errors are rounded up to whole cells of 1/10,000 of the limit, at least one; the levels b are kept where rounding
    hides that they are as cheap. Where no levels reach the limit, each tensor gets the level with the smallest error.

    Default `reference`: the compressor's weak level; for bits 4 (8 would leave no higher level); for a density the
    strong level (10 %; the weak one, 99 %, is never sent without need). Default `levels`: the integers from half to
    twice the reference; for a density, a quarter of the reference and its doublings up to four times the reference or
    the compressor's weak level; at most 9. The reference and the levels of an earlier policy are always included.

    With `every`, a refinement follows the first `samples` exchanges of each period of `every`; otherwise the first
    `samples` of each epoch. If an epoch has fewer exchanges, the window continues in the next epoch; its length is then
    at most the number of exchanges of the preceding epoch.

    Source: Alimohammadi et al. 2022 (arXiv 2210.17357) and its published code.
    """

    alpha: float = option("factor on the error limit; above 1 = fewer bytes", default=1.0, above=0)
    reference: int | float | None = option(
        "level whose error is the limit, where no other policy decides; null = weak (bits: 4, density: strong)",
        default=None,
        above=0,
    )
    levels: Any = option("selectable levels, e.g. [1, 2, 4]; null = around the reference", default=None)
    samples: int = option("exchanges whose mean message is used to measure the error", default=10, at_least=1)
    every: int | None = option(
        "exchanges between refinements; null = once per epoch", default=None, at_least=1, instead=100
    )

    chosen_as = {
        "lgreco": Choice(
            "the fewest bytes at the same error, tensor by tensor (Alimohammadi et al. 2022); "
            "adaptive=[accordion,lgreco] refines"
        )
    }

    description = replace(Policy.description, display_names={"lgreco": "L-GreCo"}, smoke_options=_smoke_options)

    refines = True
    keeps = ("budget", "window", "begun", "first", "last")
    when = "exchange"

    def __post_init__(self) -> None:
        super().__post_init__()
        levels = self.levels
        good = isinstance(levels, list | tuple) and levels and all(is_positive(level) for level in levels)
        if levels is not None and not good:
            raise checks.ValueRefused("levels", "{null} or a list of numbers above 0", levels, None)
        # the first epoch's window depends on the steps per epoch
        self.required_facts = frozenset() if self.every else frozenset({"steps_per_epoch"})
        self.level_keys = ("reference", "reference") if levels is None else ("levels", "levels")
        self.follows = False
        self.budget: dict[str, int] = {}  # b, as indices into the ladder
        self.window = self.samples  # length of the measurement window in exchanges
        self.begun = 0  # exchanges before this epoch
        self.first, self.last = 0, self.samples - 1  # measurement window of this epoch, without `every`

    def uniform(self, knob: str, pair: tuple[float, float]) -> float:
        """Return the reference level."""
        if self.reference is None:
            return {"density": pair[0], "bits": 4}.get(knob, pair[1])
        return check_level("reference", self.reference, knob, pair[1])

    def ladder(self, knob: str, pair: tuple[float, float]) -> tuple[float, ...]:
        reference = self.uniform(knob, pair)
        if self.levels is not None:
            levels = {check_level("levels", level, knob, list(pair)) for level in self.levels}
            return tuple(sorted(levels | {reference}))
        if knob == "density":
            top = min(1.0, max(4 * reference, pair[1]))
            doubled = [reference * 2.0**i for i in range(-2, 40) if reference * 2.0**i <= top]
            return tuple(sorted({*doubled[:: -(-len(doubled) // MOST)], reference}))
        least, most = BITS if knob == "bits" else (1, math.inf)
        first, last = int(max(least, reference // 2)), int(min(most, 2 * reference))
        if last - first < MOST:
            return tuple(range(first, last + 1))
        return tuple(sorted({round(first * (last / first) ** (i / (MOST - 1))) for i in range(MOST)} | {reference}))

    def follow(self, plan: Plan) -> None:
        self.follows, self.budget = True, dict(plan.levels)

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        self.values = ladder.values
        # for a local method's first epoch; otherwise a shorter first window is harmless
        self.window = min(self.samples, self.every or max(1, run.steps_per_epoch(plan.batch_size) // plan.period))
        self.first, self.last = 0, self.window - 1
        if not self.follows:
            level = ladder.values.index(self.uniform(ladder.knob, ladder.pair))
            self.budget = dict.fromkeys(plan.levels, level)
        return plan.with_levels(self.budget)

    def begin_epoch(self, epoch: int, exchange: int, plan: Plan) -> None:
        if epoch:
            self.window = max(1, min(self.samples, self.every or exchange - self.begun))
        self.begun = exchange
        if exchange > self.last:
            self.first = exchange
        self.last = max(exchange, self.first + self.window - 1)

    def counted(self, exchange: int) -> tuple[int, int]:
        """Return the first and the last exchange of the measurement window at this exchange."""
        if not self.every:
            return self.first, self.last
        first = exchange - exchange % self.every
        return first, first + self.window - 1

    def due(self, exchange: int) -> bool:
        return exchange == self.counted(exchange)[1]

    def needs_at(self, exchange: int) -> frozenset[Request]:
        first, last = self.counted(exchange)
        recent = [RecentMean()] if first <= exchange <= last else []
        probes = [Probe(level) for level in range(len(self.values))] if self.due(exchange) else []
        return frozenset([*recent, *probes])

    def update(self, signals: Signals, plan: Plan) -> Plan:
        self._decision = {}
        names, count = list(plan.levels), len(self.values)
        if not names or any(i not in signals.probes for i in range(count)):
            return plan
        errors = np.array([[math.sqrt(signals.probes[i][name].error) for i in range(count)] for name in names])
        wire = np.array([[signals.probes[i][name].wire_bytes for i in range(count)] for name in names])
        refined = [self.budget[name] for name in names]
        limit = self.alpha * total(errors, refined)
        chosen, modelled = self.best(errors, wire, refined, limit)
        self._decision = {
            "exchange": signals.exchange,
            "names": names,
            "refined": [self.values[i] for i in refined],
            "levels": [self.values[i] for i in chosen],
            "error_limit": limit,
            "error": total(errors, chosen),
            "wire_bytes_before": total(wire, refined),
            "wire_bytes": total(wire, chosen),
            **modelled,
            "errors": {str(self.values[i]): errors[:, i].tolist() for i in range(count)},
        }
        return plan.with_levels(dict(zip(names, chosen, strict=True)))

    def best(
        self, errors: np.ndarray, wire: np.ndarray, refined: Sequence[int], limit: float
    ) -> tuple[list[int], dict[str, Any]]:
        """Return the best levels within the limit, and further entries for the decision; arguments as in `choose`."""
        return choose(errors, wire, refined, limit, [Turn(0.0, 0.0, range(len(refined)))]), {}


# ---- Advised: the same error limit, and the shortest modelled step instead of the fewest bytes

GRAIN = 1024  # modelled times are multiples of 1/1024 byte
RULE = "{null} or a file that comm.timeline() has written"


def _advised_idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from LGreCo.description.idle(cls, options, context)
    if options.get("timeline") is None:
        for key in ("bandwidth", "latency"):
            yield key, "without a timeline no communication is hidden, and the fewest bytes are fastest on every link"


@with_options
class Advised(LGreCo):
    """Choose levels that minimise the modelled step time within an error limit:

        minimise  max(wait, end_K(r))  subject to  sum_l err(l, r_l) <= alpha sum_l err(l, b_l)
        end_k = max(ready_k, end_(k-1)) + codec_k + latency rounds_k + sum_(l in k) 8 bytes(l, r_l) / bandwidth

    k is the index of a bucket in sending order. err, b and bytes are those of `LGreCo`, which minimises the sum of the
    bytes. Here bytes that overlap with the backward pass cost nothing and are used to reduce the error. Among steps at
    most `tolerance` longer than the shortest one, the policy chooses the smallest error.

    A timeline of the same model and compressor supplies ready, wait, codec and the buckets; codec_k is assumed equal at
    all levels. Tensors without a level are sent in fp32. Without a timeline, all tensors are ready at once, coding
    costs nothing, and the fewest bytes give the shortest step. A timeline without buckets is modelled tensor by tensor,
    the last one first, without latency. In a timeline of one worker a bucket is one all-reduce. The model assumes that
    buckets are sent during the backward pass, as in every synchronous step; omit the timeline for local methods.

    The timeline is read again when a run is resumed. Where `levels` is null, they include dense if the knob has it.

    Source: the error and its limit Alimohammadi et al. 2022 (arXiv 2210.17357); weighing the error against time and not
    volume Tyagi and Swany 2023 (arXiv 2305.12201). The step as the objective and its solution are ours.
    """

    bandwidth: float | None = option(
        "bit/s of a worker's link; null = the value of network", default=None, above=0, instead=1e9
    )
    latency: float | None = option(
        "seconds per round of a collective; null = the value of network", default=None, at_least=0, instead=5e-5
    )
    timeline: str | None = option(
        "file written by comm.timeline(); null = all gradients are ready at once", default=None
    )
    tolerance: float = option(
        "share by which a step may exceed the shortest one, for a smaller error", default=0.01, at_least=0
    )

    chosen_as = {
        "advised": Choice(
            "the shortest modelled step at the same error, tensor by tensor; adaptive=[accordion,advised] refines "
            "(docs/algorithms.md)",
            comments={"levels": "selectable levels, e.g. [1, 2, 4]; null = around the reference, and dense"},
        )
    }

    description = replace(LGreCo.description, idle=_advised_idle)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeline is not None and not isinstance(self.timeline, str):
            raise checks.ValueRefused("timeline", RULE, self.timeline, None)
        self.turns: list[Turn] = []
        self.wait, self.rate = 0.0, 1.0  # bytes that the link sends during the wait; bit/s

    def ladder(self, knob: str, pair: tuple[float, float]) -> tuple[float, ...]:
        own = super().ladder(knob, pair)
        dense = [DENSE[knob]] if self.levels is None and knob in DENSE else []
        return tuple(sorted({*own, *dense}))

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        plan = super().start(plan, ladder, run)
        self.rate = run.bandwidth if self.bandwidth is None else self.bandwidth
        latency = run.latency if self.latency is None else self.latency
        self.turns, self.wait = [Turn(0.0, 0.0, range(len(plan.levels)))], 0.0
        if self.timeline is not None:
            step = self.recorded(run)
            if run.specs:
                self.turns = send_slots_of(step, list(plan.levels), run.workers, self.rate, latency)
                self.wait = meanwhile(step.backward_end, self.rate)
        return plan

    def recorded(self, run: RunFacts) -> RecordedStep:
        """Read the timeline; refuse one of another model, except during option checks, which know no tensors."""
        try:
            step = read_timeline(str(self.timeline))
            if run.specs:
                refuse_other_model(step, run.specs)
        except NoTimeline as why:
            raise checks.ValueRefused("timeline", RULE, f"{self.timeline}: {why}", None) from None
        return step

    def best(
        self, errors: np.ndarray, wire: np.ndarray, refined: Sequence[int], limit: float
    ) -> tuple[list[int], dict[str, Any]]:
        shortest = end(wire, choose(errors, wire, refined, limit, self.turns, self.wait), self.turns, self.wait)
        late = (1 + self.tolerance) * shortest  # latest end that counts as equal to the shortest
        chosen = choose(errors, wire, refined, limit, self.turns, late)
        before, after = (end(wire, levels, self.turns, self.wait) for levels in (refined, chosen))
        times = {"modelled_wait": self.wait, "modelled_step_before": before, "modelled_step": after}
        return chosen, {key: 8 * sent / self.rate for key, sent in times.items()}


def meanwhile(seconds: float, bandwidth: float) -> float:
    """Return the bytes that a link of some bit/s sends, rounded to 1/1024 byte, so that sums do not depend on order."""
    return round(seconds * bandwidth / 8 * GRAIN) / GRAIN


def send_slots_of(
    step: RecordedStep, names: Sequence[str], workers: int, bandwidth: float, latency: float
) -> list[Turn]:
    """Convert the buckets of a timeline to turns, with times in bytes that the link could send.

    Args:
        step: the recorded step.
        names: units that have a level, in model order: tensors, blocks of tensors, or the whole model.
        workers, bandwidth, latency: number of workers, bit/s of a link, and seconds per round.
    """
    position = {spec.name: i for i, spec in enumerate(step.specs)}
    buckets = step.buckets or tuple(RecordedBucket((i,), 0.0, 0.0) for i in reversed(range(len(step.specs))))
    first = {position[name.removeprefix(BLOCK)] if name != WHOLE_MODEL else 0: row for row, name in enumerate(names)}
    joined = any(name == WHOLE_MODEL or name.startswith(BLOCK) for name in names)
    turns = []
    for members, codec, rounds in buckets:
        dense = [] if joined else [i for i in members if i not in first]
        times = 1 if step.buckets else 0
        wire, of_one = wire_and_rounds("all_reduce", 4.0 * sum(step.specs[i].numel for i in dense), times, workers)
        messages = rounds * (workers - 1) / (step.workers - 1) if step.workers > 1 else of_one
        ready = max((step.ready[i] for i in members), default=0.0)
        fixed = codec + latency * messages + 8 * wire / bandwidth
        begin, taken = (meanwhile(seconds, bandwidth) for seconds in (ready, fixed))
        turns.append(Turn(begin, taken, [first[i] for i in members if i in first]))
    return turns
