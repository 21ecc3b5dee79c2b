"""AccordionSync: average often in critical regimes, rarely elsewhere."""

from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.critical import Detecting
from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import WHOLE_MODEL, Ladder, Plan, RunFacts, Signals


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from Detecting.description.idle(cls, options, context)
    yield "sync.period", f"{context.group} sets the first one"


class AccordionSync(Detecting):
    """Accordion's detector on the whole model chooses between two periods of a local method.

    Decided at the ends of epochs, in force from the next averaging on. Our transfer: the paper has no local steps.

    Args:
        weak: steps between averagings in critical regimes, and at the start.
        strong: steps between averagings elsewhere; longer than `weak`.
        options: the detector's, see `Detecting`; the updates of `statistic=update` are the averaged differences of
            parameters.
    """

    description = replace(Detecting.description, idle=_idle)

    drives = "period"

    def __init__(self, weak: int = 2, strong: int = 16, **options: Any) -> None:
        super().__init__(**options)
        self.weak = checks.integer("weak", weak, at_least=1, instead=2)
        self.strong = checks.integer("strong", strong, at_least=1, instead=16)
        if strong <= weak:
            raise checks.ValueRefused("strong", f"a period above weak={weak}", strong, 8 * weak)

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        return replace(plan, period=self.weak)

    def update(self, signals: Signals, plan: Plan) -> Plan:
        critical = self.detect(signals, [WHOLE_MODEL])
        if critical is not None:
            plan = replace(plan, period=self.weak if critical[0] else self.strong)
        if self._decision:
            self._decision |= {"critical": None if critical is None else critical[0], "period": plan.period}
        return plan
