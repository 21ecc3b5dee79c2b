"""Time of the report of many long runs, part by part, on synthetic run folders; prints Markdown.

For the whole command it also prints the time of the first output and the peak memory of all its processes (Linux).

python -m scripts.bench.report                                             # 100 runs of 300 epochs in 5 settings
python -m scripts.bench.report --runs 1000                                 # with more seeds
python -m scripts.bench.report --settings 1 --arms 34 --seeds 3            # one setting with many arms
"""

import contextlib
import json
import math
import os
import random
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from accordion_bench.config.compose import compose
from accordion_bench.report import read
from accordion_bench.report.compare.grouping import group, settings
from accordion_bench.report.render import figures, write
from accordion_bench.report.render.figures import draw
from accordion_bench.report.render.page import Section, page
from accordion_bench.runs.folder import RunFolder, environment
from scripts.bench.harness import command_line, print_head, print_row, where

MATRICES = [f"stages.{stage}.{block}.conv{i}.weight" for stage in range(4) for block in range(2) for i in (1, 2)]
NAMES = [*MATRICES, *(f"{name.replace('conv', 'bn')}" for name in MATRICES), "conv.weight", "fc.weight", "fc.bias"]
POLICY = ["compressor=powersgd", "adaptive=accordion", "measure.norms=true", "measure.error=true"]
# seconds, first words, MB at most: of so many runs or fewer
TARGETS = {100: (10.0, 2.0, 2000), 1000: (60.0, 2.0, 2000)}
LOOK = 0.5  # seconds between two looks at the memory, each of which takes a hundredth


def typed_for(number: int) -> list[str]:
    """Return the overrides of an arm: dense, Accordion, then PowerSGD, TopK and QSGD at increasing levels."""
    if number == 0:
        return ["compressor=none"]
    if number == 1:
        return POLICY
    level, kind = divmod(number - 2, 3)
    if kind == 0:
        return ["compressor=powersgd", f"compressor.rank={level + 1}"]
    if kind == 1:
        return ["compressor=topk", f"compressor.density={0.5 / (level + 1):g}"]
    return ["compressor=qsgd", f"compressor.bits={2 + level % 7}", f"compressor.bucket_size={512 << level // 7}"]


def make(folder: Path, settings: int, arms: int, seeds: int, epochs: int) -> int:
    """Write run folders in the form that training writes; return their size in bytes.

    Args:
        folder: folder of the run folders.
        settings: numbers of workers, 2, 4, 8, ...
        arms, seeds: number of arms and seeds of each setting.
        epochs: number of epochs of each run.
    """
    about = environment()
    for workers in (2 << i for i in range(settings)):
        for number in range(arms):
            typed = ["model=resnet18", "dataset=cifar10", f"workers={workers}", f"epochs={epochs}", *typed_for(number)]
            cfg = compose(typed)
            for seed in range(seeds):
                run = RunFolder(folder / f"{workers}-{number}-{seed}")
                run.path.mkdir()
                run.write_config({**cfg, "seed": seed})
                command = shlex.join(["python", "-m", "accordion_bench", *typed, f"seed={seed}"])
                run.write_json("environment.json", {**about, "command": command})
                rows = [row(epoch, epochs, number, random.Random(seed)) for epoch in range(epochs)]
                (run.path / "metrics.jsonl").write_text(
                    "".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8"
                )
                run.finish(summary(rows, workers))
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def row(epoch: int, epochs: int, number: int, noise: random.Random) -> dict[str, Any]:
    """Return one row of metrics.jsonl, with every column that a run may have."""
    share, less = (epoch + 1) / epochs, 1 + 4 * number
    sent, dense = int(4e9 * share / less), int(4e9 * share)
    own = 3600 * share * (1 + noise.random() / 50)
    times = {"seconds": own, "data": own / 50, "compute": 0.8 * own, "exposed": own / 10, "update": own / 50}
    times |= {"policy": own / 100, "encode": own / 20, "comm": own / 40, "decode": own / 40, "warmup": 1.0}
    moving = number == 1
    return {
        "epoch": epoch,
        "step": 98 * (epoch + 1),
        "lr": 0.4 * 0.1 ** (2 * epoch // epochs),
        "train_loss": math.exp(-3 * share),
        "test_loss": math.exp(-2 * share),
        "accuracy": (0.94 - number / 1000) * (1 - math.exp(-6 * share)) + noise.random() / 200,
        "payload_bytes": sent,
        "wire_bytes": 3 * sent // 2,
        "inner_wire_bytes": 0,
        "rounds": int(30_000 * share),
        **dict.fromkeys(("control_bytes", "control_wire_bytes", "control_rounds", "eval_bytes", "setup_bytes"), 1000),
        "dense_bytes": dense,
        "dense_wire_bytes": 3 * dense // 2,
        "dense_rounds": int(30_000 * share),
        "entropy_bytes": None,
        "paper_floats": int(3.3e11 * share / less),
        **{key if key == "seconds" else f"{key}_seconds": value for key, value in times.items()},
        "modelled_seconds": own,
        "modelled_comm_seconds": own / 10,
        "modelled_dense_comm_seconds": own / 10,
        "plan": {
            "batch_size": 32,
            "lr_factor": 1.0,
            "period": 1,
            "levels": dict.fromkeys(MATRICES, 2 if epoch < 20 else 1) if moving else {},
        },
        "decisions": {"accordion": {"names": MATRICES, "norm": [noise.random() for _ in MATRICES]}} if moving else {},
        **({"norms": {name: noise.random() for name in NAMES}, "compression_error": 0.5} if moving else {}),
    }


def summary(rows: list[dict[str, Any]], workers: int) -> dict[str, Any]:
    """Return the summary.json of a run with these rows."""
    of_an_epoch = ("epoch", "step", "lr", "plan", "decisions", "norms", "compression_error", "accuracy")
    best = max(each["accuracy"] for each in rows)
    head = {"metric_name": "accuracy", "metric": rows[-1]["accuracy"], "best_metric": best, "epochs": len(rows)}
    return {
        **{k: v for k, v in rows[-1].items() if k not in of_an_epoch},
        **head,
        "workers": workers,
        "test_size": 10_000,
    }


def parts(folder: Path, out: Path) -> dict[str, tuple[float, float]]:
    """Return (seconds, seconds of the processors) of each part of a report; unlisted parts are small."""
    marks = [("", *now())]

    def lap(name: str) -> None:
        marks.append((name, *now()))

    arms, _ = group(read.read_runs([folder]))
    lap("load")
    together = settings(arms)
    for members in together:
        write.section(members)
        write.tex(members, 1)
    lap("tables")
    drawn = [found.figures for found in draw(together, out, write.names_of(every=False))]
    across = figures.draw_across(together, out)
    lap("figures")
    text = page([Section(*pair) for pair in zip(together, drawn, strict=True)], across, {})
    (out / "report.html").write_text(text, encoding="utf-8")
    lap("html")
    print(f"{sum(map(len, drawn)) + len(across)} figures, page of {len(text) / 1e6:.1f} MB\n")
    return {name: (a - b, c - d) for (_, b, d), (name, a, c) in pairwise(marks)}


class Whole(NamedTuple):
    """Costs of the command, with imports.

    seconds, processor: wall time and processor time until its end.
    first: seconds until its first output.
    memory: peak MB of all its processes, with shared memory counted once; None if unknown.
    """

    seconds: float
    processor: float
    first: float
    memory: float | None


def whole(folder: Path, out: Path) -> Whole:
    """Run the command in a separate process."""
    start, used = time.perf_counter(), sum(os.times()[2:4])
    command = [sys.executable, "-m", "accordion_bench.report", str(folder), "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - start
        reader = threading.Thread(target=process.stdout.read)
        reader.start()
        most = 0.0
        while reader.is_alive():
            most = max(most, memory_of(process.pid))
            reader.join(LOOK)
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} has ended with {process.returncode}")
    return Whole(time.perf_counter() - start, sum(os.times()[2:4]) - used, first, most or None)


def memory_of(pid: int) -> float:
    """Return the MB of a process and its children, with shared memory in proportion; 0 if unknown."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        own = next((int(line.split()[1]) / 1000 for line in lines if line.startswith("Pss:")), 0.0)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        return own + sum(map(memory_of, map(int, children)))
    return 0.0


def now() -> tuple[float, float]:
    """Return the time, and the processor time of this process and of the children that it has waited for."""
    return time.perf_counter(), sum(os.times()[:4])


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__)
    for name, default in (("settings", 5), ("arms", 4), ("seeds", 5), ("epochs", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--runs", type=int, help="in all, by more or fewer seeds")
    args = parser.parse_args()
    seeds = args.seeds if args.runs is None else max(1, args.runs // (args.settings * args.arms))
    print(f"{where()}; {environment()['load']} processes wanted to run before\n")
    with tempfile.TemporaryDirectory() as scratch:
        folder, out = Path(scratch, "runs"), Path(scratch, "out")
        folder.mkdir()
        out.mkdir()
        size = make(folder, args.settings, args.arms, seeds, args.epochs)
        count = args.settings * args.arms * seeds
        print(f"{count} runs x {args.epochs} epochs, settings: {args.settings}, {size / 1e6:.0f} MB;", end=" ")
        spent = parts(folder, out)
        total = whole(folder, out)
    print_head("part", "seconds", "of the processors")
    for name, (seconds, processor) in {**spent, "the whole command, with imports": total[:2]}.items():
        print_row(name, f"{seconds:.2f}", f"{processor:.2f}")
    print()
    targets = next((goal for most, goal in TARGETS.items() if count <= most), None)
    memory = math.nan if total.memory is None else total.memory
    for number, (name, value) in enumerate(
        {"seconds": total.seconds, "seconds until its first words": total.first, "MB at most": memory}.items()
    ):
        goal = "" if targets is None else f"; target {targets[number]:g}, {_met(value <= targets[number])}"
        print(f"- {name}: {value:.4g}{goal}")


def _met(met: bool) -> str:
    return "met" if met else "NOT met"


if __name__ == "__main__":
    main()
