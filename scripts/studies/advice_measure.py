"""Step times behind links, and their parts: all arms of a cell in one launch, in interleaved rounds.

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
    """Measurements of one launch.

    Args:
        model: one of `MODELS`.
        arms: some of `ARMS`.
        rounds: number of rounds of each arm.
        seconds: approximate time of one arm in one round.
        budget: seconds of all arms together; an arm that has used its share takes part in no further round after its
            third.
    """

    model: str
    arms: tuple[str, ...]
    rounds: int
    seconds: float
    budget: float


# ---- inside a host


class Timed:
    """One arm: its trainer, and the times of its steps so far."""

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
        """Return the seconds of a step, mean over this number of steps, on the slowest host."""
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
        """Run the first steps, and choose the number of steps per round; every host computes the same number."""
        for _ in range(WARM_UP if self.period == 1 else 1):
            once = self.period * self.run(self.period)
        self.steps = self.period * max(1, min(MOST, round(seconds / once)))
        self.parts.clear()

    def round(self) -> None:
        """Measure one more round."""
        self.times.append(self.run(self.steps))
        self.counts.append(self.steps)

    @property
    def spent(self) -> float:
        """Return the seconds of all rounds, including one more."""
        return self.steps * sum([*self.times, *self.times[-1:]])

    def found(self) -> dict[str, Any]:
        """Return the results for the file."""
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
    """Time all arms in this host's process; the first host writes the results."""
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
    """Return the times of each arm on this number of hosts, behind links of this rate in bit/s, by arm.

    Raises:
        RuntimeError: a host failed.
    """
    return hosts.launched(["-m", "scripts.studies.advice_measure", hosts.FILE, json.dumps(asdict(work))], count, rate)


def circumstances() -> dict[str, Any]:
    """Return commit, versions, hardware and the load before a cell."""
    from accordion_bench.runs.folder import environment

    told = environment(threads=1)
    wanted = ("commit", "started", "python", "versions", "processor", "cpu_cores", "threads", "load")
    return {key: told[key] for key in wanted}


def missing(cells: Iterable[Cell], wanted: Iterable[Cell], arms: Iterable[str]) -> list[Cell]:
    """Return the requested cells that are not measured with all these arms."""
    done = [{key: cell[key] for key in CELL} for cell in cells if set(arms) <= set(cell["arms"])]
    return [cell for cell in wanted if cell not in done]


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("scripts.studies.advice_measure is started by scripts.studies.validate_advice")
    told = json.loads(sys.argv[2])
    inside(Path(sys.argv[1]), Work(**{**told, "arms": tuple(told["arms"])}))
