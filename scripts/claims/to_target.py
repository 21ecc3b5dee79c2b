"""Time to the target behind links: steps until it was reached x the time of a step there, beside a baseline's.

Training is the same behind any link, bit for bit. It therefore runs once, several runs at a time, and only the time of
a step is measured behind links, on an idle machine. The target is the value that every seed of one arm has reached at
some evaluation: the worst of their best values. A plan's table names that arm, the baseline, and the tables of the same
claim with a lab:

    to_target: {of: dense, baseline: dense_bf16, links: {hosts-2-100mbit: 100 Mbit/s, hosts-2-1gbit: 1 Gbit/s}}

`links` contains the name of each link in figures, and the plan's `names` those of the arms. An arm of those tables
represents the one of the same name, with any engine. For evaluations within an epoch set a `target` that no run
reaches. If some arms train longer in a separate table, `beside` names the table that has the arm of the target and the
baseline.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from accordion_bench.options.units import digits
from accordion_bench.report.compare.beside import all_looks, first_row
from accordion_bench.report.compare.intervals import half_width
from accordion_bench.report.read import Run
from accordion_bench.report.render import ArmLook
from accordion_bench.report.render.tables import aligned
from accordion_bench.runs.metrics import Metric, metric
from scripts.claims.outcome import Outcome, outcome, rates_of, runs_by_arm
from scripts.claims.plan import Plan, Table
from scripts.claims.summary import link_steps, looks_of_claim

NOISE = (
    "Sooner: the mean over the seeds of the ratio. Intervals are over the seeds and hold the noise of the steps to the "
    "target, not that of the measured time of a step."
)


def write_to_target(plan: Plan, table: Table, outcomes: Sequence[Outcome], records: pd.DataFrame, out: Path) -> None:
    """Write to_target.md, to_target.png (curves) and times.png of a table whose plan asks for them.

    Nothing is written where no run that counts is done.

    Args:
        plan, table: claim and table.
        outcomes: runs of the table.
        records: all records.
        out: folder of the table.
    """
    if table.to_target is None:
        return
    done = runs_by_arm([*_beside(plan, table.to_target), *outcomes])
    if table.to_target["of"] not in done:
        return
    step = {link: link_steps(records, plan.claim, link) for link in table.to_target["links"]}
    target = reached_by_all(done[table.to_target["of"]])
    steps = {arm: steps_to_target(runs, target) for arm, runs in done.items()}
    text = aligned(cells(steps, step, table.to_target["baseline"]))
    judged = _judged(done[table.to_target["of"]])
    note = f"Target: {judged.show(target)}, validation. {NOISE}"
    (out / "to_target.md").write_text(f"{text}\n\n{note}\n", encoding="utf-8")
    looks = looks_of_claim(plan)
    titled = {table.to_target["links"][link]: seconds for link, seconds in step.items()}
    draw(done, titled, target, looks, out / "to_target.png", plan.names)
    draw_times(steps, titled, table.to_target["baseline"], looks, out / "times.png", plan.names)


def _beside(plan: Plan, told: Mapping[str, Any]) -> list[Outcome]:
    """Return the runs that count of the target's arm and of the baseline, if another table has them."""
    if "beside" not in told:
        return []
    other = plan.table(told["beside"])
    cells = plan.count_cells(other, rates_of(plan, other))
    return [outcome(cell) for cell in cells if cell.arm in (told["of"], told["baseline"])]


def reached_by_all(runs: Mapping[int, Run]) -> float:
    """Return the worst of the best values of some runs, over all evaluations."""
    judged = _judged(runs)
    best, worst = (max, min) if judged.higher_is_better else (min, max)
    return worst(best(seen(run)[1]) for run in runs.values())


def _judged(runs: Mapping[int, Run]) -> Metric:
    return metric(next(iter(runs.values())).summary["metric_name"])


def steps_to_target(runs: Mapping[int, Run], target: float) -> dict[int, int | None]:
    """Return seed -> steps until the first evaluation at which the target was reached; None = not reached."""
    judged, found = _judged(runs), {}
    for seed, run in runs.items():
        row = first_row(run.rows, judged, run.summary["selected_by"], target)
        found[seed] = None if row is None else int(row["step"])
    return found


def cells(
    steps: Mapping[str, Mapping[int, int | None]], step: Mapping[str, Mapping[str, float]], baseline: str
) -> list[list[str]]:
    """Return the table as text: a row per arm, and for each link the time of a step, the time to the target, and the
    speed-up over the baseline.

    Args:
        steps: arm -> seed -> steps to the target.
        step: link -> arm -> seconds of a step.
        baseline: arm.
    """
    rows = [["arm", "reached", "steps"]]
    for link in step:
        rows[0] += [f"a step, {link}", f"to the target, {link}", f"sooner than {baseline}, {link}"]
    for arm, by_seed in steps.items():
        reached = {seed: count for seed, count in by_seed.items() if count is not None}
        row = [arm, f"{len(reached)} of {len(by_seed)}", _mean(list(reached.values()), "{:,.0f}".format)]
        for seconds in step.values():
            one = seconds.get(arm, math.nan)
            row += ["–" if math.isnan(one) else f"{digits(one)} s"]
            row += [_mean([one * count for count in reached.values()], digits, " s")]
            row += [
                _mean(sooner(reached, steps.get(baseline, {}), one, seconds.get(baseline, math.nan)), "{:.2f}".format)
            ]
        rows.append(row)
    return rows


def sooner(
    own: Mapping[int, int | None], baseline: Mapping[int, int | None], step: float, of_baseline: float
) -> list[float]:
    """Return the speed-up of an arm's time to the target, seed by seed, for seeds that reached it in both.

    Args:
        own, baseline: seed -> steps to the target.
        step, of_baseline: seconds of a step.
    """
    both = [(own[seed], baseline[seed]) for seed in own if own[seed] and baseline.get(seed)]
    return [theirs * of_baseline / (mine * step) for mine, theirs in both if mine and theirs]


def _mean(values: Sequence[float], how: Callable[[float], str], unit: str = "") -> str:
    """Return `5.10 ± 0.21`; – if empty. Equal steps of all seeds have no interval, because evaluations are rare."""
    if not values or any(map(math.isnan, values)):
        return "–"
    half = half_width(values) if len(set(values)) > 1 else math.nan
    return how(sum(values) / len(values)) + ("" if math.isnan(half) else f" ± {digits(half, 2)}") + unit


def _times(ratios: Sequence[float]) -> str:
    """Return `8.1 ± 0.8 x`, shortened for a figure."""
    mean = sum(ratios) / len(ratios)
    places = 1 if mean >= 1 else 2
    half = half_width(ratios) if len(set(ratios)) > 1 else math.nan
    return f"{mean:.{places}f}" + ("" if math.isnan(half) else f" ± {half:.{places}f}") + " x"


def draw(
    done: Mapping[str, Mapping[int, Run]],
    step: Mapping[str, Mapping[str, float]],
    target: float,
    looks: Mapping[str, ArmLook],
    file: Path,
    names: Mapping[str, str],
) -> None:
    """Draw the metric against the time behind each link, a line per seed, and the target."""
    figure, panels = plt.subplots(
        1, len(step), figsize=(3.8 * len(step), 4.0), sharey=True, squeeze=False, layout="constrained"
    )
    judged = _judged(next(iter(done.values())))
    for panel, (link, seconds) in zip(panels[0], step.items(), strict=True):
        for arm, runs in done.items():
            if arm not in seconds:
                continue
            style: dict[str, Any] = {"color": looks[arm].colour, "linestyle": looks[arm].line, "linewidth": 1.2}
            for number, run in enumerate(runs.values()):
                counts, values = seen(run)
                times, shown = [count * seconds[arm] for count in counts], [judged.scaled(value) for value in values]
                panel.plot(times, shown, label=names.get(arm, arm) if number == 0 else None, **style)
        panel.axhline(judged.scaled(target), color="0.4", linewidth=0.8, label="target")
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_title(link, fontsize=10)
        panel.set_xlabel("steps x measured time of a step [s]")
        panel.grid(alpha=0.25)
    panels[0, 0].set_ylabel(f"{judged.words}, validation")
    drawn = panels[0, 0].get_legend_handles_labels()
    figure.legend(*drawn, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def draw_times(
    steps: Mapping[str, Mapping[int, int | None]],
    step: Mapping[str, Mapping[str, float]],
    baseline: str,
    looks: Mapping[str, ArmLook],
    file: Path,
    names: Mapping[str, str],
) -> None:
    """Draw the time to the target behind each link: a point for each seed that reached it, and the speed-up.

    Args:
        steps: arm -> seed -> steps to the target.
        step: name of a link -> arm -> seconds of a step.
        baseline: arm with which the others are compared.
        looks: styles of the arms.
        file: output picture.
        names: names of arms that differ from their own.
    """
    arms = [arm for arm in steps if all(arm in seconds for seconds in step.values())]
    size = (4.3 * len(step) + 1.6, 0.42 * len(arms) + 1.1)
    figure, panels = plt.subplots(1, len(step), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for panel, (link, seconds) in zip(panels[0], step.items(), strict=True):
        for row, arm in enumerate(arms):
            times = [count * seconds[arm] for count in steps[arm].values() if count is not None]
            if not times:
                continue
            panel.plot(times, [row] * len(times), **looks[arm].point, markersize=7)
            ratios = sooner(steps[arm], steps[baseline], seconds[arm], seconds[baseline])
            if arm != baseline and ratios:
                panel.annotate(_times(ratios), (max(times), row), (9, 0), textcoords="offset points", va="center")
        panel.set_title(f"behind {link}", fontsize=11)
        panel.set_xlim(0, 1.4 * panel.get_xlim()[1])
        panel.margins(y=0.1)
        panel.set_xlabel("time to the target [s]")
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.grid(alpha=0.25)
    panels[0, 0].set_yticks(range(len(arms)), [names.get(arm, arm) for arm in arms])
    panels[0, 0].invert_yaxis()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def seen(run: Run) -> tuple[list[int], list[float]]:
    """(steps, metric) of all looks and ends of epochs."""
    by, rows = run.summary["selected_by"], all_looks(run.rows)
    return [row["step"] for row in rows], [row[by] for row in rows]
