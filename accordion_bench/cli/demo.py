"""accordion-bench demo: train four arms on scikit-learn's digits in parallel, and make one table and one figure.

The arms are dense, PowerSGD with few and with many bytes, and Accordion between the two. Neither a download of data nor
a checkout is needed.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EPOCHS = 40
LOOKS = 8  # decisions of Accordion per run; a short run has one after each epoch
ONE_AT_A_TIME = threading.Lock()


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of the command."""
    found = argparse.ArgumentParser("accordion-bench demo", description=__doc__.splitlines()[0])
    found.add_argument("--seeds", default="0", help="seeds, such as 0 (default) or 0,1,2")
    found.add_argument("--epochs", type=int, default=EPOCHS, help=f"epochs per run (default: {EPOCHS}; 6 for a trial)")
    found.add_argument("--out", default="results/report", help="folder for the table and the figure")
    found.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel arms (default: all cores)")
    return found


def arms(epochs: int, seeds: str, runs: str) -> Mapping[str, list[str]]:
    """Return the command-line words of each arm, by name; `seeds` may be several, separated by commas."""
    interval = 1 if epochs < 2 * LOOKS else epochs // LOOKS
    accordion = {"weak": 4, "strong": 1, "eta": 1, "interval": interval}
    options = [f"adaptive.accordion.{key}={value}" for key, value in accordion.items()]
    own = {
        "dense": ["compressor=none"],
        "rank 4": ["compressor=powersgd", "compressor.rank=4"],
        "rank 1": ["compressor=powersgd", "compressor.rank=1"],
        "Accordion": ["compressor=powersgd", "adaptive=accordion", *options],
    }
    common = ["model=resnet20", f"epochs={epochs}", f"seed={seeds}", f"paths.runs={runs}"]
    sweep = ["-m"] if "," in seeds else []
    return {name: [*sweep, *words, *common] for name, words in own.items()}


def main(words: Sequence[str]) -> int:
    """Run the arms and then the report; return the exit status."""
    args = parser().parse_args(words)
    # a new folder, so that the report contains only the runs of this demo
    runs = f"results/runs/demo/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    wanted = arms(args.epochs, args.seeds, runs)
    processes: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(max(1, args.jobs)) as pool:
        try:
            running = {pool.submit(_run, name, own, processes): name for name, own in wanted.items()}
            failed = [status for own in running if (status := own.result())]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            raise
    if failed:
        return failed[0]
    command = ["-m", "accordion_bench.report", runs, "--out", args.out]
    print(f"\n$ python {' '.join(command)}", flush=True)
    status = subprocess.run([sys.executable, *command]).returncode
    if not status:
        print(f"the figure: {Path(args.out, 'comparison.png')}")
    return status


def _run(name: str, words: Sequence[str], processes: list["subprocess.Popen[str]"]) -> int:
    """Run one arm with its name in front of each output line; return the exit status."""
    command = ["-m", "accordion_bench", *words]
    _say(f"{name}: $ python {' '.join(command)}")
    # layers this small gain nothing from two threads
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
    process = subprocess.Popen([sys.executable, *command], env=environ, **streams)  # type: ignore[call-overload]
    processes.append(process)
    for line in process.stdout:
        _say(f"{name}: {line.removesuffix(chr(10))}")
    status: int = process.wait()
    ended = sum(own.poll() is not None for own in processes)
    _say(f"{ended} of 4 arms are done ({name})")
    return status


def _say(line: str) -> None:
    """Print one whole line; arms print from several threads."""
    with ONE_AT_A_TIME:
        print(line, flush=True)
