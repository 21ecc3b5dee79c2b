"""Runs that go on, beside the arms that they will be compared with: curves to look at, in no mean."""

import json
from collections.abc import Sequence
from dataclasses import replace

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.grouping import group
from accordion_bench.report.read.load import Run
from accordion_bench.report.read.running import how_far, so_far


def arm_so_far(run: Run) -> Arm | None:
    """A running run as an arm of its own, which says how far it is; None where its rows are not understood.

    Args:
        run: for which `read.running.is_running`.
    """
    try:
        arms, _ = group([so_far(run)])
    except Exception:  # of a stranger's run: it must not end the report of the others
        return None
    return replace(arms[0], label=f"{arms[0].label}, seed {run.seed}: {how_far(run)}") if arms else None


def beside(parts: Sequence[Sequence[Arm]], running: Sequence[Arm]) -> list[list[Arm]]:
    """The running arms of each setting; those of settings in which nothing has finished, after them, each its own.

    Args:
        parts: the finished arms of each setting.
        running: one per run, see `arm_so_far`.
    """
    doors = [_doors(arms[0]) for arms in parts]
    found: list[list[Arm]] = [[] for _ in parts]
    for arm in running:
        home = next((i for i, door in enumerate(doors) if door & _doors(arm)), len(doors))
        if home == len(doors):
            doors.append(_doors(arm))
            found.append([])
        found[home].append(arm)
    return found


def _doors(arm: Arm) -> set[tuple[str, ...]]:
    """What leads into the setting of an arm."""
    return set(map(tuple, json.loads(arm.setting)))
