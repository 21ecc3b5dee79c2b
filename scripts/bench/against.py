"""Step times of this checkout against another one's, in one run: interleaved rounds, medians; prints Markdown.

    python -m scripts.bench.against ../old              # a checkout of an earlier commit
    python -m scripts.bench.against ../old --rounds 15 --seconds 1
    python -m scripts.bench.against ../old --codecs 11                # an exchange of one worker, for every compressor

Each checkout has one process with one thread, which keeps its arms ready. The processes alternate, and so does the
order within a round.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from accordion_bench.options.conf_dir import yaml_files
from scripts.bench.harness import command_line, in_rounds, interval, print_head, print_row

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
try:
    from scripts.bench.codec import gradients, shapes
except ImportError:
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

# what a checkout's process runs; modules had other places before version 0.3
INSIDE = """
import json, sys, time
sys.path.insert(0, ".")
from accordion_bench.comm.collectives import Comm
try:
    from scripts.bench.arms import our_step, trainer_for
except ImportError:
    from scripts.bench_arms import our_step, trainer_for
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
    """Start a process of one checkout, with its arms ready."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder.resolve())}
    command = [sys.executable, "-c", program + TURNS, json.dumps(arms)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=environ, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n", f"{folder} does not start"
    return process


def seconds_per_step(process: subprocess.Popen, arm: str, seconds: float) -> float:
    """Run steps in a checkout's process for some time; return the seconds per step."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps([arm, seconds]) + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def commit(folder: Path) -> str:
    """Return the commit of a checkout."""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True).stdout


def main() -> None:
    """Print a row for each arm: the median of new / old over the rounds, and its 95 % bootstrap interval."""
    parser = command_line(__doc__, rounds=9)
    parser.add_argument("old", type=Path, help="folder of the other checkout")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each arm in each round")
    parser.add_argument("--codecs", type=int, metavar="MILLIONS", help="of floats; exchanges in the place of steps")
    parser.add_argument("--only", nargs="*", help="some arms; `qsgd, fed` is qsgd as its file has it, with feedback")
    args = parser.parse_args()
    both = sorted({file.stem for file in args.old.glob("conf/compressor/*.yaml")} & set(yaml_files("compressor")))
    arms = args.only or (both if args.codecs else list(ARMS))
    program, given = (CODECS, [arms, args.codecs]) if args.codecs else (INSIDE, {arm: ARMS[arm] for arm in arms})
    folders = {"old": args.old, "new": Path.cwd()}
    print(f"old {commit(args.old).strip()}, new {commit(folders['new']).strip()}; {args.rounds} rounds\n")
    print_head("arm", "new, ms", "new / old", "95 % interval")
    processes = {name: start(folder, program, given) for name, folder in folders.items()}
    turns = [(arm, name) for arm in arms for name in folders]  # those of an arm beside each other, each first in turn
    found = in_rounds(turns, args.rounds, lambda turn: seconds_per_step(processes[turn[1]], turn[0], args.seconds))
    for arm in arms:
        new, old = found[arm, "new"], found[arm, "old"]
        ratios = [a / b for a, b in zip(new, old, strict=True)]
        low, high = interval(ratios)
        milliseconds = f"{1000 * statistics.median(new):.1f}"
        print_row(arm, milliseconds, f"{statistics.median(ratios):.3f}", f"{low:.3f} to {high:.3f}")
    for process in processes.values():
        process.kill()


if __name__ == "__main__":
    main()
