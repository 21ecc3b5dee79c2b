"""How long the report of many long runs takes, part by part, on made-up run folders; prints Markdown.

python -m scripts.bench_report                                             # 100 runs of 300 epochs in 5 settings
python -m scripts.bench_report --settings 1 --arms 34 --seeds 3            # one setting with many arms
"""

import argparse
import json
import math
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from accordion_bench.config.compose import compose
from accordion_bench.report.compare.grouping import group, settings
from accordion_bench.report.read import load
from accordion_bench.report.render import figures, write
from accordion_bench.report.render.draw import draw
from accordion_bench.report.render.page import Section, page
from accordion_bench.runs.environment import environment
from accordion_bench.runs.folder import RunFolder

MATRICES = [f"stages.{stage}.{block}.conv{i}.weight" for stage in range(4) for block in range(2) for i in (1, 2)]
NAMES = [*MATRICES, *(f"{name.replace('conv', 'bn')}" for name in MATRICES), "conv.weight", "fc.weight", "fc.bias"]
POLICY = ["compressor=powersgd", "adaptive=accordion", "measure.norms=true", "measure.error=true"]
TARGET = 10  # seconds


def typed_for(number: int) -> list[str]:
    """What is typed for an arm: dense, Accordion, then PowerSGD, TopK and QSGD at rising levels."""
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
    """Write run folders as training leaves them; returns their size in bytes.

    Args:
        folder: for the run folders.
        settings: numbers of workers, 2, 4, 8, ...
        arms, seeds: of each setting.
        epochs: of each run.
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
    """One row of metrics.jsonl, with every column that a run may have."""
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
    """summary.json of a run with these rows."""
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
    """(seconds, seconds of the processors) of each part of a report; what is not listed is small."""
    marks = [("", *now())]

    def lap(name: str) -> None:
        marks.append((name, *now()))

    arms, _ = group(load.read_runs([folder]))
    lap("load")
    together = settings(arms)
    for members in together:
        write.section(members)
        write.tex(members, 1)
    lap("tables")
    drawn = [found.figures for found in draw(together, out, figures.BANDWIDTHS)]
    across = figures.draw_across(together, out)
    lap("figures")
    text = page([Section(*pair) for pair in zip(together, drawn, strict=True)], across, {})
    (out / "report.html").write_text(text, encoding="utf-8")
    lap("html")
    print(f"{sum(map(len, drawn)) + len(across)} figures, page of {len(text) / 1e6:.1f} MB\n")
    return {name: (a - b, c - d) for (_, b, d), (name, a, c) in pairwise(marks)}


def whole(folder: Path, out: Path) -> tuple[float, float]:
    """(seconds, seconds of the processors) of the command, with imports."""
    start = now()
    command = [sys.executable, "-m", "accordion_bench.report", str(folder), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    end = now()
    return end[0] - start[0], end[1] - start[1]


def now() -> tuple[float, float]:
    """Time, and what this process and those it has waited for have used of the processors."""
    return time.perf_counter(), sum(os.times()[:4])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("settings", 5), ("arms", 4), ("seeds", 5), ("epochs", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    about = environment()
    print(f"commit {about['commit']}, {about['processor']}, {about['cpu_cores']} cores, {about['versions']}\n")
    with tempfile.TemporaryDirectory() as scratch:
        folder, out = Path(scratch, "runs"), Path(scratch, "out")
        folder.mkdir()
        out.mkdir()
        size = make(folder, args.settings, args.arms, args.seeds, args.epochs)
        count = args.settings * args.arms * args.seeds
        print(f"{count} runs x {args.epochs} epochs, settings: {args.settings}, {size / 1e6:.0f} MB;", end=" ")
        spent = parts(folder, out)
        total = whole(folder, out)
    print("| part | seconds | of the processors |\n|---|---|---|")
    for name, (seconds, processor) in spent.items():
        print(f"| {name} | {seconds:.2f} | {processor:.2f} |")
    met = "met" if total[0] <= TARGET else "NOT met"
    print(f"| the whole command, with imports (target {TARGET} s: {met}) | {total[0]:.2f} | {total[1]:.2f} |")


if __name__ == "__main__":
    main()
