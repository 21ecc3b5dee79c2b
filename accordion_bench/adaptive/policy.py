"""What every policy is, and what the knob can be set to that a policy of levels steers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.component import Component, Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.options.units import counted
from accordion_bench.plan import Ladder, Plan, RunFacts, Signals
from accordion_bench.requests import Request


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    interval = options.get("interval", 0)
    if cls.intervals and cls.intervals * interval >= context.epochs:
        yield "interval", f"the run has {counted(context.epochs, 'epoch')}"


class Policy(Component):
    """A policy edits the plan at the end of an epoch or after an exchange; it sees signals, never a compressor.

    An exchange is an optimizer step with sync=every_step, and one averaging with a local method.

    Every process of a run has its policies. `begin_epoch`, `needs`, `due` and `needs_at` run on all of them and must
    give the same answer everywhere, because collectives hang on it: they may use the options, what `start` was given,
    and what `begin_epoch` tells. `update` and `decision` run on the leader alone; what `update` notes is unknown
    elsewhere. `state_dict` is the leader's, and a resumed run gives it to all.

    Class attributes:
        drives: what it steers: `level` (the compressor's rank, density or bits), `codebook` (its quantisation
            levels), `batch` (samples per worker and step, with the learning rate's factor), `period` (local steps
            between two exchanges), or "" (nothing). Two policies may not drive the same, unless the later one refines.
        refines: it starts from what an earlier policy in the list has decided, so that it may drive the same.
        when: `epoch`: `update` runs at the end of every epoch; `exchange`: after the exchanges that are `due`.
        knobs: compressor knobs that it can steer, where it drives levels; empty = all.
        level_keys: the options that say its strongest level and its others.
        syncs: synchronisation schemes (names of YAML files) of which it needs one; empty = any.
        needs_gradients: what it looks at must be gradients, which local methods do not exchange.
        detects: it tells critical epochs from others.
        plans_with: what it must know of the training beforehand, besides workers and tensors: `epochs`,
            `steps_per_epoch`, `schedule` (the learning rate to come), `loss` (of every step).
        intervals: how many times its option `interval`, in epochs, must pass before it can decide; 0 = has none.

    Example:
        >>> class StrongFromEpoch1(Policy):
        ...     def ladder(self, knob, pair): return pair
        ...     def start(self, plan, ladder, run): return plan.with_levels(dict.fromkeys(plan.levels, 1))
        ...     def update(self, signals, plan): return plan.with_levels(dict.fromkeys(plan.levels, 0))
        >>> plan = StrongFromEpoch1().start(Plan({"weight": 0}, batch_size=32), Ladder("rank", (1, 4), (1, 4)), None)
        >>> plan.levels, StrongFromEpoch1().update(None, plan).levels
        ({'weight': 1}, {'weight': 0})
    """

    description = replace(Component.description, idle=_idle)

    drives: str = "level"
    refines: bool = False
    when: str = "epoch"
    knobs: tuple[str, ...] = ()
    level_keys: tuple[str, str] = ("strong", "weak")
    syncs: tuple[str, ...] = ()
    needs_gradients: bool = False
    detects: bool = False
    plans_with: frozenset[str] = frozenset()
    intervals: int = 0
    _decision: dict[str, Any] = {}

    def ladder(self, knob: str, pair: tuple[float, float]) -> tuple[float, ...]:
        """The values that this policy chooses from, strong first; `pair` is the compressor's own (strong, weak).

        A run's ladder holds the values of all its policies, strong first.
        """
        raise NotImplementedError

    def begin_epoch(self, epoch: int, exchange: int, plan: Plan) -> None:
        """On every process, at the start of every epoch: the exchanges made so far, and the plan that is in force."""

    def needs(self, epoch: int) -> frozenset[str]:
        """The signals to collect in this epoch, see `signals/gradient_sums.py`; other signals are not computed."""
        return frozenset()

    def due(self, exchange: int) -> bool:
        """Whether to decide after this exchange (counted from 0), where `when` is `exchange`.

        Where it is `epoch`, `update` runs after this exchange, too, to take note of what `needs_at` has asked for.
        """
        return False

    def needs_at(self, exchange: int) -> frozenset[Request]:
        """What to look at in this exchange, see `requests.py`."""
        return frozenset()

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        """The plan before the first step; called when the configuration is checked, and again when the run starts.

        Raises:
            ValueRefused: an option does not fit the run.
        """
        return plan

    def later_batches(self, first: int) -> Iterable[int]:
        """The batch sizes that it may take where a run begins with `first`; after `start`. Empty = none, or unknown."""
        return ()

    def units_change(self) -> None:
        """From here on differences of parameters are exchanged, no more gradients: forget what would mix both."""

    def owed_to_length(self, epochs: int) -> Any:
        """What its decisions in the first `epochs` owe to the length of the run; after `start`.

        A run may be extended where both lengths give the same. None: nothing.
        """
        return None

    def follow(self, plan: Plan) -> None:
        """The earlier policy that this one refines has decided this plan; called at the start, too."""

    def update(self, signals: Signals, plan: Plan) -> Plan:
        """The plan after an epoch, or an exchange. Runs on the leader alone; the result is broadcast.

        Where nothing is decided it returns the same object, which tells `follow` so.
        """
        return plan

    def decision(self) -> dict[str, Any]:
        """What the last update saw and decided, for the metrics row; empty = nothing to say."""
        return self._decision

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, strings and containers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""


def checked(name: str, before: Plan, plan: Any, ladder: Ladder) -> Plan:
    """What a policy has made of a plan, with its levels in the order of the plan before.

    Args:
        name: of the policy.
        before: the plan that it was given.
        plan: what it returns.
        ladder: of the run.

    Raises:
        ConfigError: that is no plan which the run can follow.
    """
    if plan is before:
        return before
    if not isinstance(plan, Plan):
        raise _wrong(name, "return a Plan", checks.show(plan), "`return plan` where nothing changes")
    if plan.levels.keys() != before.levels.keys():
        odd = min(plan.levels.keys() ^ before.levels.keys())
        what = f"{odd} {'added' if odd in plan.levels else 'left out'}"
        raise _wrong(name, "plan a level for each tensor of the plan before", what, "`return plan.with_levels(levels)`")
    for tensor, level in plan.levels.items():
        if not _is_index(level) or not level < len(ladder.values):
            held = ", ".join(f"{i} = {ladder.knob} {value:g}" for i, value in enumerate(ladder.values))
            instead = "`ladder.values.index(VALUE)`"
            raise _wrong(name, f"plan levels by their index in the ladder ({held})", f"{level} for {tensor}", instead)
    for key, value in (("batch_size", plan.batch_size), ("period", plan.period)):
        if not _is_index(value) or value < 1:
            raise _wrong(
                name, f"plan a {key} that is a whole number of at least 1", value, f"`{key}=max(1, int(VALUE))`"
            )
    if isinstance(plan.lr_factor, bool) or not (0 <= plan.lr_factor < math.inf):
        raise _wrong(name, "plan an lr_factor that is finite and not negative", plan.lr_factor, "`lr_factor=1.0`")
    sizes, own = ({bits: len(book) for bits, book in each.codebooks.items()} for each in (plan, before))
    if sizes != own:
        rule = f"plan codebooks of as many levels as the plan before ({checks.show(own)} by bits)"
        raise _wrong(name, rule, checks.show(sizes), "`replace(plan, codebooks=...)` with the same sizes")
    if list(plan.levels) != list(before.levels):
        return replace(plan, levels={tensor: plan.levels[tensor] for tensor in before.levels})
    return plan


def _is_index(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _wrong(name: str, rule: str, got: Any, instead: str) -> ConfigError:
    return ConfigError(f"adaptive.{name} must {rule}, got {got}; write {instead}")


def in_order(policies: dict[str, Policy]) -> dict[str, Policy]:
    """The order in which they decide: drivers of the batch first, because the others look at the rate they leave."""
    return dict(sorted(policies.items(), key=lambda named: named[1].drives != "batch"))  # else as listed


def tell_followers(policies: Sequence[Policy], decider: Policy, plan: Plan) -> None:
    """Show a decision to the later policies that refine it."""
    for policy in policies[policies.index(decider) + 1 :]:
        if policy.refines and policy.drives == decider.drives:
            policy.follow(plan)


BITS = (2, 8)  # fewest and most
DENSE: dict[str, float] = {"rank": 1_000_000, "density": 1.0}
"""Levels that leave nothing out, where a knob has one; a rank is cut to the smaller side of each matrix."""


def check_level(key: str, value: Any, knob: str, instead: Any) -> float:
    """A value that the knob can take: a share for `density`, `BITS` for `bits`, else an integer of at least 1.

    Raises:
        ValueRefused: with `instead` as what to type.
    """
    if knob == "density":
        return checks.number(key, value, above=0, at_most=1, instead=instead)
    least, most = BITS if knob == "bits" else (1, DENSE["rank"])
    if type(value) is not int or not least <= value <= most:
        name = "number of bits" if knob == "bits" else knob
        raise checks.ValueRefused(key, f"an integer from {least} to {most:g}, as a {name}", value, instead)
    return value


def is_positive(value: Any) -> bool:
    """Whether this is a finite number above 0, as every level of every knob is."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
