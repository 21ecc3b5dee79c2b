"""The comparison table: as numbers for table.csv, and aligned Markdown for people."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from accordion_bench.progress import human_bytes
from accordion_bench.report.arms import Arm, baseline, difference, half_width, standard_error
from accordion_bench.report.provenance import machine

NONE = "–"


def tidy(arms: Sequence[Arm]) -> pd.DataFrame:
    """One row per arm, numbers only: what table.csv holds.

    Ratios are times less than dense (below 1: MORE than dense), against the dense run that was measured, or, where none
    was given, against the dense_bytes that each run counts for its own steps.
    """
    rows = []
    for arm in arms:
        dense, config = baseline(arm, arms), arm.config
        accuracy = arm.values("metric")
        gap, gap_half = difference(accuracy, dense.values("metric")) if dense else (math.nan, math.nan)
        rows.append(
            {
                "model": config["choices"]["model"],
                "dataset": config["choices"]["dataset"],
                "workers": arm.runs[0].summary["workers"],
                "batch_size": config["batch_size"],
                "epochs": config["epochs"],
                "arm": arm.label,
                "n": arm.n,
                "seeds": " ".join(map(str, arm.seeds)),
                "accuracy": arm.mean("metric"),
                "accuracy_ci95": half_width(accuracy),
                "accuracy_std": standard_error(accuracy) * math.sqrt(arm.n) if arm.n > 1 else math.nan,
                "best_accuracy": arm.mean("best_metric"),
                "accuracy_minus_dense": gap,
                "accuracy_minus_dense_ci95": gap_half,
                "payload_bytes": arm.mean("payload_bytes"),
                "payload_times_less": _times_less(arm, dense, "payload_bytes", "dense_bytes"),
                "wire_bytes": arm.mean("wire_bytes"),
                "wire_times_less": _times_less(arm, dense, "wire_bytes", "dense_wire_bytes"),
                "rounds": arm.mean("rounds"),
                "rounds_times_less": _times_less(arm, dense, "rounds", "dense_rounds"),
                "seconds": arm.mean("seconds"),
                "seconds_ci95": half_width(arm.values("seconds")),
                "exposed_seconds": arm.mean("exposed_seconds"),
                "comm_seconds": arm.mean("comm_seconds"),
                "seconds_over_dense": _seconds_over(arm, dense),
                "seconds_within_noise": _within_noise(arm, dense, "seconds"),
                "network": config["choices"].get("network", ""),
                "modelled_seconds": arm.mean("modelled_seconds"),
                "modelled_seconds_ci95": half_width(arm.values("modelled_seconds")),
                "modelled_comm_seconds": arm.mean("modelled_comm_seconds"),
                "modelled_seconds_over_dense": _over(arm, dense, "modelled_seconds"),
                "modelled_seconds_within_noise": _within_noise(arm, dense, "modelled_seconds"),
                "baseline": dense.label if dense else "",
            }
        )
    return pd.DataFrame(rows)


def _times_less(arm: Arm, dense: Arm | None, sent: str, own_dense: str) -> float:
    reference = dense.mean(sent) if dense else arm.mean(own_dense)
    return reference / arm.mean(sent) if arm.mean(sent) else math.inf


def _seconds_over(arm: Arm, dense: Arm | None) -> float:
    """Ratio of measured times; NaN where they do not compare: communication measured in one only."""
    if dense is None or bool(arm.values("comm_seconds")) != bool(dense.values("comm_seconds")):
        return math.nan
    return _over(arm, dense, "seconds")


def _over(arm: Arm, dense: Arm | None, column: str) -> float:
    """Ratio of times; NaN where a side has none, or another machine."""
    if dense is None or len({machine(run) for run in (*arm.runs, *dense.runs)}) > 1:
        return math.nan
    return arm.mean(column) / dense.mean(column)


def _within_noise(arm: Arm, dense: Arm | None, column: str) -> bool:
    if dense is None or arm is dense or not arm.values(column) or not dense.values(column):
        return False
    gap, half = difference(arm.values(column), dense.values(column))
    return abs(gap) <= half


def markdown(table: pd.DataFrame) -> str:
    """The table of one setting, for people."""
    columns = [
        "arm",
        "n",
        "accuracy, final",
        "best",
        "payload",
        "vs dense",
        "wire",
        "vs dense",
        "time",
        "vs dense",
        "exchange",
    ]
    measured = table["comm_seconds"].notna().any()
    if measured:
        columns.append("communication")
    modelled = table["modelled_seconds"].notna().any()
    if modelled:
        columns += ["rounds", "modelled time", "vs dense", "modelled comm."]
    cells = [columns]
    for row in table.to_dict("records"):
        line = [
            row["arm"],
            str(row["n"]),
            _percent(row["accuracy"], row["accuracy_ci95"]),
            _percent(row["best_accuracy"]),
        ]
        line += [human_bytes(row["payload_bytes"]), show_times(row["payload_times_less"])]
        line += [human_bytes(row["wire_bytes"]), show_times(row["wire_times_less"])]
        line += [_seconds(row["seconds"], row["seconds_ci95"]), show_ratio(row, "seconds")]
        line += [_if_known(row["exposed_seconds"], "{:.1f} s")]
        if measured:
            line.append(_if_known(row["comm_seconds"], "{:.1f} s"))
        if modelled:
            line += [_if_known(row["rounds"], "{:,.0f}")]
            line += [_seconds(row["modelled_seconds"], row["modelled_seconds_ci95"])]
            line += [show_ratio(row, "modelled_seconds"), _if_known(row["modelled_comm_seconds"], "{:.2f} s")]
        cells.append(line)
    return aligned(cells)


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the heading first, as Markdown that also reads well in a terminal."""
    widths = [max(2, *map(len, column)) for column in zip(*cells, strict=True)]
    rows = [
        [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        for row in cells
    ]
    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def show_times(times_less: float) -> str:
    """9.19 as `9.19x less`, 0.5 as `2x MORE`."""
    if math.isinf(times_less):
        return "nothing sent"
    if times_less == 1:
        return "the same"
    return f"{times_less:.3g}x less" if times_less > 1 else f"{1 / times_less:.3g}x MORE"


def show_ratio(row: Mapping[Any, Any], column: str) -> str:
    """A time over dense's: `0.52x`, or that noise hides it."""
    return "within noise" if row[f"{column}_within_noise"] else _if_known(row[f"{column}_over_dense"], "{:.2f}x")


def _percent(value: float, half: float = math.nan) -> str:
    return f"{100 * value:.2f} %" if math.isnan(half) else f"{100 * value:.2f} ± {100 * half:.2f} %"


def _seconds(value: float, half: float) -> str:
    if math.isnan(value):
        return NONE
    return f"{value:.1f} s" if math.isnan(half) else f"{value:.1f} ± {half:.1f} s"


def _if_known(value: float, form: str) -> str:
    return NONE if math.isnan(value) else form.format(value)
