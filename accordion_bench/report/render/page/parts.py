"""The numbers of the other figures of a setting: time to target, where a step's time goes, levels."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from accordion_bench.options.units import digits
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.intervals import half_width
from accordion_bench.report.compare.target import Reached, clock_of, first_look, mean, reached, target_of
from accordion_bench.report.compare.timed import communicates
from accordion_bench.report.render.figures.breakdown import EXCHANGE, STEP, parts, tells_times
from accordion_bench.report.render.figures.levels import MAPS
from accordion_bench.report.render.level_grid import level_grid, with_levels
from accordion_bench.report.render.page.packed import packed, rows, thinned
from accordion_bench.runs.metrics import metric, split_of


def to_target(arms: Sequence[Arm]) -> dict[str, Any] | None:
    """Seconds until the target; None where the runs have no common one, or none reached it."""
    target, clock = target_of(arms), clock_of(arms)
    if target is None or len(arms) < 2:
        return None
    found = [reached(arm, target, clock) for arm in arms]
    if not any(own.timed for own in found):
        return None
    value = metric(arms[0].metric).show(target)
    how = "measured" if clock == "seconds" else "modelled"
    return {
        "title": f"Time to {value}",
        "name": f"{how} time [s]",
        "note": f"To the {first_look(arms)} that reached {value} in the {split_of(arms[0].selected_by)} split.",
        "rows": [
            {
                "mean": mean(own.timed) if own.timed else None,
                "half": half_width(own.timed) if len(own.timed) > 1 else None,
                "beside": _unless_all(own, arm.n),
            }
            for arm, own in zip(arms, found, strict=True)
        ],
    }


def _unless_all(own: Reached, seeds: int) -> str:
    """How many seeds have come there, where not all have."""
    if not own.timed:
        return own.untimed
    return "" if len(own.timed) == seeds else f"{len(own.timed)} of {seeds}"


def step_times(arms: Sequence[Arm]) -> dict[str, Any] | None:
    """Milliseconds of a step by part, None for an arm that does not tell them; None where no arm does."""
    if any("compute_seconds" not in arm.runs[0].rows[-1] for arm in arms if tells_times(arm)):
        return None
    found = [{part: 1000 * s for part, s in parts(arm).items()} if tells_times(arm) else None for arm in arms]
    used = {part: STEP[part] for part in STEP if any(own[part] for own in found if own)}
    if not used:
        return None
    return {
        "parts": [
            {"name": part, "colour": colour, "values": [own and own[part] for own in found]}
            for part, colour in used.items()
        ],
        "beside": [_beside(own) for own in found],
        "note": _told(arms),
    }


def _beside(own: dict[str, float] | None) -> str:
    """What an exchange has done, hidden or not: it is no part of the bar; of an arm without times that it has none."""
    if own is None:
        return "not told"
    done = [f"{part} {digits(own[part])} ms" for part in EXCHANGE if own[part]]
    return f"exchange in all, hidden or not: {', '.join(done)}" if done else ""


def _told(arms: Sequence[Arm]) -> str:
    text = "Mean over the steps after the first, and over the seeds."
    if any(not arm.attached and not communicates(arm) for arm in arms):
        text += " Workers share a process: all of them are in a step, and no communication."
    return text


def levels(arms: Sequence[Arm], most: int) -> list[dict[str, Any]]:
    """Level maps of a few arms, of their first seed."""
    return [_level_map(list(arms).index(arm), arm, arms, most) for arm in with_levels(arms)[:MAPS]]


def _level_map(number: int, arm: Arm, arms: Sequence[Arm], most: int) -> dict[str, Any]:
    grid, run = level_grid(arm, arms), arm.runs[0]
    kept = thinned(len(run.rows), most)
    return {
        "arm": number,
        "seed": str(run.seed),
        "layers": grid.layers,
        "epochs": packed(np.array(kept) + 1),
        "names": grid.names,
        "colours": grid.colours,
        "places": rows([[np.nan if (place := row[epoch]) is None else place for epoch in kept] for row in grid.places]),
    }
