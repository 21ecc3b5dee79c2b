"""Kill workers of elastic runs at random, and look whether the runs end as undisturbed ones do.

    python -m scripts.kill_loop --mtbf 30 --minutes 10 diloco streaming_diloco

For each scheme one run is left alone, and one of the same length has a worker killed (SIGKILL) or stopped (SIGSTOP)
every `mtbf` seconds in the mean. A line each says whether the run has ended, with which loss and how many workers, and
whether processes are left over.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENDS = (signal.SIGKILL, signal.SIGSTOP)
SCHEMES = {
    "every_step": ["sync=every_step", "compressor=topk", "compressor.density=0.1"],
    "local_sgd": ["sync=local_sgd", "sync.period=8"],
    "slowmo": ["sync=slowmo", "sync.period=8"],
    "diloco": ["sync=diloco", "sync.period=8"],
    "streaming_diloco": ["sync=streaming_diloco", "sync.period=8", "sync.delay=2"],
}
RUN = [
    *("model=resnet8", "dataset=synthetic", "dataset.size=8", "dataset.train_size=512", "dataset.test_size=256"),
    *("batch_size=8", "checkpoint.every=0", "threads=1", "optimizer.lr=0.05"),
]


@dataclass(frozen=True)
class Outcome:
    """How a run has ended.

    Args:
        status: of the process.
        rows: of the run, one an epoch.
        ends: signals that were sent.
        orphans: processes of the run that are left over.
    """

    status: int
    rows: list[dict[str, Any]]
    ends: int
    orphans: list[int]

    @property
    def loss(self) -> float:
        """Of the last epoch, on the test data."""
        return float(self.rows[-1]["test_loss"]) if self.rows else float("nan")


def command(runs: Path, scheme: str, epochs: int, workers: int, typed: Sequence[str] = ()) -> list[str]:
    """The command line of a run."""
    many = ["comm=gloo", f"comm.processes={workers}", f"workers={workers}", "comm.timeout=10", f"epochs={epochs}"]
    elastic = ["sync.elastic=true", "sync.min_workers=1"]
    options = [*RUN, *SCHEMES[scheme], *elastic, *many, f"paths.runs={runs}", *typed]
    return [sys.executable, "-m", "accordion_bench", *options]


def disturbed(line: Sequence[str], runs: Path, mtbf: float, seed: int, timeout: float) -> Outcome:
    """Run a command, and end a worker of it every `mtbf` seconds in the mean.

    Args:
        line: the command.
        runs: the folder of its run.
        mtbf: seconds; 0 = it is left alone.
        seed: of what is drawn.
        timeout: seconds after which it has failed.
    """
    drawn, ends = random.Random(seed), 0
    run = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    until, due, known = time.monotonic() + timeout, float("inf"), set[int]()
    while run.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
        workers = children_of(run.pid)
        known |= set(workers)
        if mtbf and due == float("inf") and next(runs.glob("*/metrics.jsonl"), None):  # it trains
            due = time.monotonic() + drawn.expovariate(1 / mtbf)
        if time.monotonic() > due and workers:
            os.kill(drawn.choice(workers), drawn.choice(ENDS))
            ends += 1
            due = time.monotonic() + drawn.expovariate(1 / mtbf)
    if run.poll() is None:
        run.kill()
    patience = time.monotonic() + 10
    while time.monotonic() < patience and any(Path(f"/proc/{pid}").exists() for pid in known):
        time.sleep(0.2)
    rows = [
        json.loads(text)
        for file in runs.glob("*/metrics.jsonl")
        for text in file.read_text(encoding="utf-8").splitlines()
    ]
    return Outcome(run.wait(), rows, ends, [pid for pid in known if Path(f"/proc/{pid}").exists()])


def children_of(parent: int) -> list[int]:
    """Its workers: processes that torch is loaded in."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (
                (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split() if entry.name.isdigit() else []
            )
            worker = len(fields) > 1 and int(fields[1]) == parent and fields[0] not in "ZX"
            if worker and b"spawn_main" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def told(scheme: str, alone: Outcome, killed: Outcome) -> str:
    """One line about a scheme."""
    last = killed.rows[-1] if killed.rows else {}
    return (
        f"{scheme}: status {killed.status}, {killed.ends} ended, {last.get('lost')} lost, {last.get('joined')} new; "
        f"test loss {killed.loss:.4f}, undisturbed {alone.loss:.4f}; payload of one worker "
        f"{last.get('payload_bytes')}, undisturbed {alone.rows[-1]['payload_bytes'] if alone.rows else None}; "
        f"{len(killed.orphans)} processes left over"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all schemes, print a line for each; 1 where a run has not ended well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("schemes", nargs="*", default=list(SCHEMES), metavar="SCHEME", help=", ".join(SCHEMES))
    parser.add_argument("--mtbf", type=float, default=30, help="seconds between two ends of a worker, in the mean")
    parser.add_argument("--minutes", type=float, default=10, help="after which a run has failed")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    wrong = False
    for scheme in arguments.schemes:
        outcomes = []
        for mtbf in (0.0, arguments.mtbf):
            with tempfile.TemporaryDirectory() as folder:
                line = command(Path(folder), scheme, arguments.epochs, arguments.workers)
                outcomes.append(disturbed(line, Path(folder), mtbf, arguments.seed, 60 * arguments.minutes))
        print(told(scheme, *outcomes), flush=True)
        wrong = wrong or outcomes[1].status != 0 or bool(outcomes[1].orphans)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
