"""Base class of policies, checks of the plans that they return, and the valid levels of a compressor's knob."""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.component import Component, Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.units import counted
from accordion_bench.plan import Ladder, Plan, Request, RunFacts, Signals


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    interval = options.get("interval", 0)
    if cls.intervals and cls.intervals * interval >= context.epochs:
        yield "interval", f"the run has {counted(context.epochs, 'epoch')}"


class Policy(Component):
    """Base class of policies, which edit the plan at the end of an epoch or after an exchange.

    A policy receives signals and has no access to the compressor. An exchange is an optimizer step with
    sync=every_step, and one averaging with a local method.

    Every process of a run has its own copy of the policies. `begin_epoch`, `needs`, `due` and `needs_at` run on all
    processes and must return the same value on each, because collectives depend on it. They may use the options, the
    arguments of `start` and those of `begin_epoch`. `update` and `decision` run on the leader only; attributes that
    `update` sets do not change on other processes. `state_dict` is called on the leader; a resumed run loads its result
    on all processes.

    Class attributes:
        drives: what the policy controls: `level` (the compressor's rank, density or bits), `codebook` (its quantisation
            levels), `batch` (samples per worker and step, with a factor on the learning rate), `period` (local steps
            between two exchanges), or "" (nothing). Two policies may not drive the same, unless the later one refines.
        refines: whether it starts from the decision of an earlier policy in the list, and so may drive the same.
        when: `epoch`: `update` runs at the end of every epoch; `exchange`: after the exchanges that are `due`.
        knobs: compressor knobs that a policy with `drives = "level"` can control; empty = all.
        level_keys: names of the options that set its strongest level and its other levels.
        syncs: synchronisation schemes (names of YAML files), one of which is required; empty = any.
        needs_gradients: whether it must measure gradients, which local methods do not exchange.
        detects: whether it classifies epochs as critical or not.
        required_facts: facts about the training that it must know in advance, besides workers and tensors: `epochs`,
            `steps_per_epoch`, `schedule` (future learning rates), `loss` (of every step).
        intervals: number of periods of its option `interval`, in epochs, before its first decision; 0 = no such option.
        keeps: names of the attributes that make up its state.

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
    required_facts: frozenset[str] = frozenset()
    intervals: int = 0
    keeps: tuple[str, ...] = ()
    _decision: dict[str, Any] = {}

    def ladder(self, knob: str, pair: tuple[float, float]) -> tuple[float, ...]:
        """Return the values that this policy chooses from, strong first; `pair` is the compressor's (strong, weak).

        The ladder of a run contains the values of all its policies, strong first.
        """
        raise NotImplementedError

    def begin_epoch(self, epoch: int, exchange: int, plan: Plan) -> None:
        """Called on every process at the start of every epoch, with the exchanges made so far and the current plan."""

    def needs(self, epoch: int) -> frozenset[str]:
        """Return the signals to collect in this epoch, see `signals/statistics.py`; no others are computed."""
        return frozenset()

    def due(self, exchange: int) -> bool:
        """Return whether to call `update` after this exchange (counted from 0).

        With `when = "epoch"`, this call only lets `update` record what `needs_at` has requested.
        """
        return False

    def needs_at(self, exchange: int) -> frozenset[Request]:
        """Return what to measure in this exchange, see `plan.py`."""
        return frozenset()

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        """Return the plan before the first step; called when the configuration is checked and when the run starts.

        Raises:
            ValueRefused: an option does not fit the run.
        """
        return plan

    def later_batches(self, first: int) -> Iterable[int]:
        """Return the later batch sizes of a run that starts with `first`; empty = none, or unknown. Needs `start`."""
        return ()

    def units_change(self) -> None:
        """Discard state that would mix units: from now on parameter differences are exchanged, no longer gradients."""

    def length_dependent_decisions(self, epochs: int) -> Any:
        """Return the part of its decisions in the first `epochs` that depends on the length of the run; needs `start`.

        A run may be extended if the old and the new length give equal results. None: independent of the length.
        """
        return None

    def follow(self, plan: Plan) -> None:
        """Receive the plan of the earlier policy that this one refines; called at the start and after each decision."""

    def update(self, signals: Signals, plan: Plan) -> Plan:
        """Return the plan after an epoch or an exchange. Runs on the leader only; the result is broadcast.

        Return the same object where nothing is decided; `follow` is then not called.
        """
        return plan

    def decision(self) -> dict[str, Any]:
        """Return the measurements and the decision of the last `update`, for the metrics row; empty = no decision."""
        return self._decision

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers, strings and containers of them: copies of the attributes in `keeps`."""
        return {name: copy.deepcopy(getattr(self, name)) for name in self.keeps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        for name in self.keeps:
            setattr(self, name, copy.deepcopy(state[name]))


def checked(name: str, before: Plan, plan: Any, ladder: Ladder) -> Plan:
    """Check the plan that a policy's `update` returns for the plan before, and sort its levels in that order.

    Raises:
        ConfigError: the plan is not valid for the run.
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
    """Sort policies for deciding: drivers of the batch first, because the others depend on the new learning rate."""
    return dict(sorted(policies.items(), key=lambda named: named[1].drives != "batch"))  # else as listed


def notify_refiners(policies: Sequence[Policy], decider: Policy, plan: Plan) -> None:
    """Pass a decision to the later policies that refine it."""
    for policy in policies[policies.index(decider) + 1 :]:
        if policy.refines and policy.drives == decider.drives:
            policy.follow(plan)


BITS = (2, 8)  # fewest and most
DENSE: dict[str, float] = {"rank": 1_000_000, "density": 1.0}
"""Lossless level of each knob that has one; a rank is limited to the smaller side of each matrix."""


def check_level(key: str, value: Any, knob: str, instead: Any) -> float:
    """Return `value` if the knob can take it: a share for `density`, `BITS` for `bits`, else an integer of at least 1.

    Raises:
        ValueRefused: it cannot; the error suggests `instead`.
    """
    if knob == "density":
        return checks.number(key, value, above=0, at_most=1, instead=instead)
    least, most = BITS if knob == "bits" else (1, DENSE["rank"])
    if type(value) is not int or not least <= value <= most:
        name = "number of bits" if knob == "bits" else knob
        raise checks.ValueRefused(key, f"an integer from {least} to {most:g}, as a {name}", value, instead)
    return value


def is_positive(value: Any) -> bool:
    """Return whether a value is a finite number above 0, as every level is."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
