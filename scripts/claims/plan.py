"""Requirements of a claim: its tables, arms, rates and seeds, from a YAML file of `plans`, as a list of runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

PLANS = Path(__file__).parent / "plans"
RUNS = Path("results/runs/claims")  # of all claims


@dataclass(frozen=True)
class Cell:
    """One run.

    Args:
        claim, table, arm: position of the run.
        phase: `tune` (chooses the rate; one seed, never counted) or `count`.
        rate: learning rate.
        seed: seed of the run.
        overrides: overrides of the run without the folders of runs and data.
        lab: options of netlab, for a run on several hosts behind links; none = in one process.
    """

    claim: str
    table: str
    arm: str
    phase: str
    rate: float
    seed: int
    overrides: tuple[str, ...]
    lab: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Path of its run folder, which contains this run only."""
        return RUNS / self.claim / self.table / self.phase / f"{self.arm}-{self.rate:g}-{self.seed}"

    @property
    def name(self) -> str:
        return f"{self.table}, {self.phase}, {self.arm}, rate {self.rate:g}, seed {self.seed}"


@dataclass(frozen=True)
class Table:
    """One comparison.

    Args:
        name: name of the table.
        arms: name -> overrides.
        rates: grid of learning rates, the same for all arms.
        own_rates: arm -> another grid of the same length, for steps in another unit, such as signs.
        tune_seed: seed of the runs that choose the rate; it enters no mean.
        tuning: overrides of those runs only.
        rates_from: another table whose choice is used here; None = this table tunes.
        seeds: seeds of the runs that count.
        overrides: overrides of all runs.
        lab: options of netlab; such runs are made one at a time.
        links: table of the same claim, with a lab, whose steps were measured behind links; None = none.
        against: arms with which the others are compared; the first one is the baseline.
        same_bytes: schedules with the bytes of one of the arms (`same_bytes.py`); None = none.
        windows: arms that are strong in one window of epochs each (`windows.py`); None = none.
        to_target: baseline and links for its time to a target (`to_target.py`); None = none.
    """

    name: str
    arms: Mapping[str, Sequence[str]]
    rates: Sequence[float]
    own_rates: Mapping[str, Sequence[float]]
    tune_seed: int
    tuning: Sequence[str]
    rates_from: str | None
    seeds: Sequence[int]
    overrides: Sequence[str]
    lab: Sequence[str]
    links: str | None = None
    against: Sequence[str] = ("dense",)
    same_bytes: Mapping[str, Any] | None = None
    windows: Mapping[str, Any] | None = None
    to_target: Mapping[str, Any] | None = None

    @property
    def tunes(self) -> bool:
        """Whether its own runs choose its rates; a single rate needs no choice."""
        return self.rates_from is None and len(self.rates) > 1

    def grid(self, arm: str) -> Sequence[float]:
        """Return the learning rates at which an arm is tried."""
        return self.own_rates.get(arm, self.rates)

    @property
    def all_arms(self) -> list[str]:
        """Arms, and the schedules with the bytes of one of them."""
        return [*self.arms, *(self.same_bytes or {"arms": ()})["arms"]]

    @property
    def drawn_arms(self) -> list[str]:
        """Schedules that differ from seed to seed."""
        return [arm for arm, how in (self.same_bytes or {"arms": {}})["arms"].items() if how == "random"]

    def all_rates(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Return the rates of the arms, and of schedules, which use the rate of the arm whose bytes they have."""
        told = self.same_bytes or {"of": None, "arms": {}}
        return {**rates, **{arm: rates[told["of"]] for arm in told["arms"] if told["of"] in rates}}


@dataclass(frozen=True)
class Plan:
    """A claim: its name, its tables in the order of their runs, and the difference between them (`curve.py`).

    `names` contains the names of arms in figures that differ from the arm's own name.
    """

    claim: str
    tables: Sequence[Table]
    curve: Mapping[str, Any] | None = None
    names: Mapping[str, str] = field(default_factory=dict)

    def table(self, name: str) -> Table:
        """Return the table of this name.

        Raises:
            SystemExit: there is none.
        """
        named = {table.name: table for table in self.tables}
        if name not in named:
            raise SystemExit(f"TABLE of {self.claim} must be one of {', '.join(named)}, got {name}")
        return named[name]

    def tune_cells(self, table: Table) -> list[Cell]:
        """Return the runs that choose a table's rates; none if another table chooses, or one rate is given."""
        if not table.tunes:
            return []
        return [
            self.cell(table, arm, "tune", rate, table.tune_seed, [*table.arms[arm], *table.tuning])
            for arm in table.arms
            for rate in table.grid(arm)
        ]

    def count_cells(self, table: Table, rates: Mapping[str, float]) -> list[Cell]:
        """Return the runs that count, every arm's first seed first; arms without a rate have none."""
        return [
            self.cell(table, arm, "count", rates[arm], seed, table.arms[arm])
            for seed in table.seeds
            for arm in table.arms
            if arm in rates
        ]

    def cell(self, table: Table, arm: str, phase: str, rate: float, seed: int, own: Sequence[str]) -> Cell:
        """Return one run: the overrides of its table and its own, its rate and its seed."""
        typed = _last_of_each((*table.overrides, *own, f"optimizer.lr={rate:g}", f"seed={seed}"))
        return Cell(self.claim, table.name, arm, phase, rate, seed, typed, tuple(table.lab))


def read_plan(claim: str) -> Plan:
    """Return the plan of a claim.

    Raises:
        SystemExit: there is none of that name.
    """
    file = PLANS / f"{claim}.yaml"
    if not file.is_file():
        raise SystemExit(f"CLAIM must be one of {', '.join(names())}, got {claim}")
    told: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    tables = [_table(name, {**told, **own}, told["always"]) for name, own in told["tables"].items()]
    return Plan(claim, tables, told.get("curve"), told.get("names", {}))


def names() -> list[str]:
    """Return the claims that have a plan."""
    return sorted(file.stem for file in PLANS.glob("*.yaml"))


def _last_of_each(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return overrides with each key once: those of an arm or a tuning run replace those of its table."""
    last = {override.partition("=")[0]: override for override in overrides}
    return tuple(override for override in overrides if last[override.partition("=")[0]] is override)


def _table(name: str, told: Mapping[str, Any], always: Sequence[str]) -> Table:
    listed = told["arms"]
    arms = {arm: listed[arm] for arm in told.get("only", listed)}
    return Table(
        name=name,
        arms=arms,
        rates=told["rates"],
        own_rates=told.get("own_rates", {}),
        tune_seed=told.get("tune_seed", 100),
        tuning=told.get("tuning", []),
        rates_from=told.get("rates_from"),
        seeds=told["seeds"],
        overrides=[*always, *told.get("overrides", [])],
        lab=told.get("lab", []),
        links=told.get("links"),
        against=told.get("against", ("dense",)),
        same_bytes=told.get("same_bytes"),
        windows=told.get("windows"),
        to_target=told.get("to_target"),
    )
