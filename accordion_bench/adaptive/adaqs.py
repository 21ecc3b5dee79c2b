"""AdaQS-style: one more bit whenever the gradients' mean has become small against their spread."""

import math
from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.base import Policy
from accordion_bench.adaptive.knobs import BITS
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import WHOLE_MODEL, Ladder, Plan, RunFacts, Signals


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from Policy.description.idle(cls, options, context)
    if options.get("initial", 2) == options.get("cap", 8):
        for key in ("initial", "cap", "factor", "interval"):
            yield key, "initial = cap leaves no bit to add"


def _smoke_options(options: Config, knob: str) -> Config:
    return {"interval": 1, "factor": 2, "cap": 4}


@with_options
class AdaQS(Policy):
    """b <- b + 1 when MSDR(e) <= MSDR(at the last change) / factor, up to `cap`; never back.

    MSDR = ||m|| / sqrt(sum_i v_i), m and v being mean and variance of each coordinate of worker 0's gradient over the
    steps of an epoch. It is looked at in the last epoch of every `interval`; the first look sets what is compared with,
    and so does the first one after the batch, with which v falls, has changed. A ratio without meaning (nothing varies,
    or a zero gradient) decides nothing.

    Source: as recalled from Guo et al., ICASSP 2020; its text was not at hand.
    """

    factor: float = option(
        "by which the ratio must have dropped since the last change; lower = bits come sooner", default=2.0, above=1
    )
    interval: int = option("epochs between looks; the last epoch of each is looked at", default=5, at_least=1)
    initial: int = option("bits at the start, 2 to 8", default=2)
    cap: int = option("most bits", default=8)
    scope: str = option("what has a number of bits of its own", default="tensor", choices=("tensor", WHOLE_MODEL))

    chosen_as = {
        "adaqs": Choice(
            "AdaQS-style: one more bit when the gradients' mean has become small against their spread (Guo et al. "
            "2020, as recalled)"
        )
    }

    description = replace(Policy.description, idle=_idle, smoke_options=_smoke_options)

    knobs = ("bits",)
    intervals = 2  # the first look decides nothing
    level_keys = ("initial", "cap")
    signal = "msdr_local"

    def __post_init__(self) -> None:
        super().__post_init__()
        fewest, most = BITS
        for key, value, least in (("initial", self.initial, fewest), ("cap", self.cap, self.initial)):
            if type(value) is not int or not least <= value <= most:
                rule = f"an integer from {least} to {most}"
                rule += ", with initial at its lower end" if key == "cap" else ""
                raise ValueRefused(key, rule, value, most if key == "cap" else fewest)
        self.bits: dict[str, int] = {}
        self.saved: dict[str, float] = {}
        self.steps = 0  # of the epochs of `saved`
        self._decision: dict[str, Any] = {}

    def needs(self, epoch: int) -> frozenset[str]:
        return frozenset([self.signal]) if (epoch + 1) % self.interval == 0 else frozenset()

    def ladder(self, knob: str, pair: tuple[float, float]) -> tuple[float, ...]:
        return tuple(range(self.initial, self.cap + 1))

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        self._index = {bits: ladder.values.index(bits) for bits in range(self.initial, self.cap + 1)}
        self.bits = dict.fromkeys([WHOLE_MODEL] if self.scope == WHOLE_MODEL else plan.levels, self.initial)
        self.saved = {}
        return self._in_force(plan)

    def update(self, signals: Signals, plan: Plan) -> Plan:
        values = signals.values.get(self.signal)
        self._decision = {}
        if values is None:
            return plan
        if signals.epoch_steps != self.steps:
            self.saved, self.steps = {}, signals.epoch_steps
        seen = {key: values[key] for key in self.bits if key in values}
        before = {key: self.saved.get(key) for key in seen}
        raised = [key for key, value in seen.items() if self._look(key, value)]
        self._decision = {
            "names": list(seen),
            "msdr_before": list(before.values()),
            "msdr": [value if math.isfinite(value) else None for value in seen.values()],
            "bits": [self.bits[key] for key in seen],
            "raised": [key in raised for key in seen],
        }
        return self._in_force(plan) if raised else plan

    def _look(self, key: str, value: float) -> bool:
        """Whether this ratio brings one more bit; notes what later ones are compared with."""
        if not math.isfinite(value):
            return False
        if key not in self.saved:
            self.saved[key] = value
            return False
        if value > self.saved[key] / self.factor or self.bits[key] >= self.cap:
            return False
        self.bits[key] += 1
        self.saved[key] = value
        return True

    def _in_force(self, plan: Plan) -> Plan:
        whole = self.scope == WHOLE_MODEL
        return plan.with_levels({name: self._index[self.bits[WHOLE_MODEL if whole else name]] for name in plan.levels})

    def decision(self) -> dict[str, Any]:
        return self._decision

    def state_dict(self) -> dict[str, Any]:
        return {"bits": dict(self.bits), "saved": dict(self.saved), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bits, self.saved, self.steps = dict(state["bits"]), dict(state["saved"]), state["steps"]
