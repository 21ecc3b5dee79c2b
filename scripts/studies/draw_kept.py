"""python -m scripts.studies.draw_kept: figures of results/compressors and results/local_methods, from their tables.

Their runs are not stored, so curves cannot be drawn again. Figures have one row per arm, dense first, then by
decreasing bytes sent.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from accordion_bench.options.units import human_bytes
from accordion_bench.report.render import looks_of
from accordion_bench.report.render.figures.finals import name_rows, sheet_of_rows
from accordion_bench.report.render.figures.sheet import POINTS, end_marker, interval_bar, limits_of_means, save, styled
from accordion_bench.runs.metrics import metric
from scripts.few_colours import reduce_colours

DRAWN = {"compressors": "comparison", "local_methods": "rows-{dataset}"}  # folder of results -> name of its figures


def main() -> None:
    """Draw all figures."""
    argparse.ArgumentParser("scripts.studies.draw_kept", description=__doc__).parse_args()
    for folder, name in DRAWN.items():
        kept = Path("results") / folder
        for dataset, rows in pd.read_csv(kept / "table.csv").groupby("dataset"):
            with styled():
                drawn = save(draw(rows), kept / name.format(dataset=dataset))
            reduce_colours(drawn)
            print(drawn)


def draw(table: pd.DataFrame) -> Figure:
    """Draw the accuracy of each arm after the last epoch with its interval.

    Args:
        table: table of one setting, as made by `tidy`.
    """
    ordered = table.assign(other=table.arm != "dense").sort_values(
        ["other", "wire_bytes"], ascending=[True, False], kind="stable"
    )
    rows = ordered.to_dict("records")
    of = metric("accuracy")
    means = [(of.scaled(row["accuracy"]), of.scaled(row["accuracy_ci95"])) for row in rows]
    names = [f"{row['arm']}   {human_bytes(row['wire_bytes']):>8}" for row in rows]
    sheet = sheet_of_rows(names)
    (axes,) = sheet.panels
    name_rows(axes, names)
    axes.set_xlim(limits_of_means(means, of, POINTS, max(mean for mean, _ in means)))
    looks = looks_of([(row["arm"], family(row["arm"]), row["arm"] == "dense") for row in rows])
    for y, ((mean, half), look, row) in enumerate(zip(means, looks, rows, strict=True)):
        interval_bar(axes, (mean, y), None if math.isnan(half) else half, look.colour, across=True)
        end_marker(axes, (mean, y), look, f"{mean:.2f} ± {half:.2f} %", across=True)
        if row["arm"] == "dense":
            axes.axvline(mean, color="black", linewidth=0.6, zorder=1)
            axes.axvspan(mean - half, mean + half, color="black", alpha=0.07, linewidth=0, zorder=0)
    axes.set_ylabel("method and bytes sent")
    axes.set_xlabel("test accuracy [%]")
    return sheet.finish(_note(rows))


def family(arm: str) -> str:
    """Return the method without its level: `local SGD` of `local SGD, H 4`."""
    return arm.partition(",")[0].rstrip(" %0123456789")


def _note(rows: Sequence[dict[str, object]]) -> str:
    first, counts = rows[0], sorted({str(row["n"]) for row in rows})
    return (
        f"{first['model']} on {first['dataset']}, {first['workers']} workers x {first['batch_size']} samples, "
        f"{first['epochs']} epochs; n = {'/'.join(counts)}; after the last epoch; bars: Student's 95 % t-interval, "
        "arrows: it goes on outside, or the arm is there; beside the name: sent per worker; line and band: dense."
    )


if __name__ == "__main__":
    main()
