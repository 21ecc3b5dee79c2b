"""A table and a figure of a claim's table, from its records.

They contain each arm's metric with its interval, its differences to the arms that the plan names under `against` (else
to dense) and to its control of one worker, and the bytes that its link sends. If the plan names a table with a lab
under `links`, they also contain the time of the whole training behind these links: steps x the measured time of a step
there. There are no other times, because the runs share the machine. A table with a lab has no summary: of its few steps
only times are meaningful.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.ticker import LogLocator, NullLocator

from accordion_bench.options.units import human_bytes
from accordion_bench.report.compare.intervals import NO_DIFFERENCE, Difference, difference, half_width
from accordion_bench.report.render import ArmLook, looks_of
from accordion_bench.report.render.tables import aligned
from accordion_bench.runs.metrics import Metric, metric
from scripts.claims.outcome import rates_of
from scripts.claims.plan import Plan, Table

CONTROL = "_one_worker"  # ends the name of an arm's control


def write_summary(plan: Plan, table: Table, records: pd.DataFrame, out: Path) -> None:
    """Write summary.md, summary.csv and, for several arms, summary.png of a table with a completed run that counts.

    Args:
        plan, table: claim and table.
        records: all records.
        out: folder of the table.
    """
    rows = summary(records, plan.claim, table, table.all_rates(rates_of(plan, table)))
    judged = metric(rows["metric_name"].dropna().iloc[0])
    (out / "summary.md").write_text(aligned(cells(rows, judged, table.against)) + "\n", encoding="utf-8")
    rows.to_csv(out / "summary.csv", index=False, float_format="%.6g")
    if len(rows) > 1:
        draw(rows, judged, looks_of_claim(plan), out / "summary.png")


def looks_of_claim(plan: Plan) -> dict[str, ArmLook]:
    """Return a style for each arm of a claim, the same in the figures of all its tables."""
    arms = sorted({arm for table in plan.tables for arm in table.all_arms})
    baselines = {table.against[0] for table in plan.tables}
    return dict(zip(arms, looks_of([(arm, arm, arm in baselines) for arm in arms]), strict=True))


def counted(records: pd.DataFrame, claim: str, table: str, chosen: Mapping[str, float]) -> pd.DataFrame:
    """Return the records of a table that count: at the currently chosen rate, and of a repeated seed the last one."""
    of = records[(records.claim == claim) & (records.table == table) & (records.phase == "count")]
    return of[of.rate == of.arm.map(chosen)].drop_duplicates(["arm", "seed"], keep="last")


def summary(records: pd.DataFrame, claim: str, table: Table, chosen: Mapping[str, float]) -> pd.DataFrame:
    """Return one row per arm of a table, in the plan's order, for runs that count only.

    Args:
        records: all records, with at least one completed run that counts.
        claim, table: names of the claim and the table.
        chosen: arm -> rate; runs at another rate, which was the best of a smaller grid, and arms without a rate are
            omitted.

    Returns:
        columns arm, n, rate, metric_name, metric, half, test, then ARM_gap, ARM_gap_half, ARM_shown of each arm that
        others are compared with and `control` of the control, wire_bytes, rounds, steps, link_seconds; NaN where there
        is none. Of an arm that has only diverged n is 0.
    """
    of = counted(records, claim, table.name, chosen)
    step = link_steps(records, claim, table.links)
    rows, ran = [], set(of.arm)
    for arm in filter(ran.__contains__, table.all_arms):
        runs = of[of.arm == arm]
        done = runs[runs.status == "done"].sort_values("seed")
        if done.empty:
            rows.append({"arm": arm, "n": 0, "diverged": len(runs)})
            continue
        others = {**{other: other for other in table.against}, "control": f"{arm}{CONTROL}"}
        gaps = [_told(name, _against(done, of, other)) for name, other in others.items()]
        rows.append(
            {
                "arm": arm,
                "n": len(done),
                "diverged": len(runs) - len(done),
                "rate": done.rate.iloc[0],
                "metric_name": done.metric_name.iloc[0],
                "metric": done.metric.mean(),
                "half": half_width(list(done.metric)),
                "test": done.test_at_best.mean(),
                **{column: value for gap in gaps for column, value in gap.items()},
                "wire_bytes": done.wire_bytes.mean(),
                "rounds": done.rounds.mean(),
                "steps": done.steps.mean(),
                "link_seconds": step.get(arm, math.nan) * done.steps.mean(),
            }
        )
    return pd.DataFrame(rows)


def link_steps(records: pd.DataFrame, claim: str, links: str | None) -> dict[str, float]:
    """Return the seconds of a step of each arm behind links: the mean over seeds of the last run of each.

    The first step is warm-up and in no run's time. It makes no average, so a local method's step is overestimated by 1
    / steps of its communication.
    """
    found = records[(records.claim == claim) & (records.table == links) & (records.status == "done")]
    last = found.drop_duplicates(["arm", "seed"], keep="last")
    return {str(arm): float((runs.seconds / (runs.steps - 1)).mean()) for arm, runs in last.groupby("arm")}


def _against(done: pd.DataFrame, of: pd.DataFrame, other: str) -> Difference:
    """Return an arm's metric minus another's."""
    theirs = of[(of.arm == other) & (of.status == "done") & (of.arm != done.arm.iloc[0])]
    return paired(done.set_index("seed").metric, theirs.set_index("seed").metric)


def paired(a: pd.Series, b: pd.Series) -> Difference:
    """Return mean(a) - mean(b) over the seeds, their index, that both have."""
    both = pd.concat([a, b], axis="columns", keys=["a", "b"]).dropna().sort_index()
    seeds = tuple(both.index)
    return difference(list(both.a), list(both.b), (seeds, seeds)) if seeds else NO_DIFFERENCE


def _told(name: str, found: Difference) -> dict[str, float | bool | None]:
    return {f"{name}_gap": found.gap, f"{name}_gap_half": found.half, f"{name}_shown": found.shown}


def cells(rows: pd.DataFrame, judged: Metric, against: Sequence[str]) -> list[list[str]]:
    """Return the table as text; an empty column is omitted."""
    names = {other: other for other in against} | {"control": "one worker"}
    names = {name: words for name, words in names.items() if rows[f"{name}_gap"].notna().any()}
    behind_links = rows.link_seconds.notna().any()
    head = ["arm", "n", "rate", at_the_end(judged), "test, best epoch", *(f"minus {words}" for words in names.values())]
    head += ["sent per worker", "rounds", *(["measured time"] if behind_links else [])]
    found = [head]
    for row in rows.to_dict("records"):
        if not row["n"]:
            found.append([row["arm"], "0", *["diverged"], *["–"] * (len(head) - 3)])
            continue
        measured = "–" if math.isnan(row["link_seconds"]) else f"{row['link_seconds']:.0f} s"
        found.append(
            [
                row["arm"],
                f"{row['n']}" + (f" ({row['diverged']} diverged)" if row["diverged"] else ""),
                f"{row['rate']:g}",
                shown(judged, row["metric"], row["half"]),
                _number(judged, row["test"]),
                *(_gap(judged, row, name) for name in names),
                human_bytes(row["wire_bytes"]),
                f"{row['rounds']:,.0f}",
                *([measured] if behind_links else []),
            ]
        )
    return found


def _gap(judged: Metric, row: dict[Any, Any], name: str) -> str:
    return gap_shown(judged, row[f"{name}_gap"], row[f"{name}_gap_half"], row[f"{name}_shown"])


def gap_shown(judged: Metric, gap: float, half: float, is_shown: bool | None) -> str:
    """Return `+0.12 ± 0.03`; with `not shown` if the interval contains 0, a dash if there is no difference."""
    if math.isnan(gap):
        return "–"
    text = f"{_number(judged, gap, '+')}{_half(judged, half)}"
    return text if is_shown or math.isnan(half) else f"{text}, not shown"


def at_the_end(judged: Metric) -> str:
    """Return the name of the last epoch's metric: for images on the test split, for text on the validation split."""
    return f"{judged.words}, {'test' if judged.percent else 'validation'}"


def axis_name(judged: Metric) -> str:
    """Return the axis label, such as `accuracy, test, after training [%]`."""
    return f"{at_the_end(judged)}, after training" + (f" [{judged.unit}]" if judged.unit else "")


def shown(judged: Metric, value: float, half: float) -> str:
    """Return `92.10 ± 0.31`: a mean and its interval."""
    return f"{_number(judged, value)}{_half(judged, half)}"


def _half(judged: Metric, half: float) -> str:
    return "" if math.isnan(half) else f" ± {_number(judged, half)}"


def _number(judged: Metric, value: float, sign: str = "") -> str:
    """Format percent and points with two digits, all other numbers with three."""
    return f"{judged.scaled(value):{sign}.{2 if judged.percent else 3}f}"


def draw(rows: pd.DataFrame, judged: Metric, looks: Mapping[str, ArmLook], file: Path) -> None:
    """Draw the metric against the bytes of a link and against the time behind links, with intervals."""
    sends = rows[(rows.n > 0) & (rows.wire_bytes > 0)].reset_index(drop=True)
    axes = [("wire_bytes", "sent per worker [bytes, log scale]")]
    if sends.link_seconds.notna().any():
        axes += [("link_seconds", "measured steps behind links x steps [s]")]
    size = (max(5.2, 3.6 * len(axes)), 4.2)
    figure, panels = plt.subplots(1, len(axes), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for panel, (column, name) in zip(panels[0], axes, strict=True):
        for row in sends.to_dict("records"):
            half = 0.0 if math.isnan(row["half"]) else judged.scaled(row["half"])
            point = {**looks[row["arm"]].point, "markersize": 6, "label": row["arm"]}
            panel.errorbar(row[column], judged.scaled(row["metric"]), half, **point)
        panel.set_xscale("log")
        few = sends[column].max() < 50 * sends[column].min()  # decades: names between them would overlap
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        panel.xaxis.set_major_formatter("{x:g}" if column != "wire_bytes" else lambda sent, _: human_bytes(sent))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xlabel(name)
        panel.grid(alpha=0.25)
    panels[0, 0].set_ylabel(axis_name(judged))
    drawn = panels[0, 0].get_legend_handles_labels()
    figure.legend(*drawn, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)
    plt.close(figure)
