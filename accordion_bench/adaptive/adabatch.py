"""AdaBatch: the batch grows and the learning rate falls by fixed factors every so many epochs."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.base import Policy
from accordion_bench.adaptive.batch_limits import float32, most, refuse_full
from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.options.units import counted
from accordion_bench.plan import Ladder, Plan, RunFacts, Signals


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from Policy.description.idle(cls, options, context)
    if options.get("freq", 0) >= context.epochs:
        yield "freq", f"the run has {counted(context.epochs, 'epoch')}"


def _smoke_options(options: Config, knob: str) -> Config:
    return {"freq": 1}


@with_options
class AdaBatch(Policy):
    """Every `freq` epochs B <- beta B and LR <- gamma LR; B is capped at the data set.

    After k changes B_k = min(floor(B_0 beta^k), samples of a worker) and LR gets the factor gamma^k B_k / (B_0 beta^k):
    where the batch is capped, the learning rate falls by the rest, so that LR / B follows (gamma / beta)^k throughout.

    gamma / beta is the decay that a fixed batch would have had, so that this policy takes the place of a decaying
    schedule: its YAML file selects schedule=constant, and a schedule that decays is refused unless gamma = beta (then
    LR / B follows the schedule, and this policy scales both alike).

    Source: Devarakonda et al. 2017 (arXiv 1712.02029); that 0.375 and 0.75 go with freq 20 is as recalled.
    """

    freq: int = option("epochs between two changes; 20 of 100 in the paper", default=20, at_least=1)
    beta: float = option("growth of the batch", default=2.0, above=1)
    gamma: float = option(
        "factor on the learning rate (0.75 = 2 x 0.375); = beta with a schedule that decays by itself",
        default=0.75,
        above=0,
    )

    chosen_as = {
        "adabatch": Choice(
            "B <- beta B and LR <- gamma LR every freq epochs, in place of a decaying schedule (Devarakonda et "
            "al. 2017)",
            selects={"schedule": "constant"},
        )
    }

    description = replace(
        Policy.description, requires={"schedule": {"milestones": []}}, idle=_idle, smoke_options=_smoke_options
    )

    drives = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._decision: dict[str, Any] = {}

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        refuse_full("adabatch", run)
        self.first, self.most, self.epochs = plan.batch_size, most(run), run.epochs
        factors = [run.schedule(half / 2) for half in range(2 * run.epochs)]
        if self.gamma < self.beta and any(b < a for a, b in itertools.pairwise(factors)):
            rule = f"beta={checks.show(self.beta)} with a schedule that decays, or the learning rate would decay twice"
            raise ValueRefused("gamma", rule, self.gamma, f"{checks.show(self.beta)}, or schedule=constant")
        return plan

    def update(self, signals: Signals, plan: Plan) -> Plan:
        k, rest = divmod(signals.epoch + 1, self.freq)
        self._decision = {}
        if rest:
            return plan
        batch, capped = self.after(k, self.first)
        # beta^k alone may be beyond all numbers
        factor = float32((self.gamma / self.beta) ** k * batch / self.first)
        self._decision = {"batch_size": batch, "lr_factor": factor, "capped": capped}
        return replace(plan, batch_size=batch, lr_factor=factor)

    def after(self, changes: int, first: int) -> tuple[int, bool]:
        """The batch after so many changes, and whether it is capped."""
        capped = changes >= math.log(self.most / first, self.beta)
        return self.most if capped else min(int(first * self.beta**changes), self.most), capped

    def later_batches(self, first: int) -> Iterable[int]:
        return {self.after(k, first)[0] for k in range(1, (self.epochs - 1) // self.freq + 1)}

    def decision(self) -> dict[str, Any]:
        return self._decision
