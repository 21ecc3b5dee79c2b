"""Simulated against measured steps with one slow link; prints Markdown.

    python -m scripts.studies.validate_simulation                # 2, 3 and 4 hosts, 100 Mbit/s, the last at 20
    python -m scripts.studies.validate_simulation --hosts 3 --slow 5mbit --rounds 9

The inputs of the simulation are measured in separate launches: steps, codec and buckets on links without a limit, by as
many hosts at once; latency, rate and burst of all-reduces by a probe, with equal links, once at each rate. The model is
ResNet-20 on digits, 8 samples per worker and step, one thread for each host. It needs root (network namespaces).
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from accordion_bench.advising.disturbances import Disturbances
from accordion_bench.advising.predict import BucketCost, Messages, MethodCost
from accordion_bench.advising.simulation import SimulatedRun, simulate
from accordion_bench.advising.step_times import StepTimes
from accordion_bench.network.collective_costs import payload_and_times
from accordion_bench.network.link_model import Network
from accordion_bench.plan import TensorSpec
from scripts.bench import hosts as lab
from scripts.bench.harness import in_rounds

MODEL = ["model=resnet20", "dataset=digits", "batch_size=8"]
ALONE = "no communication"
PERIOD = 4
ARMS = {
    ALONE: [],
    "dense": [],
    "PowerSGD, rank 4": ["compressor=powersgd", "compressor.rank=4"],
    "local SGD": ["sync=local_sgd", f"sync.period={PERIOD}"],
}
SEEDS = 20


# ---- inside a host


def inside(out: Path, rounds: int, seconds: float) -> None:
    """Time all arms in this host's process, interleaved; the first host writes the results."""
    import torch
    import torch.distributed as dist

    from accordion_bench.comm.collectives import Comm
    from scripts.bench.arms import our_step, trainer_for

    rank, processes = lab.meet()
    alone = {name: Comm(1) if name == ALONE else Comm(1, processes, rank) for name in ARMS}
    trainers = {name: trainer_for([*MODEL, *overrides], alone[name]) for name, overrides in ARMS.items()}
    steps = {name: our_step(trainer) for name, trainer in trainers.items()}
    found: dict[str, dict[str, Any]] = {name: {"rounds": [], "steps": []} for name in ARMS}

    def timed(name: str, count: int) -> float:
        dist.barrier()
        marks = [time.perf_counter()]
        for _ in range(count):
            steps[name]()
            marks.append(time.perf_counter())
        found[name]["steps"] += np.diff(marks).tolist()
        took = torch.tensor([(marks[-1] - marks[0]) / count], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return float(took)

    for name in ARMS:
        timed(name, 2 * PERIOD)  # connections, and periods end where rounds do
    once = {name: timed(name, PERIOD) for name in ARMS}
    counts = {name: PERIOD * max(1, min(10, round(seconds / PERIOD / took))) for name, took in once.items()}
    for name, trainer in trainers.items():
        found[name]["steps"].clear()
        found[name]["before"] = trainer.clock.columns(True)
    for name, took in in_rounds(ARMS, rounds, lambda name: timed(name, counts[name])).items():
        found[name]["rounds"] = took
    for name, trainer in trainers.items():
        before = found[name].pop("before")
        after = trainer.clock.columns(True)
        spent = {
            part: (after[f"{part}_seconds"] or 0) - (before[f"{part}_seconds"] or 0)
            for part in ("data", "compute", "update")
        }
        found[name] |= {
            "count": counts[name],
            "spent": {part: total / rounds / counts[name] for part, total in spent.items()},
        }
        found[name]["exchanges"] = [
            {"wait": wait, "buckets": [bucket._asdict() for bucket in buckets]}
            for _, (_, wait, _, buckets) in trainer.clock.exchanges().items()
        ]
    lab.leave(out, found)


# ---- what the simulation starts from


def launched(hosts: int, rate: float | None, slow: dict[int, float], rounds: int, seconds: float) -> dict[str, Any]:
    """Return the times of all arms in one launch."""
    words = ["--inside", lab.FILE, "--rounds", str(rounds), "--seconds", str(seconds)]
    return lab.launched(["-m", "scripts.studies.validate_simulation", *words], hosts, rate, slow)


def probed(hosts: int, rate: float) -> Network:
    """Return a network of equal links with the parameters that a probe of all-reduces measures."""
    from accordion_bench.netlab.__main__ import probe
    from accordion_bench.netlab.hosts import Hosts

    with tempfile.TemporaryDirectory() as folder, Hosts(hosts, rate) as started:
        with contextlib.redirect_stdout(io.StringIO()):
            status = probe(started, Path(folder))
        if status:
            sys.exit(f"probe of {hosts} hosts at {rate} bit/s: a host failed")
        link = json.loads(Path(folder, "probe.json").read_text(encoding="utf-8"))["of_itself"]["all_reduce"]
    return Network(link["bandwidth"], link["alpha"], burst=link["burst"])


def inputs(trial: dict[str, Any], arm: str, hosts: int) -> tuple[StepTimes, MethodCost]:
    """Return the step times and the method's cost of one arm, from a launch on links without a limit.

    Its buckets represent tensors. Their ready times are taken as a share of the backward pass, which takes longer
    beside an exchange than alone.
    """
    alone, (exchange, *_) = trial[ALONE], trial[arm]["exchanges"]
    backward, update = alone["spent"]["data"] + alone["spent"]["compute"], alone["spent"]["update"]
    scale = statistics.median(alone["steps"]) / (backward + update)  # means to medians
    local = arm == "local SGD"
    ready, buckets = [], []
    for number, stage in enumerate(exchange["buckets"]):
        ready.append(scale * backward * min(1.0, stage["ready"] / exchange["wait"]))
        messages = {}
        for kind, (wire, rounds) in stage["kinds"].items():
            payload, made = payload_and_times(kind, wire, rounds, hosts)
            messages[kind] = Messages(payload, 0.0, made)
        buckets.append(BucketCost((number,), stage["encode"], (stage["decode"], 0.0), messages))
    specs = tuple(TensorSpec(f"bucket {number}", (1,)) for number in range(len(buckets)))
    times = StepTimes(
        specs,
        tuple(ready),
        scale * backward,
        scale * update,
        tuple(alone["steps"]),
        8,
        "resnet20",
        "cpu",
        "a trial here",
    )
    return times, MethodCost(arm, (), tuple(buckets), overlaps=not local, local=local, period=PERIOD if local else 1)


def predicted(times: StepTimes, cost: MethodCost, fast: Network, slow: Network, hosts: int, steps: int) -> list[float]:
    """Return the seconds of a step for each seed, as means over this number of steps that start on idle links."""
    network = Network(fast.bandwidth, fast.latency, burst=slow.burst)  # that of the slow link, which decides
    disturbances = Disturbances(slow_links={hosts - 1: slow.bandwidth})
    return [
        simulate(times, cost, network, disturbances, SimulatedRun(hosts, steps, seed)).wall / steps
        for seed in range(SEEDS)
    ]


# ---- outside


class Cell(NamedTuple):
    """One arm on some hosts.

    arm: name of the arm.
    measured: seconds of a step, by round.
    steps: number of steps in a round.
    simulated: seconds of a step, median over seeds.
    load: load of the machine before the measurement.
    """

    arm: str
    measured: list[float]
    steps: int
    simulated: float
    load: float

    @property
    def error(self) -> float:
        """Relative error of the simulation."""
        return self.simulated / statistics.median(self.measured) - 1


def cells(hosts: int, rate: float, slow: float, rounds: int, seconds: float) -> list[Cell]:
    """Return all arms, simulated and then measured, with a slow link of the last host."""
    trial = launched(hosts, None, {}, rounds, min(1.0, seconds))
    all_fast, all_slow = probed(hosts, rate), probed(hosts, slow)
    print(f"{hosts} hosts: {described(all_fast)}; slow: {described(all_slow)}; a step alone", end=" ", file=sys.stderr)
    print(f"{1e3 * statistics.median(trial[ALONE]['steps']):.1f} ms", file=sys.stderr)
    load = os.getloadavg()[0]
    measured = launched(hosts, rate, {hosts - 1: slow}, rounds, seconds)
    found = []
    for arm, own in measured.items():
        if arm != ALONE:
            times, cost = inputs(trial, arm, hosts)
            simulated = statistics.median(predicted(times, cost, all_fast, all_slow, hosts, own["count"]))
            found.append(Cell(arm, own["rounds"], own["count"], simulated, load))
    return found


def described(network: Network) -> str:
    """Return a description of probed links."""
    return f"{network.bandwidth / 1e6:.1f} Mbit/s, {1e3 * network.latency:.2f} ms, {network.burst / 1e3:.0f} kB at once"


def main() -> None:
    """Parse the command line, run the hosts, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--slow", default="20mbit", help="of the last host")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one arm in one round, about")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args.inside, args.rounds, args.seconds)
        return

    from accordion_bench.netlab import options
    from accordion_bench.runs.folder import environment
    from scripts.bench.harness import quartiles

    rate, slow = options.rate(args.rate), options.rate(args.slow, "--slow")
    if rate is None or slow is None:
        parser.error("--rate and --slow must be rates, got none; type --rate 100mbit --slow 20mbit")
    about = environment(threads=1)
    print(f"`{' '.join(['python -m scripts.studies.validate_simulation', *sys.argv[1:]])}`\n")
    print(f"commit {about['commit']}, {about['started']}, {about['processor']}, {about['cpu_cores']} cores,")
    print(f"{about['versions']}\n")
    print("| hosts | arm | measured, s per step: median (quartiles) | n | simulated, median of seeds | error | load |")
    print("|---|---|---|---|---|---|---|")
    errors = []
    for hosts in args.hosts:
        for cell in cells(hosts, rate, slow, args.rounds, args.seconds):
            median, lower, upper = quartiles(cell.measured)
            errors.append(abs(cell.error))
            print(
                f"| {hosts} | {cell.arm} | {median:.3f} ({lower:.3f} to {upper:.3f}) | {len(cell.measured)} rounds of "
                f"{cell.steps} | {cell.simulated:.3f} | {100 * cell.error:+.1f} % | {cell.load:.1f} |",
                flush=True,
            )
    print(
        f"\nMedian error {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %, n = {len(errors)}."
    )


if __name__ == "__main__":
    main()
