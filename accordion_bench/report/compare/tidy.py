"""The numbers of arms as a tidy table: one row per arm."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from accordion_bench.report.compare.arms import Arm, baseline
from accordion_bench.report.compare.intervals import against, difference, half_width, standard_error
from accordion_bench.report.compare.times import comparable
from accordion_bench.runs.metrics import split_of


def tidy(arms: Sequence[Arm]) -> pd.DataFrame:
    """One row per arm, numbers only: what table.csv holds.

    Columns of what is evaluated carry its name: `accuracy` (a share in [0, 1]), `accuracy_ci95`, ..., or `perplexity`,
    `perplexity_ci95`, ...; `metric` says which. Everything against dense is against the dense run named in `baseline`,
    and empty where none was given; `*_times_less` below 1 means MORE than dense. Payload, wire and rounds are empty
    where a hook of somebody else's has sent what nobody has counted; `link_sent_bytes` is what interfaces have counted.
    """
    rows = []
    for arm in arms:
        dense, config = baseline(arm, arms), arm.config
        rows.append(
            {
                "model": arm.named("model"),
                "dataset": arm.named("dataset"),
                "workers": arm.workers,
                "batch_size": config["batch_size"],
                "epochs": config["epochs"],
                "scale": arm.scale,
                "experiment": arm.chosen("experiment"),
                "arm": arm.label,
                "n": arm.n,
                "seeds": " ".join(map(str, arm.seeds)),
                "metric": arm.metric,
                **_judged(arm, dense),
                "payload_bytes": arm.mean("payload_bytes"),
                "payload_times_less": _times_less(arm, dense, "payload_bytes"),
                "wire_bytes": arm.mean("wire_bytes"),
                "wire_times_less": _times_less(arm, dense, "wire_bytes"),
                "link_sent_bytes": arm.mean("link_sent_bytes"),
                "rounds": arm.mean("rounds"),
                "rounds_times_less": _times_less(arm, dense, "rounds"),
                "paper_floats": arm.mean("paper_floats"),
                "seconds": arm.mean("seconds"),
                "seconds_ci95": half_width(arm.values("seconds")),
                "exposed_seconds": arm.mean("exposed_seconds"),
                "comm_seconds": arm.mean("comm_seconds"),
                "seconds_over_dense": over(arm, dense, "seconds"),
                "seconds_within_noise": within_noise(arm, dense, "seconds"),
                "network": arm.named("network"),
                "modelled_seconds": arm.mean("modelled_seconds"),
                "modelled_seconds_ci95": half_width(arm.values("modelled_seconds")),
                "modelled_comm_seconds": arm.mean("modelled_comm_seconds"),
                "modelled_seconds_over_dense": over(arm, dense, "modelled_seconds"),
                "modelled_seconds_within_noise": within_noise(arm, dense, "modelled_seconds"),
                "baseline": dense.label if dense else "",
            }
        )
    return pd.DataFrame(rows)


def _judged(arm: Arm, dense: Arm | None) -> dict[str, Any]:
    """What is evaluated: mean, interval, deviation and best over the seeds, and the difference to dense."""
    name, values, found = arm.metric, arm.values("metric"), against(arm, dense)
    return {
        name: arm.mean("metric"),
        f"{name}_ci95": half_width(values),
        f"{name}_std": standard_error(values) * math.sqrt(arm.n) if arm.n > 1 else math.nan,
        f"best_{name}": arm.mean("best_metric"),
        "selected_by": arm.selected_by,
        f"test_{name}_at_best": arm.mean("test_at_best"),
        f"{name}_minus_dense": found.gap,
        f"{name}_minus_dense_ci95": found.half,
        "interval": found.how,
        "difference_shown": _yes_or_no(found.shown),
    }


def best_column(table: pd.DataFrame) -> tuple[str, str]:
    """(Name, heading) of the best value: on the test split where it is known, else `best, validation`."""
    name = table["metric"].iloc[0]
    if table[f"test_{name}_at_best"].notna().all():
        return f"test_{name}_at_best", "best"
    splits = {split_of(column) for column in table["selected_by"]}
    return f"best_{name}", "best, validation" if "validation" in splits else "best"


def _yes_or_no(shown: bool | None) -> str:
    """Whether a difference was shown, as table.csv says it; "" where there is no statement."""
    if shown is None:
        return ""
    return "yes" if shown else "no"


def _times_less(arm: Arm, dense: Arm | None, column: str) -> float:
    sent = arm.mean(column)
    if sent == 0:
        return math.inf
    theirs = dense.mean(column) if dense else 0.0
    return theirs / sent if theirs else math.nan  # nothing is a multiple of nothing


def over(arm: Arm, dense: Arm | None, column: str) -> float:
    """Ratio of times, `seconds` or `modelled_seconds`; NaN where a side has none, or they do not compare."""
    if dense is None or not comparable(arm, dense, column):
        return math.nan
    return arm.mean(column) / dense.mean(column) if dense.mean(column) else math.nan


def within_noise(arm: Arm, dense: Arm | None, column: str) -> bool:
    """Whether times that compare cannot be told apart: a seed shares no work on the machine, so Welch's interval."""
    if dense is None or arm is dense or math.isnan(over(arm, dense, column)):
        return False
    return difference(arm.values(column), dense.values(column)).shown is False
