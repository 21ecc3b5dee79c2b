"""The metric of each arm across the tables of a claim, as a figure and a table, from its records.

A plan says under `curve` what its tables differ in, and where each of them stands:

    curve: {of: coordinates per bucket, at: {bucket-64: 64, bucket-1024: 1024}}

An arm that is in one of these tables alone, as a baseline that does not depend on it, is a level line.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

from accordion_bench.report.compare.intervals import half_width
from accordion_bench.report.render.looks import Look
from accordion_bench.report.render.table import aligned
from accordion_bench.runs.metrics import Metric, metric
from scripts.claims.outcome import rates_of
from scripts.claims.plan import Plan
from scripts.claims.summary import at_the_end, axis_name, counted, looks_of_claim, shown


def write_curve(plan: Plan, records: pd.DataFrame, out: Path) -> None:
    """curve.md and curve.png of a claim whose plan has one; nothing where no run that counts is done.

    Args:
        plan: of the claim.
        records: all of them.
        out: folder of the claim.
    """
    if plan.curve is None:
        return
    points = curve(records, plan)
    if points.empty:
        return
    judged = metric(points["metric_name"].iloc[0])
    (out / "curve.md").write_text(aligned(cells(points, judged, plan.curve["of"])) + "\n", encoding="utf-8")
    draw(points, judged, plan.curve["of"], looks_of_claim(plan), out / "curve.png")


def curve(records: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """One row per arm and table of a plan's curve.

    Args:
        records: all of them.
        plan: with a curve.

    Returns:
        columns arm, at, n, metric_name, metric, half; only runs that count and are done.
    """
    assert plan.curve is not None
    rows = []
    for name, at in plan.curve["at"].items():
        table = plan.table(name)
        runs = counted(records, plan.claim, name, table.all_rates(rates_of(plan, table)))
        for arm, of_arm in runs[runs.status == "done"].groupby("arm", sort=False):
            values = list(of_arm.metric)
            told = {"metric_name": of_arm.metric_name.iloc[0], "metric": of_arm.metric.mean()}
            rows.append({"arm": arm, "at": at, "n": len(values), **told, "half": half_width(values)})
    return pd.DataFrame(rows)


def cells(points: pd.DataFrame, judged: Metric, of: str) -> list[list[str]]:
    """The points as text: a row per arm, a column per table."""
    places = sorted(points["at"].unique())
    rows = [[f"{at_the_end(judged)}; {of}", *(f"{at:,}" for at in places)]]
    for arm, found in points.groupby("arm", sort=False):
        by_place = {row["at"]: row for row in found.to_dict("records")}
        values = [
            shown(judged, by_place[at]["metric"], by_place[at]["half"]) if at in by_place else "–" for at in places
        ]
        rows.append([str(arm), *values])
    return rows


def draw(points: pd.DataFrame, judged: Metric, of: str, looks: Mapping[str, Look], file: Path) -> None:
    """Lines with intervals, one per arm; level lines for arms of one table."""
    places = sorted(points["at"].unique())
    figure, panel = plt.subplots(figsize=(5.2, 4.2), layout="constrained")
    for arm, found in points.groupby("arm", sort=False):
        look, found = looks[str(arm)], found.sort_values("at")
        values = [judged.scaled(value) for value in found.metric]
        halves = [0.0 if math.isnan(half) else judged.scaled(half) for half in found.half]
        if len(places) > 1 and len(found) == 1:
            panel.axhline(values[0], color=look.colour, linestyle=look.line, linewidth=1.2, label=str(arm))
            panel.axhspan(values[0] - halves[0], values[0] + halves[0], color=look.colour, alpha=0.12, linewidth=0)
            continue
        point = {**look.point, "linestyle": look.line, "markersize": 6, "linewidth": 1.4, "capsize": 2}
        panel.errorbar(list(found["at"]), values, halves, label=str(arm), **point)
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, [f"{at:,}" for at in places])
    panel.minorticks_off()
    panel.set_xlabel(of)
    panel.set_ylabel(axis_name(judged))
    panel.grid(alpha=0.25)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)
    plt.close(figure)
