"""Advised: choose per-tensor levels that minimise the modelled step time at a given compression error."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from accordion_bench.adaptive.lgreco import LGreCo, Turn, choose, end
from accordion_bench.adaptive.policy import DENSE
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
from accordion_bench.plan import BLOCK, WHOLE_MODEL, Ladder, Plan, RunFacts

GRAIN = 1024  # modelled times are multiples of 1/1024 byte
RULE = "{null} or a file that comm.timeline() has written"


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
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

    description = replace(LGreCo.description, idle=_idle)

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
    """Return the number of bytes that the link sends in `seconds`, rounded to 1/1024 byte.

    Such sums are exact in floating point, and therefore do not depend on their order.

    Args:
        seconds: duration.
        bandwidth: bit/s.
    """
    return round(seconds * bandwidth / 8 * GRAIN) / GRAIN


def send_slots_of(
    step: RecordedStep, names: Sequence[str], workers: int, bandwidth: float, latency: float
) -> list[Turn]:
    """Convert the buckets of a timeline to turns, with times in bytes that the link could send.

    Args:
        step: the recorded step.
        names: units that have a level, in model order: tensors, blocks of tensors, or the whole model.
        workers: A, number of workers.
        bandwidth: bit/s.
        latency: seconds per round.
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
