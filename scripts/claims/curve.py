"""The metric of each arm across the tables of a claim, as a figure and a table, from its records.

Under `curve` a plan states the quantity in which its tables differ, and its value for each table:

    curve: {of: coordinates per bucket, at: {bucket-64: 64, bucket-1024: 1024}, level: [dense]}

Arms under `level` are in only one of these tables, because they do not depend on the quantity; they are drawn as level
lines. The table lists the change of each arm from the first value to the last one, paired by seed.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from accordion_bench.report.compare.intervals import NO_DIFFERENCE, Difference, half_width
from accordion_bench.report.render import ArmLook
from accordion_bench.report.render.tables import aligned
from accordion_bench.runs.metrics import Metric, metric
from scripts.claims.outcome import rates_of
from scripts.claims.plan import Plan
from scripts.claims.summary import at_the_end, axis_name, counted, gap_shown, looks_of_claim, paired, shown


def write_curve(plan: Plan, records: pd.DataFrame, out: Path) -> None:
    """Write curve.md and curve.png of a claim whose plan has a curve; nothing if runs count at one value only.

    Args:
        plan: plan of the claim.
        records: all records.
        out: folder of the claim.
    """
    if plan.curve is None:
        return
    runs = counted_runs(records, plan)
    if runs["at"].nunique() < 2:
        return
    points, judged = curve(runs), metric(runs["metric_name"].iloc[0])
    text = aligned(cells(points, changes(runs, plan.tables[0].against[0]), judged, plan.curve["of"]))
    (out / "curve.md").write_text(text + "\n", encoding="utf-8")
    draw(points, judged, plan.curve, looks_of_claim(plan), out / "curve.png")


def counted_runs(records: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """Return the records of a plan's curve that count and are done, with a column `at`: the value of their table."""
    assert plan.curve is not None
    found = []
    for name, at in plan.curve["at"].items():
        table = plan.table(name)
        runs = counted(records, plan.claim, name, table.all_rates(rates_of(plan, table)))
        found.append(runs[runs.status == "done"].assign(at=at))
    return pd.concat(found, ignore_index=True)


def curve(runs: pd.DataFrame) -> pd.DataFrame:
    """Return one row per arm and value of some runs: columns arm, at, n, metric, half."""
    rows = []
    for (arm, at), found in runs.groupby(["arm", "at"], sort=False):
        values = list(found.metric)
        rows.append({"arm": arm, "at": at, "n": len(values), "metric": found.metric.mean(), "half": half_width(values)})
    return pd.DataFrame(rows)


def changes(runs: pd.DataFrame, baseline: str) -> dict[str, dict[str, Difference]]:
    """Return the change of each arm from the first value to the last one, paired by seed.

    Args:
        runs: runs that count.
        baseline: arm whose change is subtracted from each seed's change in the second column.

    Returns:
        name of a column -> arm -> difference; no second column if the baseline is not at both ends.
    """
    first, last = runs["at"].min(), runs["at"].max()
    by_seed = runs.pivot(index="seed", columns=["at", "arm"], values="metric")
    arms = [arm for arm in by_seed[first] if arm in by_seed[last]]
    if first == last or not arms:
        return {}
    change = (by_seed[last] - by_seed[first])[arms]
    found = {f"{last:,} minus {first:,}": {arm: paired(by_seed[last][arm], by_seed[first][arm]) for arm in arms}}
    others = [arm for arm in arms if arm != baseline]
    if baseline in arms and others:
        found[f"beyond that of {baseline}"] = {arm: paired(change[arm], change[baseline]) for arm in others}
    return found


def cells(
    points: pd.DataFrame, changed: Mapping[str, Mapping[str, Difference]], judged: Metric, of: str
) -> list[list[str]]:
    """Return the points as text: a row per arm, a column per value, then the columns of the changes."""
    places = sorted(points["at"].unique())
    rows = [[f"{at_the_end(judged)}; {of}", *(f"{at:,}" for at in places), *changed]]
    for arm, found in points.groupby("arm", sort=False):
        by_place = {row["at"]: row for row in found.to_dict("records")}
        values = [
            shown(judged, by_place[at]["metric"], by_place[at]["half"]) if at in by_place else "–" for at in places
        ]
        told = [column.get(str(arm), NO_DIFFERENCE) for column in changed.values()]
        rows.append([str(arm), *values, *(gap_shown(judged, one.gap, one.half, one.shown) for one in told)])
    return rows


def draw(
    points: pd.DataFrame, judged: Metric, told: Mapping[str, Any], looks: Mapping[str, ArmLook], file: Path
) -> None:
    """Draw lines with intervals, one per arm; level lines for the arms under `level` in the plan's curve."""
    places = sorted(points["at"].unique())
    figure, panel = plt.subplots(figsize=(5.2, 4.2), layout="constrained")
    for arm, found in points.groupby("arm", sort=False):
        look, found = looks[str(arm)], found.sort_values("at")
        values = [judged.scaled(value) for value in found.metric]
        halves = [0.0 if math.isnan(half) else judged.scaled(half) for half in found.half]
        if arm in told.get("level", ()) and len(places) > 1:
            panel.axhline(values[0], color=look.colour, linestyle=look.line, linewidth=1.2, label=str(arm))
            panel.axhspan(values[0] - halves[0], values[0] + halves[0], color=look.colour, alpha=0.12, linewidth=0)
            continue
        point = {**look.point, "linestyle": look.line, "markersize": 6, "linewidth": 1.4, "capsize": 2}
        panel.errorbar(list(found["at"]), values, halves, label=str(arm), **point)
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, [f"{at:,}" for at in places])
    panel.minorticks_off()
    panel.set_xlabel(told["of"])
    panel.set_ylabel(axis_name(judged))
    panel.grid(alpha=0.25)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)
    plt.close(figure)
