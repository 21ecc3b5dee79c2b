"""Advised: the level of each tensor, or dense, with which a step ends first at a given error."""

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
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import BLOCK, WHOLE_MODEL, Ladder, Plan, RunFacts

GRAIN = 1024  # parts of a byte, the unit of modelled times
RULE = "{null} or a file that comm.timeline() has written"


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from LGreCo.description.idle(cls, options, context)
    if options.get("timeline") is None:
        for key in ("bandwidth", "latency"):
            yield key, "without a timeline nothing is hidden, and the fewest bytes are fastest on every link"


@with_options
class Advised(LGreCo):
    """min max(wait, end_K(r))  subject to  sum_l err(l, r_l) <= alpha sum_l err(l, b_l);  among alike the least error.

        end_k = max(ready_k, end_(k-1)) + codec_k + latency rounds_k + sum_(l in k) 8 bytes(l, r_l) / bandwidth

    k is a bucket, in the order in which they travel. err, b and bytes are L-GreCo's, whose objective is the sum of the
    bytes: here bytes that the backward pass hides cost nothing, so that they buy a smaller error. Steps at most
    `tolerance` longer than the shortest one are alike.

    ready, wait, codec and the buckets are those of a timeline of the same model and compressor; codec_k is taken as the
    same at all levels. Tensors without a level travel in fp32. Without a timeline all tensors are ready at once, coding
    costs nothing, and the step is the shortest where the bytes are the fewest. A timeline without buckets: tensor by
    tensor, the last one first, of which none has latency. A timeline of one worker: a bucket is one all-reduce. Buckets
    leave during the backward pass, as they do in every step; for local methods leave the timeline out.

    A timeline is read again when a run is resumed. Where `levels` is null, dense is one of them if the knob has it.

    Source: the error and its limit Alimohammadi et al. 2022 (arXiv 2210.17357); that time and not volume is to be
    weighed against it Tyagi and Swany 2023 (arXiv 2305.12201). The step as objective and its solution are ours.
    """

    bandwidth: float | None = option(
        "bit/s of a worker's link; null = that of network", default=None, above=0, instead=1e9
    )
    latency: float | None = option(
        "seconds per round of a collective; null = that of network", default=None, at_least=0, instead=5e-5
    )
    timeline: str | None = option(
        "file that comm.timeline() has written; null = all gradients are ready at once", default=None
    )
    tolerance: float = option(
        "share by which a step may be longer than the shortest, for a smaller error", default=0.01, at_least=0
    )

    chosen_as = {
        "advised": Choice(
            "the shortest modelled step at the same error, tensor by tensor; adaptive=[accordion,advised] refines "
            "(docs/algorithms.md)",
            comments={"levels": "what each tensor may get, e.g. [1, 2, 4]; null = around the reference, and dense"},
        )
    }

    description = replace(LGreCo.description, idle=_idle)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeline is not None and not isinstance(self.timeline, str):
            raise checks.ValueRefused("timeline", RULE, self.timeline, None)
        self.turns: list[Turn] = []
        self.wait, self.rate = 0.0, 1.0  # in what the link sends meanwhile, bit/s

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
                self.turns = turns_of(step, list(plan.levels), run.workers, self.rate, latency)
                self.wait = meanwhile(step.backward_end, self.rate)
        return plan

    def recorded(self, run: RunFacts) -> RecordedStep:
        """The timeline, refused where it is none of this model; no tensors are known while options are checked."""
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
        late = (1 + self.tolerance) * shortest  # up to here no end is too late
        chosen = choose(errors, wire, refined, limit, self.turns, late)
        before, after = (end(wire, levels, self.turns, self.wait) for levels in (refined, chosen))
        times = {"modelled_wait": self.wait, "modelled_step_before": before, "modelled_step": after}
        return chosen, {key: 8 * sent / self.rate for key, sent in times.items()}


def meanwhile(seconds: float, bandwidth: float) -> float:
    """Bytes that the link sends in a time; in binary fractions, so that sums in another order are the same number.

    Args:
        seconds: the time.
        bandwidth: bit/s.
    """
    return round(seconds * bandwidth / 8 * GRAIN) / GRAIN


def turns_of(step: RecordedStep, names: Sequence[str], workers: int, bandwidth: float, latency: float) -> list[Turn]:
    """The buckets of a timeline as turns of what has a level, in bytes that the link sends meanwhile.

    Args:
        step: of the timeline.
        names: of what has a level, in the model's order: tensors, blocks of tensors, or the whole model.
        workers: A.
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
