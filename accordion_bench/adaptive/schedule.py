"""LevelSchedule: levels from a fixed table by epoch, for ablations and for replaying the decisions of another run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.policy import DENSE, Policy, check_level, is_positive
from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.options.units import counted
from accordion_bench.plan import Ladder, Plan, RunFacts, Signals

WORDS = ("weak", "strong", "dense")


def _smoke_options(options: Config, knob: str) -> Config:
    # codebooks of many bits take seconds to fit
    return {"inside": 3, "outside": 2} if knob == "bits" else {}


@with_options
class LevelSchedule(Policy):
    """Set level(e) = `inside` where epoch e is critical, else `outside`; or level(e) from `ranges`. It uses no signal.

    A level is `weak` or `strong` (the compressor's pair), `dense` (density 1, or the full rank), or a number. A range
    includes its first epoch and excludes its end; an end of null is the end of the run.

    `critical=[]` means no epoch, [[0, null]] all. null means the first fifteenth of the run, and as many epochs after
    the first sudden fall of the learning rate to at most 0.7 of its value (20 + 20 of 300 epochs). `ranges` must give
    every epoch exactly one level; the other options must then be null.

    The paper's ablation as (inside, outside): weak everywhere (weak, weak), only in critical epochs (weak, strong),
    only outside of them (strong, weak), nowhere (strong, strong), dense outside (strong, dense).

    Source: Agarwal et al., MLSys 2021 (arXiv 2010.16248), figure 2.
    """

    critical: Any = option(
        "[[first, end], ...], end excluded; null = a fifteenth of the run at the start and after the first drop of the "
        "learning rate",
        default=None,
    )
    inside: Any = option("level in critical epochs: weak, strong, dense or a number; null = weak", default=None)
    outside: Any = option("level elsewhere; null = strong", default=None)
    ranges: Any = option(
        "replaces the three: [[first, end, level], ...]; an end of null is the end of the run", default=None
    )

    chosen_as = {
        "schedule": Choice("levels by epoch: the ablation of critical regimes (Agarwal et al. 2021, figure 2)")
    }

    description = replace(Policy.description, smoke_options=_smoke_options)

    def __post_init__(self) -> None:
        super().__post_init__()
        critical, ranges = self.critical, self.ranges
        for key, level in (("inside", self.inside), ("outside", self.outside)):
            if level is not None and not is_level(level):
                raise ValueRefused(key, f"one of {', '.join(WORDS)}, or a number above 0", level, "weak")
            if ranges is not None and level is not None:
                raise ValueRefused(key, "{null} together with ranges", level, None)
        if critical is not None and not (isinstance(critical, list | tuple) and all(is_range(r, 2) for r in critical)):
            raise ValueRefused("critical", "{null} or a list of [first epoch, end]", critical, [[0, 1]])
        if critical is not None and ranges is not None:
            raise ValueRefused("critical", "{null} together with ranges", critical, None)
        good = ranges is None or (isinstance(ranges, list | tuple) and ranges and all(is_range(r, 3) for r in ranges))
        if not good:
            rule = "{null} or a list of [first epoch, end, level]"
            raise ValueRefused("ranges", rule, ranges, [[0, 20, "weak"], [20, None, "strong"]])
        self.required_facts = frozenset({"epochs"} if critical is not None or ranges else {"epochs", "schedule"})
        self.inside, self.outside = self.inside or "weak", self.outside or "strong"
        self._values: list[float] = []
        self._indices: list[int] = []

    def ladder(self, knob: str, pair: tuple[float, float]) -> tuple[float, ...]:
        used = [("ranges", r[2]) for r in self.ranges or []] or [("inside", self.inside), ("outside", self.outside)]
        found = sorted((self.value(key, level, knob, pair), key) for key, level in used)
        self.level_keys = found[0][1], found[-1][1]
        return tuple(sorted({value for value, _ in found}))

    def value(self, key: str, level: Any, knob: str, pair: tuple[float, float]) -> float:
        """Return the knob's value for a word or a number."""
        strong, weak = pair
        if level == "strong":
            return strong
        if level == "weak":
            return weak
        instead = [[*r[:2], "weak" if r[2] == level else r[2]] for r in self.ranges or []] or "weak"
        if level == "dense" and knob not in DENSE:
            raise ValueRefused(key, f"weak, strong or a number (there is no dense level of {knob})", level, instead)
        return DENSE[knob] if level == "dense" else check_level(key, level, knob, instead)

    def by_epoch(self, run: RunFacts) -> list[Any]:
        """Return the configured level of each epoch, after checking that each has one, within the run."""
        if self.ranges is not None:
            found = covered(self.ranges, run.epochs)
            wrong = beyond(self.ranges, run.epochs) or first_wrong(found)
            if wrong:
                each = f"each of the {counted(run.epochs, 'epoch')}"
                rule = f"a list of [first epoch, end, level] that gives {each} one level"
                raise ValueRefused(
                    "ranges", f"{rule} ({wrong})", self.ranges, corrected_ranges(self.ranges, run.epochs)
                )
            return [self.ranges[i][2] for (i,) in found]
        critical = self.default_critical(run) if self.critical is None else self.critical
        found = covered(critical, run.epochs)
        if wrong := beyond(critical, run.epochs) or first_wrong([ids[:2] or [0] for ids in found]):
            rule = f"a list of [first epoch, end] without overlaps within {counted(run.epochs, 'epoch')} ({wrong})"
            raise ValueRefused("critical", rule, self.critical, corrected_ranges(critical, run.epochs, apart=True))
        return [self.inside if ids else self.outside for ids in found]

    def default_critical(self, run: RunFacts) -> list[list[int]]:
        """Return the paper's critical epochs, scaled to the length of the run."""
        length = max(1, round(run.epochs / 15))
        drop = run.first_drop()
        if drop is None:
            return [[0, length]]
        end = min(drop + length, run.epochs)
        return [[0, end]] if drop <= length else [[0, length], [drop, end]]

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        key = "inside" if self.ranges is None else "ranges"
        self._values = [self.value(key, level, ladder.knob, ladder.pair) for level in self.by_epoch(run)]
        self._indices = [ladder.values.index(value) for value in self._values]
        return plan.with_levels(dict.fromkeys(plan.levels, self._indices[0]))

    def length_dependent_decisions(self, epochs: int) -> Any:
        return self._values[:epochs]

    def update(self, signals: Signals, plan: Plan) -> Plan:
        now, following = signals.epoch, signals.epoch + 1
        self._decision = {}
        if following >= len(self._indices) or self._indices[following] == self._indices[now]:
            return plan
        self._decision = {"from_epoch": following, "level": self._values[following]}
        return plan.with_levels(dict.fromkeys(plan.levels, self._indices[following]))


def is_level(value: Any) -> bool:
    """Return whether a value is one of the words for levels, or a number above 0."""
    return value in WORDS if isinstance(value, str) else is_positive(value)


def is_range(value: Any, size: int) -> bool:
    """Return whether a value is [first, end] or [first, end, level], with 0 <= first < end integers, or end null."""
    if not isinstance(value, list | tuple) or len(value) != size or type(value[0]) is not int or value[0] < 0:
        return False
    good_end = value[1] is None or (type(value[1]) is int and value[1] > value[0])
    return good_end and (size == 2 or is_level(value[2]))


def covered(ranges: Sequence[Any], epochs: int) -> list[list[int]]:
    """Return, for each epoch, the indices of the ranges that contain it."""
    ends = [epochs if r[1] is None else r[1] for r in ranges]
    return [[i for i, r in enumerate(ranges) if r[0] <= epoch < ends[i]] for epoch in range(epochs)]


def beyond(ranges: Sequence[Any], epochs: int) -> str:
    """Describe the first range that exceeds the run; "" if none does."""
    late = [r for r in ranges if r[0] >= epochs or (r[1] or 0) > epochs]
    return f"{checks.show(late[0])} exceeds the run" if late else ""


def first_wrong(found: Sequence[Sequence[int]]) -> str:
    """Describe the first epoch that is in no range or in several; "" if there is none."""
    for epoch, ids in enumerate(found):
        if len(ids) != 1:
            return f"epoch {epoch} has {'none' if not ids else 'two'}"
    return ""


def corrected_ranges(ranges: Sequence[Any], epochs: int, apart: bool = False) -> list[list[Any]]:
    """Return corrected ranges: each ends where the next one starts, or earlier where `apart` allows gaps."""
    by_first = {r[0]: r for r in sorted(ranges, key=lambda r: r[0]) if r[0] < epochs}
    kept = [list(r) for r in by_first.values()] or [list(ranges[0])]
    if not apart or kept[0][0] >= epochs:
        kept[0][0] = 0
    for r, following in zip(kept, [*(r[0] for r in kept[1:]), epochs], strict=True):
        end = min(following, r[1] or epochs) if apart else following
        r[1] = None if end == epochs else end
    return kept
