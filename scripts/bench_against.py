"""Step times of this checkout against another one's, in one run: interleaved rounds, medians; prints Markdown.

    python -m scripts.bench_against ../old              # a checkout of an earlier commit
    python -m scripts.bench_against ../old --rounds 15 --seconds 1
    python -m scripts.bench_against ../old --codecs 11                # an exchange of one worker, for every compressor

Each checkout has one process with one thread, which keeps its arms ready; they take turns, and change who is first.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from accordion_bench.options.conf_dir import yaml_files

ARMS = {
    "resnet8, dense": ["model=resnet8", "dataset=synthetic", "batch_size=8"],
    "resnet8, PowerSGD under Accordion": [
        *("model=resnet8", "dataset=synthetic", "batch_size=8"),
        *("compressor=powersgd", "adaptive=accordion"),
    ],
    "resnet8, QSGD": ["model=resnet8", "dataset=synthetic", "batch_size=8", "compressor=qsgd"],
    "resnet8, TopK, local SGD": [
        *("model=resnet8", "dataset=synthetic", "batch_size=8"),
        *("compressor=topk", "sync=local_sgd"),
    ],
    "resnet18, dense": ["model=resnet18", "dataset=synthetic", "batch_size=4"],
    "resnet18, dist-EF": ["model=resnet18", "dataset=synthetic", "batch_size=4", "compressor=distefblocksgd"],
}

CODECS = """
import json, sys, time
sys.path.insert(0, ".")
import torch
from accordion_bench.conformance.subject import Setup, from_yaml, plain
from scripts.bench_codec import gradients, shapes
names, floats = json.loads(sys.argv[1])
specs = shapes(floats, False)
xs_W = gradients(specs, "cpu")
steps = {}
for name in names:
    yaml, *fed = name.split(", ")
    wrapped = from_yaml(yaml) if fed else plain(from_yaml(yaml))
    setup = Setup(wrapped, workers=1, specs=specs, dtype=torch.float32)
    steps[name] = lambda setup=setup: setup(xs_W, 1000)
"""

# what a checkout's process runs; modules had other places before version 0.2
INSIDE = """
import json, sys, time
sys.path.insert(0, ".")
try:
    from accordion_bench.comm.collectives import Comm
    from scripts.bench_arms import our_step, trainer_for
except ImportError:
    from accordion_bench.comm import Comm
    from scripts.bench_step import our_step, trainer_for
arms = json.loads(sys.argv[1])
steps = {name: our_step(trainer_for(overrides, Comm(2))) for name, overrides in arms.items()}
"""

TURNS = """
for step in steps.values():
    step()
print("ready", flush=True)
for line in sys.stdin:
    name, seconds = json.loads(line)
    count, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        steps[name]()
        count += 1
    print((time.perf_counter() - start) / count, flush=True)
"""


def start(folder: Path, program: str, arms: object) -> subprocess.Popen:
    """A process of one checkout, with its arms ready."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder.resolve())}
    command = [sys.executable, "-c", program + TURNS, json.dumps(arms)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=environ, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n", f"{folder} does not start"
    return process


def seconds_per_step(process: subprocess.Popen, arm: str, seconds: float) -> float:
    """Let a checkout's process take steps for a while."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([arm, seconds]) + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def commit(folder: Path) -> str:
    """What is checked out there."""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True).stdout


def main() -> None:
    """Print a row for each arm: the median of new / old over the rounds, and its 95 % bootstrap interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each arm in each round")
    parser.add_argument("--codecs", type=int, metavar="MILLIONS", help="of floats; exchanges in the place of steps")
    parser.add_argument("--only", nargs="*", help="some arms; `qsgd, fed` is qsgd as its file has it, with feedback")
    args = parser.parse_args()
    arms = args.only or (sorted(yaml_files("compressor")) if args.codecs else list(ARMS))
    program, given = (CODECS, [arms, args.codecs]) if args.codecs else (INSIDE, {arm: ARMS[arm] for arm in arms})
    folders = {"old": args.old, "new": Path.cwd()}
    print(f"old {commit(args.old).strip()}, new {commit(folders['new']).strip()}; {args.rounds} rounds\n")
    print("| arm | new, ms | new / old | 95 % interval |\n|---|---|---|---|", flush=True)
    processes = {name: start(folder, program, given) for name, folder in folders.items()}
    ratios: dict[str, list[float]] = {arm: [] for arm in arms}
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(args.rounds):
        order = ["old", "new"] if number % 2 else ["new", "old"]
        for arm in arms:
            found = {name: seconds_per_step(processes[name], arm, args.seconds) for name in order}
            ratios[arm].append(found["new"] / found["old"])
            times[arm].append(found["new"])
    generator = np.random.default_rng(0)
    for arm, of_rounds in ratios.items():
        drawn = np.median(generator.choice(of_rounds, (2000, len(of_rounds))), axis=1)
        low, high = np.quantile(drawn, [0.025, 0.975])
        median = statistics.median(of_rounds)
        print(f"| {arm} | {1000 * statistics.median(times[arm]):.1f} | {median:.3f} | {low:.3f} to {high:.3f} |")
    for process in processes.values():
        process.kill()


if __name__ == "__main__":
    main()
