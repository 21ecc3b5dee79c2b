"""Local methods and adaptive policies against dense, on digits and on a part of CIFAR-10: run missing cells within a
time budget, and make the tables and figures of results/local_methods from all finished runs.

    python -m scripts.studies.local_methods --data DATA              # DATA/cifar-10-batches-py; without, only digits
    python -m scripts.studies.local_methods --data DATA --minutes 5  # stops after that, and goes on there next time
    python -m scripts.studies.local_methods --minutes 0              # no runs: tables and figures only
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import yaml

from accordion_bench.config.compose import compose
from accordion_bench.config.validate import validate
from accordion_bench.options import advice
from accordion_bench.options.units import human_bytes
from accordion_bench.processes.placement import place
from accordion_bench.report.compare.arms import Arm, fingerprint
from accordion_bench.report.compare.columns import tidy
from accordion_bench.report.compare.grouping import group
from accordion_bench.report.compare.intervals import show_ratio, show_times
from accordion_bench.report.compare.verdicts import verdicts
from accordion_bench.report.read import Run, read_runs
from accordion_bench.report.render import captions, write
from accordion_bench.report.render.figures.sheet import save, styled
from accordion_bench.report.render.tables import aligned, folded
from accordion_bench.report.render.write import provenance
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import checkpoint
from scripts.few_colours import reduce_colours
from scripts.studies.draw_kept import draw

# one momentum for all, so that schemes differ in nothing else
ALWAYS = ["model=resnet8", "workers=4", "comm=simulated", "network=1gbit", "optimizer.nesterov=false"]
SETTINGS = {
    "digits": ["dataset=digits"],
    "cifar10": ["dataset=cifar10", "dataset.subset=5000", "dataset.limit_eval=2000", "schedule.warmup_epochs=2"],
}
# {interval}: a tenth of the epochs, {freq}: a quarter
ARMS = {
    "dense": [],
    "local SGD, H 4": ["adaptive=local_sgd", "sync.period=4"],
    "local SGD, H 16": ["adaptive=local_sgd", "sync.period=16"],
    "post-local SGD": ["adaptive=post_local_sgd"],
    "SlowMo": ["adaptive=slowmo"],
    "DiLoCo": ["adaptive=diloco"],
    "DiLoCo, one worker": ["adaptive=diloco", "workers=1", "batch_size=128", "optimizer.lr=0.4"],  # its control
    "Accordion, rank": ["compressor=powersgd", "adaptive=accordion", "adaptive.accordion.interval={interval}"],
    "Accordion, density": ["compressor=topk", "adaptive=accordion", "adaptive.accordion.interval={interval}"],
    "Accordion, batch": ["adaptive=accordion_batch", "adaptive.accordion_batch.interval={interval}"],
    "Accordion, period": ["adaptive=accordion_sync", "adaptive.accordion_sync.interval={interval}"],
    "AdaBatch": ["adaptive=adabatch", "adaptive.adabatch.freq={freq}"],
}
STARTED = """\
`{command}`. ResNet-8 (75 thousand parameters), 4 workers, on 8×8 images and on a tenth of CIFAR-10 for few epochs: a
check that every method trains, what it sends and in how many rounds; no evidence about large models or long training.
No option has been tuned for any arm: each has its defaults in `conf/`, with shorter intervals between decisions where
epochs are few. **Computation was measured with {jobs} runs at a time**: modelled times carry the noise of that (see
their intervals), their part that is communication none.
"""


@dataclass(frozen=True)
class Cell:
    """One run of the tables.

    Args:
        setting: name of the data set.
        arm: name in ARMS.
        seed: seed of the run.
        overrides: overrides of the run without the seed and the folders.
        key: configuration, equal for runs that compute the same.
    """

    setting: str
    arm: str
    seed: int
    overrides: tuple[str, ...]
    key: str

    @property
    def name(self) -> str:
        return f"{self.setting}, {self.arm}, seed {self.seed}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with cifar-10-batches-py")
    parser.add_argument("--minutes", type=float, default=25, help="for the runs; what is unfinished goes on next time")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--epochs", type=int, default=30, help="on digits")
    parser.add_argument("--cifar-epochs", type=int, default=10)
    parser.add_argument("--only", default="", help="make only runs of arms whose names contain this text")
    parser.add_argument("--runs", type=Path, default=Path("results/runs/local_methods"))
    parser.add_argument("--out", type=Path, default=Path("results/local_methods"))
    args = parser.parse_args()
    cells, refused = planned(args)
    train(cells, args)
    report(cells, refused, args)


def planned(args: argparse.Namespace) -> tuple[list[Cell], list[str]]:
    """Return all cells, every arm's first seed first, and a sentence for each arm that cannot be composed."""
    arms, refused = [], []
    for setting, chosen in SETTINGS.items():
        if setting == "cifar10" and not args.data:
            print("no --data: digits only", flush=True)
            continue
        epochs = args.cifar_epochs if setting == "cifar10" else args.epochs
        numbers = {"interval": max(1, epochs // 10), "freq": max(1, epochs // 4)}
        for arm, options in ARMS.items():
            typed = [*ALWAYS, *chosen, f"epochs={epochs}", *(option.format(**numbers) for option in options)]
            try:
                cfg = compose([*typed, f"paths.runs={args.runs}"])
                config = RunConfig.from_dict(cfg)
                validate(config, place(config))
            except Exception as error:  # e.g. a policy that this version does not have
                refused.append(f"{setting}, {arm}: {advice.explain(error) or repr(error)}")
                continue
            arms.append((setting, arm, tuple(typed), key_of(Run(Path(), yaml.safe_load(yaml.safe_dump(cfg))))))
    for sentence in refused:
        print(f"left out: {sentence}", flush=True)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    return [Cell(setting, arm, seed, typed, key) for seed in seeds for setting, arm, typed, key in arms], refused


def key_of(run: Run) -> str:
    """Return a key that is equal for runs that differ only in the seed; a future run has no processes."""
    options = {key: value for key, value in fingerprint(run).items() if key != "processes"}
    return json.dumps(options, sort_keys=True)


def found(cells: Sequence[Cell], runs: Path) -> dict[Cell, Run]:
    """Return the run of each cell that has one: a finished one, else the most advanced one."""
    by_key: dict[tuple[str, int | None], list[Run]] = {}
    for run in read_runs([runs]) if runs.is_dir() else []:
        if run.config:
            by_key.setdefault((key_of(run), run.seed), []).append(run)
    best = {cell: by_key.get((cell.key, cell.seed), []) for cell in cells}
    return {cell: max(of, key=lambda run: (run.finished, len(run.rows))) for cell, of in best.items() if of}


def diverged(run: Run) -> bool:
    """Whether the run diverged, so that a repetition would end in the same way."""
    return run.summary.get("stopped_by") == "NonFinite"


# ---- running


def train(cells: Sequence[Cell], args: argparse.Namespace) -> None:
    """Run unfinished cells, several at once, until the time is over; active runs then save their states."""
    there, deadline = found(cells, args.runs), time.monotonic() + 60 * args.minutes
    todo = [cell for cell in cells if cell not in there or not (there[cell].finished or diverged(there[cell]))]
    todo = [cell for cell in todo if args.only.lower() in cell.arm.lower()]
    print(f"{len(cells)} runs, {len(todo)} of them to make", flush=True)
    waiting, count = iter(todo), 0
    active: dict[subprocess.Popen[bytes], tuple[Cell, float]] = {}
    try:
        while time.monotonic() < deadline:
            while len(active) < args.jobs and (cell := next(waiting, None)):
                active[start(cell, there.get(cell), args)] = cell, time.monotonic()
            if not active:
                return
            for process in [process for process in active if process.poll() is not None]:
                count += 1
                tell(f"{count}/{len(todo)}", process, *active.pop(process))
            time.sleep(0.1)
    finally:  # time is up, or Ctrl-C, which the runs have got themselves
        for process in active:
            process.send_signal(signal.SIGTERM)
        for process, started in active.items():
            tell("stopped", process, *started)


def start(cell: Cell, run: Run | None, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a cell, or resume its stopped run."""
    if run is not None and checkpoint.latest(run.path):
        typed = [f"resume={run.path}"]
    else:
        typed = [*cell.overrides, f"seed={cell.seed}", f"paths.runs={args.runs}"]
    data = [f"paths.data={args.data}"] if cell.setting == "cifar10" else []
    command = [sys.executable, "-m", "accordion_bench", *typed, *data]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def tell(count: str, process: subprocess.Popen[bytes], cell: Cell, since: float) -> None:
    """Print one line for a run that has ended."""
    lines = process.communicate()[1].decode(errors="replace").strip().splitlines() or [""]
    why = "" if process.returncode == 0 else f": {lines[-1]}"
    print(f"{count}  {cell.name}: {time.monotonic() - since:.1f} s{why}", flush=True)


# ---- tables and figures


def report(cells: Sequence[Cell], refused: Sequence[str], args: argparse.Namespace) -> None:
    """Write table.csv, the figures and README.md from the finished runs."""
    there, out = found(cells, args.runs), args.out
    runs = [there[cell] for cell in by_arm(cells) if cell in there and there[cell].finished]
    if not runs:
        print("nothing has finished: no tables")
        return
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("tradeoff-*"), *out.glob("rows-*")]:
        old.unlink()  # maybe of a setting that is no longer in the tables, or of an older table (draw_kept.py)
    parts, tables = [], []
    for setting in SETTINGS:
        arms, _ = group([run for run in runs if run.config["choices"]["dataset"] == setting])
        if arms:
            parts.append(section(setting, arms, out))
            tables.append(tidy(arms))
    pd.concat(tables).to_csv(out / "table.csv", index=False)
    missing = [cell for cell in by_arm(cells) if cell not in there or not there[cell].finished]
    absent = "\n".join(f"- {line}" for line in [*refused, *(f"{c.name}: {state(there.get(c))}" for c in missing)])
    said = out / "what_it_says.md"  # written by hand; everything else here is made anew
    command = "python -m scripts.studies.local_methods --data DATA"
    text = [
        "# Local methods and adaptive policies against dense",
        STARTED.format(command=command, jobs=args.jobs).rstrip(),
        f"## What it says\n\n{said.read_text(encoding='utf-8').strip()}" if said.exists() else "",
        *parts,
        f"## In no table\n\n{absent}" if absent else "",
        provenance(runs, list(commands([cell for cell in by_arm(cells) if cell not in missing]))),
    ]
    (out / "README.md").write_text(folded("\n\n".join(filter(None, text))) + "\n", encoding="utf-8")
    print(f"{len(runs)} of {len(cells)} runs in {out}")


def by_arm(cells: Sequence[Cell]) -> list[Cell]:
    """Return the arms in the order of the table."""
    return sorted(cells, key=lambda cell: (list(SETTINGS).index(cell.setting), list(ARMS).index(cell.arm), cell.seed))


def state(run: Run | None) -> str:
    """Return the reason why a cell is in no table."""
    return "not started" if run is None else write.unfinished(run).partition("): ")[2]


def commands(cells: Sequence[Cell]) -> Iterator[str]:
    """Return one command per arm and setting, for all its seeds."""
    seeds: dict[tuple[str, ...], list[int]] = {}
    for cell in cells:
        seeds.setdefault(cell.overrides, []).append(cell.seed)
    for overrides, of in seeds.items():
        several = ["-m"] if len(of) > 1 else []
        seed = f"seed={','.join(map(str, of))}"
        yield shlex.join(["python", "-m", "accordion_bench", *several, *overrides, seed])


def section(setting: str, arms: Sequence[Arm], out: Path) -> str:
    """Return the heading, table, figure and text of one setting."""
    with styled():
        png = save(draw(tidy(arms)), out / f"rows-{setting}")
    reduce_colours(png)
    dense = next((arm for arm in arms if arm.dense), None)
    images = arms[0].runs[0].summary["test_size"]
    notes = [
        "Accuracy: after the last epoch, mean over the seeds; std: the sample's standard deviation, in points; "
        "±: Student's 95 % t-interval. "
        f"One of the {images:,} test images is {100 / images:.2g} points.",
        f"{captions.sent(arms)} Rounds: of messages, one after another.",
        *captions.modelled(arms),
    ]
    lists = ["\n".join(f"- {line}" for line in lines) for lines in (notes, verdicts(arms))]
    return "\n\n".join(
        [
            f"## {captions.heading(arms[0])}",
            markdown(tidy(arms), dense),
            f"![{png.stem}]({png.name})",
            lists[0],
        ]
        + ([lists[1]] if dense else [])
    )


def markdown(table: pd.DataFrame, dense: Arm | None) -> str:
    """Return the table of one setting."""
    heading = ["arm", "n", "accuracy", "std", "payload", "wire", "vs dense", "rounds", "vs dense"]
    heading += ["modelled time", "vs dense", "modelled comm.", "vs dense"]
    cells = [heading]
    for row in table.to_dict("records"):
        communication = row["modelled_comm_seconds"]
        cells.append(
            [
                row["arm"],
                str(row["n"]),
                f"{100 * row['accuracy']:.2f} %",
                "–" if row["n"] < 2 else f"{100 * row['accuracy_std']:.2f}",
                human_bytes(row["payload_bytes"]),
                human_bytes(row["wire_bytes"]),
                show_times(row["wire_times_less"]),
                f"{row['rounds']:,.0f}",
                show_times(row["rounds_times_less"]),
                f"{row['modelled_seconds']:.2f}"
                + (f" ± {row['modelled_seconds_ci95']:.2f} s" if row["n"] > 1 else " s"),
                show_ratio(row, "modelled_seconds"),
                f"{communication:.3f} s",
                "–" if dense is None else f"{communication / dense.mean('modelled_comm_seconds'):.2f}x",
            ]
        )
    return aligned(cells)


if __name__ == "__main__":
    main()
