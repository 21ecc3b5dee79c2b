"""Accordion: weak compression in critical regimes, strong compression elsewhere."""

from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.critical import Detecting
from accordion_bench.options import checks
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import Ladder, Plan, RunFacts, Signals


def _smoke_options(options: Config, knob: str) -> Config:
    # a codebook is fitted for every number of bits that may be chosen, and that of 8 takes seconds
    few = {"strong": 2, "weak": 3} if knob == "bits" else {}
    return Detecting.description.smoke_options(options, knob) | few


class Accordion(Detecting):
    """Detector x actuator: the critical-regime test per tensor chooses between two levels of the compressor's knob.

    Args:
        weak: level in critical regimes, e.g. rank 2; null = the compressor's own pair.
        strong: level elsewhere, e.g. rank 1; more compression than `weak`.
        options: the detector's, see `Detecting`.
    """

    description = replace(Detecting.description, smoke_options=_smoke_options)

    drives = "level"

    def __init__(self, weak: float | None = None, strong: float | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.weak, self.strong = weak, strong

    def ladder(self, knob: str, pair: tuple[float, float]) -> tuple[float, ...]:
        strong = pair[0] if self.strong is None else self.strong
        weak = pair[1] if self.weak is None else self.weak
        checks.number("strong", strong, above=0, instead=pair[0])
        checks.number("weak", weak, above=0, instead=pair[1])
        if not strong < weak and pair[0] < weak:
            raise checks.ValueRefused("strong", f"a {knob} below weak={checks.show(weak)}", strong, pair[0])
        if not strong < weak:
            raise checks.ValueRefused("weak", f"a {knob} above strong={checks.show(strong)}", weak, pair[1])
        return strong, weak

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        strong, weak = self.ladder(ladder.knob, ladder.pair)
        self._levels = {False: ladder.values.index(strong), True: ladder.values.index(weak)}
        return plan.with_levels(dict.fromkeys(plan.levels, self._levels[True]))

    def update(self, signals: Signals, plan: Plan) -> Plan:
        names = list(plan.levels)
        critical = self.detect(signals, names)
        if self._decision:
            self._decision = {"names": names, **self._decision}
        if critical is None:
            return plan
        return plan.with_levels({name: self._levels[flag] for name, flag in zip(names, critical, strict=True)})
