"""Schedules with the bytes of a policy: a fixed start, or random epochs, compared with the policy's choice.

A plan's table names them under `same_bytes`. They are defined for each seed once the policy and its two levels have
run. The number of epochs at the weak level is the one that sends the bytes of the policy's run, k = E (A - S) / (W -
S), rounded. A, W and S are the payloads of the policy's run, of weak's and of strong's; E is its number of epochs. They
use the policy's learning rate.
"""

import random
from collections.abc import Mapping
from typing import Any

from scripts.claims.outcome import Outcome, outcome
from scripts.claims.plan import Cell, Plan, Table


def same_bytes_cells(plan: Plan, table: Table, rates: Mapping[str, float]) -> list[Cell]:
    """Return the runs of a table's schedules, for the seeds whose policy, weak and strong have run.

    Args:
        plan, table: claim and table.
        rates: arm -> chosen rate.
    """
    told = table.same_bytes
    if told is None:
        return []
    trio = [told["of"], *told["between"]]
    done = {(found.cell.arm, found.cell.seed): found for found in map(outcome, plan.count_cells(table, rates))}
    cells = []
    for seed in table.seeds:
        of_seed = [done.get((arm, seed)) for arm in trio]
        if not all(found is not None and found.status == "done" for found in of_seed):
            continue
        policy, weak, strong = (found for found in of_seed if found is not None)
        for arm, how in told["arms"].items():
            critical = ranges(chosen_epochs(how, weak_epochs(policy, weak, strong), _epochs(policy), seed))
            typed = [*told["overrides"], f"adaptive.schedule.critical={critical}".replace(" ", "")]
            cells.append(plan.cell(table, arm, "count", rates[told["of"]], seed, typed))
    return cells


def weak_epochs(policy: Outcome, weak: Outcome, strong: Outcome) -> int:
    """Return the number of epochs at the weak level that sends the policy's bytes; the rest are at the strong one."""
    a, w, s = (_payload(found) for found in (policy, weak, strong))
    return round(_epochs(policy) * (a - s) / (w - s))


def chosen_epochs(how: str, count: int, epochs: int, seed: int) -> list[int]:
    """Return the weak epochs: `start`: the first ones; `random`: drawn by the seed of the run."""
    drawn = {"start": range(count), "random": random.Random(seed).sample(range(epochs), count)}
    return sorted(drawn[how])


def ranges(epochs: list[int]) -> list[list[int]]:
    """Return [[first, end], ...] of increasing epochs: [0, 1, 4] -> [[0, 2], [4, 5]]."""
    found: list[list[int]] = []
    for epoch in epochs:
        if found and found[-1][1] == epoch:
            found[-1][1] = epoch + 1
        else:
            found.append([epoch, epoch + 1])
    return found


def _summary(found: Outcome) -> Mapping[str, Any]:
    assert found.run is not None
    return found.run.summary


def _payload(found: Outcome) -> float:
    return float(_summary(found)["payload_bytes"])


def _epochs(found: Outcome) -> int:
    return int(_summary(found)["epochs"])
