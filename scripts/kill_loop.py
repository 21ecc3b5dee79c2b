"""Disturb workers of elastic runs at random, and compare with undisturbed runs.

    python -m scripts.kill_loop --mtbf 30 --minutes 10 diloco streaming_diloco
    python -m scripts.kill_loop --mtbf 30 --minutes 4 --ends kill stop cut every_step      # needs root

For each scheme one run is left alone, and one of the same length is disturbed every `mtbf` seconds in the mean: a
worker is killed (SIGKILL) or stopped (SIGSTOP), or the link of its host is cut for 1 to 8 seconds. With cuts each
worker is in a network namespace of its own (see scripts/behind_links.py). A worker whose link is down for longer than
3 seconds counts as lost: the others go on without it, and the launcher replaces it. One line for each scheme reports
the exit status, workers, loss and processes that are left over.
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
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accordion_bench.netlab import hosts as netlab
from accordion_bench.netlab.hosts import Hosts
from accordion_bench.options.checks import ConfigError

CUT = "cut"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SECONDS = 1.0, 8.0  # of a cut: the shortest, the longest
SCHEMES = {
    "every_step": ["sync=every_step", "compressor=topk", "compressor.density=0.1"],
    "local_sgd": ["sync=local_sgd", "sync.period=8"],
    "slowmo": ["sync=slowmo", "sync.period=8"],
    "diloco": ["sync=diloco", "sync.period=8"],
    "streaming_diloco": ["sync=streaming_diloco", "sync.period=8", "sync.delay=2"],
    "gossip": ["sync=gossip"],
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
        ends: number of workers that were killed or stopped, and of links that were cut, by kind.
        orphans: workers that were left over, and were killed then.
    """

    status: int
    rows: list[dict[str, Any]]
    ends: Counter[str]
    orphans: list[int]

    @property
    def loss(self) -> float:
        """Of the last epoch, on the test data."""
        return float(self.rows[-1]["test_loss"]) if self.rows else float("nan")


def overrides(runs: Path, scheme: str, epochs: int, workers: int) -> list[str]:
    """The overrides of a run."""
    many = ["comm=gloo", f"comm.processes={workers}", f"workers={workers}", "comm.timeout=10", f"epochs={epochs}"]
    elastic = ["sync.elastic=true", "sync.min_workers=1"]
    return [*RUN, *SCHEMES[scheme], *elastic, *many, f"paths.runs={runs}"]


def command(typed: Sequence[str], hosts: Hosts | None, folder: Path) -> list[str]:
    """The command line of a run.

    Args:
        typed: its overrides.
        hosts: where its workers are; None = all on this machine.
        folder: for notes of theirs.
    """
    if hosts is None:
        return [sys.executable, "-m", "accordion_bench", *typed]
    first = hosts.namespace(0)
    lab = first.removesuffix("-0"), str(hosts.number), str(folder)
    return ["ip", "netns", "exec", first, sys.executable, "-m", "scripts.behind_links", *lab, *typed]


@dataclass(frozen=True)
class Disturbance:
    """What happens to the workers of a run.

    Args:
        mtbf: seconds between two ends, in the mean; 0 = nothing happens.
        ends: kinds of ends, of `SIGNALS` and `CUT`.
        seed: of what is drawn.
        hosts: whose links are cut; host 0 has no worker.
    """

    mtbf: float = 0.0
    ends: Sequence[str] = tuple(SIGNALS)
    seed: int = 0
    hosts: Hosts | None = None


def disturbed(line: Sequence[str], runs: Path, disturbance: Disturbance, timeout: float) -> Outcome:
    """Run a command, and disturb its workers.

    Args:
        line: the command.
        runs: the folder of its run.
        disturbance: what happens, and when.
        timeout: seconds after which the run has failed and is killed.
    """
    drawn, ends, hosts, mtbf = random.Random(disturbance.seed), Counter[str](), disturbance.hosts, disturbance.mtbf
    run = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    until, due, known = time.monotonic() + timeout, float("inf"), dict[int, int]()
    healed: dict[int, float] = {}  # hosts whose link is down -> when it is up again
    while run.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
        workers = children_of(run.pid)
        known |= {process: began for process in workers if (began := _started(process)) is not None}
        for host in [host for host, then in healed.items() if time.monotonic() > then]:
            _link(hosts, host, up=True)
            del healed[host]
        if mtbf and due == float("inf") and next(runs.glob("*/metrics.jsonl"), None):  # it trains
            due = time.monotonic() + drawn.expovariate(1 / mtbf)
        if time.monotonic() > due and workers:
            kind = drawn.choice(disturbance.ends)
            if kind != CUT:
                os.kill(drawn.choice(workers), SIGNALS[kind])
            elif hosts is not None:
                host = drawn.randrange(1, hosts.number)
                healed[host] = time.monotonic() + drawn.uniform(*SECONDS)
                _link(hosts, host, up=False)
            ends[kind] += 1
            due = time.monotonic() + drawn.expovariate(1 / mtbf)
    for host in healed:
        _link(hosts, host, up=True)
    if run.poll() is None:
        run.kill()
    patience = time.monotonic() + 10
    while time.monotonic() < patience and any(_started(process) == began for process, began in known.items()):
        time.sleep(0.2)
    orphans = [process for process, began in known.items() if _started(process) == began]
    for process in orphans:  # one that was stopped before it could bind its end to its parent's, say
        os.kill(process, signal.SIGKILL)
    rows = [
        json.loads(text)
        for file in runs.glob("*/metrics.jsonl")
        for text in file.read_text(encoding="utf-8").splitlines()
    ]
    return Outcome(run.wait(), rows, ends, orphans)


def _link(hosts: Hosts | None, host: int, up: bool) -> None:
    assert hosts is not None
    (hosts.join if up else hosts.cut)(host)
    print(f"the link of host {host} is {'up again' if up else 'down'}", file=sys.stderr, flush=True)


def children_of(parent: int) -> list[int]:
    """Return the workers that a process has spawned."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [number for number in numbers if _started(number, parent) is not None]


def _started(process: int, parent: int | None = None) -> int | None:
    """Return the start time in clock ticks of a live spawned worker; None = it is none, or of another parent.

    With the start time a process is not taken for a later one of the same number.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return None
    alive = stat[0] not in "ZX" and b"spawn_main" in command and parent in (None, int(stat[1]))
    return int(stat[19]) if alive else None


def told(scheme: str, alone: Outcome, killed: Outcome) -> str:
    """One line about a scheme."""
    last = killed.rows[-1] if killed.rows else {}
    ends = ", ".join(f"{count} {kind}" for kind, count in sorted(killed.ends.items())) or "nothing"
    return (
        f"{scheme}: status {killed.status}, disturbed by {ends}; {last.get('lost')} lost, {last.get('joined')} new, "
        f"{last.get('members')} at the end; test loss {killed.loss:.4f}, undisturbed {alone.loss:.4f}; payload of one "
        f"worker {last.get('payload_bytes')}, undisturbed "
        f"{alone.rows[-1]['payload_bytes'] if alone.rows else None}; {len(killed.orphans)} processes left over"
    )


def compared(scheme: str, arguments: argparse.Namespace) -> list[Outcome]:
    """How an undisturbed and a disturbed run of a scheme end."""
    outcomes = []
    for mtbf in (0.0, arguments.mtbf):
        with ExitStack() as stack:
            runs, notes = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
            hosts = stack.enter_context(Hosts(arguments.workers + 1)) if CUT in arguments.ends else None
            line = command(overrides(runs, scheme, arguments.epochs, arguments.workers), hosts, notes)
            disturbance = Disturbance(mtbf, arguments.ends, arguments.seed, hosts)
            outcomes.append(disturbed(line, runs, disturbance, 60 * arguments.minutes))
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Run all schemes, print a line for each; 1 where a run has not ended well, 2 where links cannot be cut."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("schemes", nargs="*", default=list(SCHEMES), metavar="SCHEME", help=", ".join(SCHEMES))
    parser.add_argument("--mtbf", type=float, default=30, help="seconds between two ends of a worker, in the mean")
    parser.add_argument("--minutes", type=float, default=10, help="after which a run has failed")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ends", nargs="+", choices=[*SIGNALS, CUT], default=list(SIGNALS), help="cut needs root")
    arguments = parser.parse_args(argv)
    if unknown := [scheme for scheme in arguments.schemes if scheme not in SCHEMES]:
        parser.error(f"SCHEME must be one of {', '.join(SCHEMES)}, got {unknown[0]}")
    if CUT in arguments.ends:
        try:
            netlab.refuse()
        except ConfigError as refused:
            print(f"--ends cut needs network namespaces: {refused}; leave cut out", file=sys.stderr)
            return 2
    wrong = False
    for scheme in arguments.schemes:
        outcomes = compared(scheme, arguments)
        print(told(scheme, *outcomes), flush=True)
        wrong = wrong or outcomes[1].status != 0 or bool(outcomes[1].orphans)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
