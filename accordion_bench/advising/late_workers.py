"""Option `--simulate` of the advice: simulate its fastest methods with slow workers and link outages."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accordion_bench.advising.advice import Advice, AdviceRow
from accordion_bench.advising.cluster import Cluster
from accordion_bench.advising.disturbances import Disturbances, Outage
from accordion_bench.advising.predict import MethodCost
from accordion_bench.advising.simulation import Simulated, SimulatedRun, simulate
from accordion_bench.advising.step_times import StepTimes
from accordion_bench.advising.text import aligned, unit_of
from accordion_bench.advising.verdict import SPOKEN
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.units import rate

FASTEST = 3  # simulated methods with and without local steps each, in addition to the baselines
STEPS = 200
NUMBER = r"(\d+(?:\.\d+)?)"


class Wanted:
    """Simulation requested by --simulate.

    Args:
        words: `slow=3:2.0` (worker 3 takes twice as long), `slow_links=2:20mbit` and `outages=1:5s@10s` (worker 1's
            link is down for 5 s, starting 10 s after the start), each any number of times; `outages_per_hour=1
            outage_seconds=30`, `spread=0.1`, `sync.quorum=3 sync.grace=0.5` (for methods with these options), and
            `steps=200 seed=0`.

    Raises:
        ConfigError: a word has another form, or its value is invalid.
    """

    def __init__(self, words: Sequence[str]) -> None:
        slow: dict[int, float] = {}
        links: dict[int, float] = {}
        outages: list[Outage] = []
        plain: dict[str, float] = {}
        for word in words:
            key, _, value = word.partition("=")
            if key == "slow":
                worker, factor = _of_worker(key, value, f"3:{2.0}")
                slow[worker] = _number(key, factor, "3:2.0")
            elif key == "slow_links":
                worker, speed = _of_worker(key, value, "2:20mbit")
                bits = rate(speed)
                if bits is None:
                    raise ValueRefused("slow_links", "WORKER:RATE, with RATE like 20mbit", value, f"{worker}:20mbit")
                links[worker] = bits
            elif key == "outages":
                outages.append(_outage(value))
            else:
                plain[key] = _number(key, value, {"steps": "200", "seed": "0", "sync.quorum": "2"}.get(key, "1"))
        self.steps, self.seed = (_whole(key, plain.pop(key, usual)) for key, usual in (("steps", STEPS), ("seed", 0)))
        quorum = plain.pop("sync.quorum", None)
        self.quorum = None if quorum is None else _whole("sync.quorum", quorum)
        self.grace = plain.pop("sync.grace", 0.0)
        self.disturbances = Disturbances(slow=slow, slow_links=links, outages=outages, **plain)

    def check(self, workers: int, per_machine: int) -> None:
        """Check the values against the number of workers.

        Args:
            workers: A.
            per_machine: number of workers that share a link.

        Raises:
            ValueRefused: a value is invalid; the first one is reported.
        """
        self.disturbances.check(workers, per_machine)
        self._run_of(workers).check()

    def run(self, times: StepTimes, costs: Sequence[MethodCost], cluster: Cluster, advice: Advice) -> list["Late"]:
        """Simulate the baselines and the fastest methods of the advice."""
        by_name = {cost.name: cost for cost in costs}
        return [
            Late(row, self._simulated(times, replace(by_name[row.method], period=row.period), cluster))
            for row in _named_first(advice)
        ]

    def _run_of(self, workers: int, cores: float = math.inf) -> SimulatedRun:
        return SimulatedRun(workers, self.steps, self.seed, self.quorum, self.grace, cores)

    def _simulated(self, times: StepTimes, cost: MethodCost, cluster: Cluster) -> Simulated:
        run = self._run_of(cluster.workers, cluster.cores)
        run = run if cost.quorum else replace(run, quorum=None, grace=0.0)
        return simulate(times, cost, cluster.network, self.disturbances, run)


class Late:
    """Simulated run of one method, with its row of the advice, which is without disturbances."""

    def __init__(self, row: AdviceRow, found: Simulated) -> None:
        self.row, self.found = row, found

    def flat(self) -> dict[str, Any]:
        """Return the result as columns."""
        step, found = self.found.step, self.found
        return {
            "method": self.row.method,
            "step": step.value,
            "step_low": step.low,
            "step_high": step.high,
            "wall": found.wall,
            "exposed_share": found.exposed_share,
            "waiting_share": found.waiting_share,
            "exchanges": found.exchanges,
            "left_out": found.left_out.tolist() if len(found.left_out) <= 100 else int(found.left_out.sum()),
        }


def told(late: Sequence[Late], advice: Advice, wanted: Wanted) -> str:
    """Return the results as a table with an introductory sentence."""
    unit = unit_of(advice)
    head = ("method", f"step, {unit.name}", "without", "whole run, s", "waiting", "exposed", "left out")
    lines = [
        (
            SPOKEN.get(one.row.method, one.row.method),
            unit.interval(one.found.step),
            unit.show(one.row.step.value),
            f"{one.found.wall:.4g}",
            f"{100 * one.found.waiting_share:.1f} %",
            f"{100 * one.found.exposed_share:.1f} %",
            f"{one.found.left_out.sum() / (one.found.exchanges * advice.workers):.1%}".replace("%", " %"),
        )
        for one in late
    ]
    said = f"With late workers, simulated: {wanted.steps} steps, seed {wanted.seed}; brackets hold 95 % of the steps."
    table = [head, *lines] if any(one.found.left_out.any() for one in late) else [line[:-1] for line in (head, *lines)]
    return f"{said}\n\n{aligned(table)}\n"


def _named_first(advice: Advice) -> list[AdviceRow]:
    every_step = [row for row in advice.rows if not row.local]
    local = [row for row in advice.rows if row.local]
    chosen = {row.method for row in (*every_step[:FASTEST], *local[:FASTEST])} | set(SPOKEN)
    return [row for row in advice.rows if row.method in chosen]


def _of_worker(key: str, value: str, instead: str) -> tuple[int, str]:
    worker, colon, rest = value.partition(":")
    if not colon or not worker.isdigit():
        raise ValueRefused(key, "WORKER:VALUE", value, instead)
    return int(worker), rest


def _outage(value: str) -> Outage:
    worker, rest = _of_worker("outages", value, "1:5s@10s")
    found = re.fullmatch(f"{NUMBER}s@{NUMBER}s", rest)
    if found is None:
        raise ValueRefused("outages", "WORKER:SECONDSs@ATs", value, f"{worker}:5s@10s")
    return Outage(worker, at=float(found[2]), seconds=float(found[1]))


def _number(key: str, text: str, instead: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueRefused(key, "a number", text or "nothing", instead) from None


def _whole(key: str, number: float) -> int:
    if not float(number).is_integer():
        instead = round(number) if math.isfinite(number) else 1
        raise ConfigError(f"{key} must be a whole number, got {number:g}; type {key}={instead}")
    return int(number)
