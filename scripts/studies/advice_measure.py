"""Step times behind links, and where the time went: all arms of a cell in one launch, in interleaved rounds.

python -m scripts.studies.advice_measure FILE WORK runs in every host: WORK as JSON, what was found goes to FILE.
"""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.bench import hosts
from scripts.studies.advice_cells import ALONE, ARMS, CELL, MODELS, Cell, period

FEWEST = 3  # rounds of every arm
MOST = 10  # steps, or periods, of an arm in a round
WARM_UP = 2  # steps: connections are made, DistributedDataParallel arranges its buckets anew after the first


@dataclass(frozen=True)
class Work:
    """What is measured in one launch.

    Args:
        model: of `MODELS`.
        arms: of `ARMS`.
        rounds: of each arm.
        seconds: of one arm in one round, about.
        budget: seconds of all arms together; one that has had its share is in no further round, but in three.
    """

    model: str
    arms: tuple[str, ...]
    rounds: int
    seconds: float
    budget: float


# ---- inside a host


class Timed:
    """One arm: its trainer, and what its steps have taken so far."""

    def __init__(self, name: str, model: str, rank: int, processes: int) -> None:
        from accordion_bench.comm.collectives import Comm
        from scripts.bench.arms import our_step, trainer_for

        here = Comm(1) if name == ALONE else Comm(1, processes, rank)
        self.trainer = trainer_for([*MODELS[model], *ARMS[name]], here)
        self.step, self.period = our_step(self.trainer), period(name)
        self.times: list[float] = []
        self.counts: list[int] = []
        self.parts: dict[str, float] = {}

    def run(self, steps: int) -> float:
        """Seconds of a step, mean over so many, on the slowest host."""
        import torch
        import torch.distributed as dist

        position, clock = self.trainer.position, self.trainer.clock
        if position.steps_per_epoch - 1 - position.step_in_epoch < steps:  # an epoch begins outside of what is timed
            position.step_in_epoch = 0
            self.trainer.begin_epoch()
        dist.barrier()
        clock.start()
        before, start = clock.columns(True), time.perf_counter()
        for _ in range(steps):
            self.step()
        took = torch.tensor([(time.perf_counter() - start) / steps], dtype=torch.float64)
        for part, seconds in clock.columns(True).items():
            self.parts[part] = self.parts.get(part, 0.0) + (seconds or 0.0) - (before[part] or 0.0)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took)

    def warm_up(self, seconds: float) -> None:
        """The first steps, and how many are to be timed in a round; every host comes to the same number."""
        for _ in range(WARM_UP if self.period == 1 else 1):
            once = self.period * self.run(self.period)
        self.steps = self.period * max(1, min(MOST, round(seconds / once)))
        self.parts.clear()

    def round(self) -> None:
        """One more round."""
        self.times.append(self.run(self.steps))
        self.counts.append(self.steps)

    @property
    def spent(self) -> float:
        """Seconds of all rounds, with one more."""
        return self.steps * sum([*self.times, *self.times[-1:]])

    def found(self) -> dict[str, Any]:
        """For the file."""
        parts = {part.removesuffix("_seconds"): total / sum(self.counts) for part, total in self.parts.items()}
        wanted = ("data", "compute", "exposed", "update", "policy", "encode", "comm", "decode")
        exchanges = [
            {"what": kind.what, "wait": wait, "buckets": [bucket._asdict() for bucket in buckets]}
            for kind, (_, wait, _, buckets) in self.trainer.clock.exchanges().items()
        ]
        return {
            "seconds": self.times,
            "steps": self.steps,
            "parts": {part: parts[part] for part in wanted},
            "exchanges": exchanges,
        }


def inside(out: Path, work: Work) -> None:
    """Time all arms in this host's process; the first host writes what it has found."""
    rank, processes = hosts.meet()
    arms = {name: Timed(name, work.model, rank, processes) for name in work.arms}
    for arm in arms.values():
        arm.warm_up(work.seconds)
    for round_ in range(work.rounds):
        for arm in list(arms.values()) if round_ % 2 else list(arms.values())[::-1]:
            if round_ < FEWEST or arm.spent <= work.budget / len(arms):
                arm.round()
    hosts.leave(out, {name: arm.found() for name, arm in arms.items()})


# ---- outside


def measured(work: Work, count: int, rate: float | None) -> dict[str, Any]:
    """What each arm has taken on so many hosts, behind links of so many bit/s, by arm.

    Raises:
        RuntimeError: a host failed.
    """
    return hosts.launched(["-m", "scripts.studies.advice_measure", hosts.FILE, json.dumps(asdict(work))], count, rate)


def circumstances() -> dict[str, Any]:
    """Commit, versions, hardware and the load before a cell."""
    from accordion_bench.runs.environment import environment

    told = environment(threads=1)
    wanted = ("commit", "started", "python", "versions", "processor", "cpu_cores", "threads", "load")
    return {key: told[key] for key in wanted}


def missing(cells: Iterable[Cell], wanted: Iterable[Cell], arms: Iterable[str]) -> list[Cell]:
    """Of the wanted cells those that are not measured with all these arms."""
    done = [{key: cell[key] for key in CELL} for cell in cells if set(arms) <= set(cell["arms"])]
    return [cell for cell in wanted if cell not in done]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("scripts.studies.advice_measure is started by scripts.studies.validate_advice")
    told = json.loads(sys.argv[2])
    inside(Path(sys.argv[1]), Work(**{**told, "arms": tuple(told["arms"])}))
