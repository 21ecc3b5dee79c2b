"""Accordion: weak compression in critical regimes, strong compression elsewhere."""

from dataclasses import replace

from accordion_bench.adaptive.critical import Detecting
from accordion_bench.options import checks
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import Ladder, Plan, RunFacts, Signals


def _smoke_options(options: Config, knob: str) -> Config:
    # a codebook is fitted for every number of bits that may be chosen, and that of 8 takes seconds
    few = {"strong": 2, "weak": 3} if knob == "bits" else {}
    return Detecting.description.smoke_options(options, knob) | few


@with_options
class Accordion(Detecting):
    """Detector x actuator: the critical-regime test per tensor chooses between two levels of the compressor's knob."""

    weak: int | float | None = option(
        "level in critical regimes, e.g. rank 2; null = the compressor's own", default=None, above=0
    )
    strong: int | float | None = option("level elsewhere, e.g. rank 1", default=None, above=0)

    chosen_as = {"accordion": Choice("weak compression in critical regimes, strong elsewhere (Agarwal et al. 2021)")}

    description = replace(Detecting.description, smoke_options=_smoke_options)

    drives = "level"

    def ladder(self, knob: str, pair: tuple[float, float]) -> tuple[float, ...]:
        strong = pair[0] if self.strong is None else self.strong
        weak = pair[1] if self.weak is None else self.weak
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
