"""Arms: runs that differ only in their seed; and what may be said about two of them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from scipy import stats

from accordion_bench.report.labels import is_dense, policies_of
from accordion_bench.report.load import Run, flat
from accordion_bench.same import FREE as ALWAYS_FREE

# what does not change what a run computes
FREE = (*ALWAYS_FREE, "seed", "choices")
# what must be equal before two arms are compared at all
SETTING = ("model", "dataset", "workers", "batch_size", "epochs")
# what is compared: nobody needs to be told that these differ from dense
METHOD = ("compressor", "sync", "adaptive")
QUANTILE = 0.975  # of Student's t, for two-sided 95 % intervals


@dataclass(frozen=True)
class Arm:
    """Finished runs of one configuration, one per seed.

    Args:
        label: as in tables and figures; unique within a report.
        runs: by rising seed.
    """

    label: str
    runs: tuple[Run, ...]

    @property
    def n(self) -> int:
        return len(self.runs)

    @property
    def config(self) -> dict[str, Any]:
        return self.runs[0].config

    @property
    def seeds(self) -> list[int | None]:
        return [run.seed for run in self.runs]

    @property
    def dense(self) -> bool:
        return is_dense(self.config)

    @property
    def metric(self) -> str:
        """The name of what is evaluated, e.g. accuracy: a column of metrics.jsonl, a share in [0, 1]."""
        return self.runs[0].summary.get("metric_name", "accuracy")

    @property
    def setting(self) -> str:
        """One text for everything that must be equal before arms are compared."""
        return json.dumps({key: fingerprint(self.runs[0]).get(key) for key in SETTING}, sort_keys=True)

    def values(self, column: str) -> list[float]:
        """A column of summary.json over the seeds; empty where a run has none (null)."""
        found = [run.summary.get(column) for run in self.runs]
        return [float(value) for value in found if value is not None] if None not in found else []

    def mean(self, column: str) -> float:
        """Mean of a summary column over the seeds; NaN where there is none."""
        values = self.values(column)
        return math.fsum(values) / len(values) if values else math.nan


def fingerprint(run: Run) -> dict[str, Any]:
    """The configuration without what may differ inside an arm, with the number of workers that really ran."""
    kept = {key: value for key, value in run.config.items() if key not in FREE}
    kept["adaptive"] = policies_of(run.config)  # a preset changes no result: its scheme stands under sync
    return {**kept, "workers": run.summary.get("workers", run.config.get("workers"))}


def group(runs: Sequence[Run]) -> tuple[list[Arm], list[Run]]:
    """Finished runs as arms in the order of their first run, and the runs that repeat a seed of their arm.

    Of several runs with one seed the newest counts: repeats are no new evidence, and would make intervals too small.
    """
    arms: dict[str, dict[Any, Run]] = {}
    repeats = []
    for run in filter(lambda run: run.finished, runs):
        seeds = arms.setdefault(json.dumps(fingerprint(run), sort_keys=True), {})
        newest, *older = sorted(filter(None, [run, seeds.get(run.seed)]), key=_started, reverse=True)
        seeds[run.seed] = newest
        repeats += older
    grouped = [tuple(sorted(seeds.values(), key=lambda run: run.seed or 0)) for seeds in arms.values()]
    return _told_apart([Arm(members[0].label, members) for members in grouped]), repeats


def _started(run: Run) -> tuple[str, str]:
    return run.environment.get("started", ""), run.path.name


def _told_apart(arms: list[Arm]) -> list[Arm]:
    """Where arms of one setting share a label, add the options in which they differ."""
    result = []
    for arm in arms:
        twins = [other for other in arms if (other.label, other.setting) == (arm.label, arm.setting)]
        leaves = [flat(fingerprint(twin.runs[0])) for twin in twins]
        own = flat(fingerprint(arm.runs[0]))
        keys = sorted({key for leaf in leaves for key in leaf.keys() | own.keys() if leaf.get(key) != own.get(key)})
        short = [key.rpartition(".")[2] for key in keys]
        names = short if len(set(short)) == len(short) else keys
        told = ", ".join(f"{name}={own.get(key)}" for name, key in zip(names, keys, strict=True))
        result.append(replace(arm, label=f"{arm.label}, {told}") if told else arm)
    return result


def settings(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Arms that may be compared with each other: same model, data, workers, batch and epochs."""
    found: dict[str, list[Arm]] = {}
    for arm in arms:
        found.setdefault(arm.setting, []).append(arm)
    return list(found.values())


def baseline(arm: Arm, arms: Sequence[Arm]) -> Arm | None:
    """The dense arm of the same setting that differs least in everything else; None where none was given."""
    dense = [other for other in arms if other.dense and other.setting == arm.setting]
    return min(dense, key=lambda other: len(differences(arm, other)), default=None)


def differences(arm: Arm, other: Arm) -> list[str]:
    """Options outside compressor, scheme and policy in which two arms differ, as `key value (other value)`.

    Of a group with another class only the name.
    """
    own, theirs = (
        {k: v for k, v in flat(fingerprint(a.runs[0])).items() if k.split(".")[0] not in METHOD} for a in (arm, other)
    )
    keys = sorted(key for key in own.keys() | theirs.keys() if own.get(key) != theirs.get(key))
    other_class = {key.split(".")[0] for key in keys if key.endswith("._target_")}
    names = [
        f"{name} {arm.config['choices'].get(name)} ({other.config['choices'].get(name)})"
        for name in sorted(other_class)
    ]
    return names + [f"{k} {own.get(k)} ({theirs.get(k)})" for k in keys if k.split(".")[0] not in other_class]


def half_width(values: Sequence[float]) -> float:
    """Half of Student's 95 % t-interval of a mean, with n - 1 degrees of freedom; NaN below two values."""
    if len(values) < 2:
        return math.nan
    return float(stats.t.ppf(QUANTILE, len(values) - 1)) * standard_error(values)


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """(mean(a) - mean(b), half of Welch's 95 % t-interval of it); the half is NaN where a side has only one value."""
    gap = math.fsum(a) / len(a) - math.fsum(b) / len(b)
    if min(len(a), len(b)) < 2:
        return gap, math.nan
    variances = standard_error(a) ** 2, standard_error(b) ** 2
    if sum(variances) == 0:
        return gap, 0.0
    freedom = sum(variances) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(variances, (a, b), strict=True))
    return gap, float(stats.t.ppf(QUANTILE, freedom)) * math.sqrt(sum(variances))


def standard_error(values: Sequence[float]) -> float:
    """s / sqrt(n) with the sample's standard deviation s."""
    n = len(values)
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
