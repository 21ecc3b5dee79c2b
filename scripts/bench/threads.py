"""Useful number of threads: short runs with the automatic number, 1 and all, alone and beside busy processes.

    python -m scripts.bench.threads [--rounds 3] [--busy 2] [--arms digits,cifar] [--spinning]

Prints a Markdown table: seconds of training, medians of interleaved rounds. Beside b busy processes the fair share of c
cores is c / (t + b) of a core for each of t threads. The last column is the time of a run there divided by the time
that its fair share would give. --spinning adds threads that do not sleep, which can take minutes.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from accordion_bench.processes.environment import cores
from scripts.bench.harness import command_line, in_rounds, print_head, print_row

ARMS = {
    "digits": ["epochs=2", "model=resnet8", "dataset=digits"],
    "cifar": ["epochs=1", "model=resnet8", "dataset=synthetic", "dataset.train_size=2048", "dataset.test_size=64"],
    "resnet18": ["epochs=1", "model=resnet18", "dataset=synthetic", "dataset.train_size=512", "dataset.test_size=64"],
}
ALL = str(cores())
THREADS = {
    "chosen": {},
    "1": {"OMP_NUM_THREADS": "1"},
    "all, asleep while they wait": {"OMP_NUM_THREADS": ALL},
    "all, spinning": {"OMP_NUM_THREADS": ALL, "OMP_WAIT_POLICY": "ACTIVE"},
}
FREE = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}


def seconds(overrides: list[str], environ: dict[str, str]) -> tuple[float, int]:
    """Return the seconds of training of one run, and its number of threads."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "accordion_bench", *overrides, "optimizer.lr=0.01", f"paths.runs={runs}"]
        subprocess.run(command, env={**FREE, **environ}, check=True, capture_output=True)
        (folder,) = (file.parent for file in Path(runs).glob("*/done"))
        threads = json.loads((folder / "environment.json").read_text(encoding="utf-8"))["threads"]
        return json.loads((folder / "summary.json").read_text(encoding="utf-8"))["seconds"], threads


@contextlib.contextmanager
def beside(busy: int) -> Iterator[None]:
    """Run processes that keep a core busy."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--busy", type=int, default=2)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--spinning", action="store_true")
    asked = parser.parse_args()
    tried = {name: environ for name, environ in THREADS.items() if asked.spinning or "spinning" not in name}
    print_head("run", "threads", "alone, s", f"beside {asked.busy} busy processes, s", "over a fair share")
    for arm in asked.arms.split(","):

        def once(turn: tuple[int, str], arm: str = arm) -> tuple[float, int]:
            busy, name = turn
            with beside(busy):
                return seconds(ARMS[arm], tried[name])

        found = in_rounds([(busy, name) for busy in (0, asked.busy) for name in tried], asked.rounds, once)
        for name in tried:
            count = found[0, name][-1][1]
            alone, shared = (statistics.median(took for took, _ in found[busy, name]) for busy in (0, asked.busy))
            fair = alone / min(1.0, cores() / (count + asked.busy)) * min(1.0, cores() / count)
            print_row(arm, f"{name} ({count})", f"{alone:.2f}", f"{shared:.2f}", f"{shared / fair:.2f}")


if __name__ == "__main__":
    main()
