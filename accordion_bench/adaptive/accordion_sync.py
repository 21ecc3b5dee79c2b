"""AccordionSync: average often in critical regimes, rarely elsewhere."""

from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.critical import Detecting
from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import WHOLE_MODEL, Ladder, Plan, RunFacts, Signals


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from Detecting.description.idle(cls, options, context)
    yield "sync.period", f"{context.group} sets the first one"


@with_options
class AccordionSync(Detecting):
    """Accordion's detector on the whole model chooses between two periods of a local method.

    Decided at the ends of epochs, in force from the next averaging on. Our transfer: the paper has no local steps.

    The updates of `statistic=update` are the averaged differences of parameters.
    """

    weak: int = option("steps between averagings in critical regimes, and at the start", default=2, at_least=1)
    strong: int = option("elsewhere; longer than `weak`", default=16, at_least=1)

    chosen_as = {
        "accordion_sync": Choice(
            "short periods between averagings in critical regimes, long ones elsewhere; chooses sync=local_sgd",
            selects={"sync": "local_sgd"},
            comments={"statistic": "local, mean, update: what is summed over the epoch"},
        )
    }

    description = replace(Detecting.description, idle=_idle)

    drives = "period"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strong <= self.weak:
            raise checks.ValueRefused("strong", f"a period above weak={self.weak}", self.strong, 8 * self.weak)

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        return replace(plan, period=self.weak)

    def update(self, signals: Signals, plan: Plan) -> Plan:
        critical = self.detect(signals, [WHOLE_MODEL])
        if critical is not None:
            plan = replace(plan, period=self.weak if critical[0] else self.strong)
        if self._decision:
            self._decision |= {"critical": None if critical is None else critical[0], "period": plan.period}
        return plan
