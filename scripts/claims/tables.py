"""Tables of the learning rates that were tried."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from accordion_bench.report.render.tables import aligned
from accordion_bench.runs.metrics import metric
from scripts.claims.outcome import Outcome
from scripts.claims.plan import Table


def write_rates(table: Table, outcomes: Sequence[Outcome], chosen: Mapping[str, float], file: Path) -> None:
    """Write one row per arm: the validation metric at each rate, the chosen one in bold.

    Args:
        table: table of the rates.
        outcomes: its tuning runs, and possibly others.
        chosen: arm -> rate.
        file: output file.
    """
    if table.rates_from is not None:
        text = f"As in {table.rates_from}."
    elif not table.tunes:
        text = f"{table.rates[0]:g} for all."
    else:
        tried = {(found.cell.arm, found.cell.rate): found for found in outcomes if found.cell.phase == "tune"}
        rows = [
            [arm, *(_shown(rate, tried.get((arm, rate)), chosen.get(arm)) for rate in table.grid(arm))]
            for arm in table.arms
        ]
        longest = max(map(len, rows))  # an arm may have a grid of its own
        filled = [row + [""] * (longest - len(row)) for row in [["arm", "from its lowest rate to its highest"], *rows]]
        text = f"Seed {table.tune_seed}, in no mean; the chosen rate in bold.\n\n{aligned(filled)}"
    file.write_text(f"# Learning rates of {table.name}\n\n{text}\n", encoding="utf-8")


def _shown(rate: float, found: Outcome | None, chosen: float | None) -> str:
    """Return `0.003: 2.41`, in bold if the rate was chosen."""
    if found is None or found.run is None or found.status != "done":
        return f"{rate:g}: {'not run' if found is None else found.status}"
    text = f"{rate:g}: {metric(found.run.summary['metric_name']).show(found.chosen_by)}"
    return f"**{text}**" if rate == chosen else text
