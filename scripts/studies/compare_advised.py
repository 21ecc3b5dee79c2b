"""`advised` beside `lgreco` and `accordion`: their choices from the same errors on many links, and short trainings.

    python -m scripts.studies.compare_advised                       # about 10 minutes; finished runs are not made again
    python -m scripts.studies.compare_advised --epochs 3 --seeds 0  # a try

Write the tables of results/advice/advised.md. All times are modelled from timelines stored with the runs: of ResNet-20
on digits, two processes on this machine, recorded once by `comm.timeline()`.
"""

import argparse
import os
import platform
import re
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import accordion_bench as ab
from accordion_bench import train
from accordion_bench.adaptive.lgreco import Advised, Turn, choose, end, meanwhile, send_slots_of, total
from accordion_bench.compressors.compressor import Compressor
from accordion_bench.compressors.probe import wire_bytes
from accordion_bench.config.components import build_components, build_model
from accordion_bench.config.compose import compose
from accordion_bench.network.timeline_file import RecordedStep, read_timeline
from accordion_bench.options.units import human_bytes
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from scripts.bench.arms import as_a_run

WORKERS, BATCH, BUCKET_MB, LATENCY = 4, 32, 0.1, 5e-5
ALWAYS = ["model=resnet20", "dataset=digits", f"workers={WORKERS}", "comm=simulated", f"comm.bucket_cap_mb={BUCKET_MB}"]
LINKS = (10e6, 30e6, 100e6, 300e6, 1e9, 10e9)
PAGE, MARK = Path("results/advice/advised.md"), "<!-- tables -->"
TRAINED = (10e6, 100e6, 1e9)  # links of which there are trainings


@dataclass(frozen=True)
class Setting:
    """A compressor, and the uniform level whose error is the limit.

    levels: levels from which all of its policies choose.
    accordion: its two levels, strong first.
    """

    compressor: str
    knob: str
    reference: float
    levels: tuple[float, ...]
    accordion: tuple[float, float]


SETTINGS = (
    Setting("powersgd", "rank", 2, (1, 2, 3, 4, 1_000_000), (1, 2)),
    Setting("topk", "density", 0.01, (0.0025, 0.005, 0.01, 0.02, 0.04, 0.16, 1.0), (0.005, 0.02)),
)


# ---- runs


def record(rank: int, setting: Setting, path: str, store: str) -> None:
    """Run one of two processes of a training and write its timeline."""
    torch.set_num_threads(1)
    as_a_run()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    config = RunConfig.from_dict(compose(ALWAYS))
    model = build_model(config.model, build_components(config, WORKERS).dataset)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    policy = {"advised": {"levels": list(setting.levels), "reference": setting.reference}}
    options: dict[str, Any] = {"bucket_cap_mb": BUCKET_MB, "steps_per_epoch": 1000}
    comm = ab.attach(model, optimizer, setting.compressor, policy, **options)
    x, y = torch.randn(BATCH, 1, 8, 8), torch.randint(0, 10, (BATCH,))
    for step in range(80):
        if step == 20:
            comm.timeline(steps=50, path=path)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    comm.detach()
    dist.destroy_process_group()


def arms(setting: Setting) -> dict[str, list[str]]:
    """Return the overrides of each arm."""
    choice = [f"compressor={setting.compressor}", f"compressor.{setting.knob}={setting.reference}"]
    levels = "[" + ",".join(f"{level:g}" if level < 1 else str(int(level)) for level in setting.levels) + "]"
    strong, weak = setting.accordion

    def refined(name: str) -> list[str]:
        options = {"reference": setting.reference, "levels": levels, "samples": 5}
        return [*choice, f"adaptive={name}", *(f"adaptive.{name}.{key}={value}" for key, value in options.items())]

    def advised(bandwidth: float) -> list[str]:
        options = {"bandwidth": bandwidth, "latency": LATENCY, "timeline": "{timeline}"}
        return [*refined("advised"), *(f"adaptive.advised.{key}={value}" for key, value in options.items())]

    accordion = ["adaptive=accordion", f"adaptive.accordion.strong={strong}", f"adaptive.accordion.weak={weak}"]
    return {
        f"uniform, {setting.knob} {setting.reference:g}": choice,
        f"accordion, {strong:g} and {weak:g}": [*choice, *accordion, "adaptive.accordion.interval=2"],
        "lgreco": refined("lgreco"),
        **{f"advised for {megabits(link)}": advised(link) for link in TRAINED},
    }


def trained(typed: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run in this folder; run it if it has not finished."""
    done = [run for run in sorted(folder.glob("*")) if RunFolder(run).done]
    if not done:
        print(folder, flush=True)
        train.run(compose([*ALWAYS, *typed, f"paths.runs={folder}"]))
        done = [run for run in sorted(folder.glob("*")) if RunFolder(run).done]
    return RunFolder(done[-1]).read_metrics()


# ---- the model


class Tensors(NamedTuple):
    """Tensors with a level, and their costs: wire [tensors, levels], bytes of one worker's link."""

    names: list[str]
    levels: list[float]
    wire: np.ndarray
    step: RecordedStep

    def path(self, bandwidth: float) -> tuple[list[Turn], float]:
        """Return the path of exchanges and the wait on a link."""
        return send_slots_of(self.step, self.names, WORKERS, bandwidth, LATENCY), meanwhile(
            self.step.backward_end, bandwidth
        )

    def seconds(self, chosen: Sequence[int], bandwidth: float) -> float:
        """Return the modelled time of a step, in seconds."""
        return 8 * end(self.wire, chosen, *self.path(bandwidth)) / bandwidth

    def chosen(self, by_name: dict[str, float]) -> list[int]:
        """Return the levels of a plan as indices."""
        return [self.levels.index(by_name[name]) for name in self.names]


def tensors_of(setting: Setting, step: RecordedStep, names: list[str]) -> Tensors:
    """Return the tensors with their bytes at every level, as the ledger counts them."""
    config = RunConfig.from_dict(compose([*ALWAYS, f"compressor={setting.compressor}"]))
    compressor: Compressor = build_components(config, WORKERS).wrapped.compressor
    specs = {spec.name: spec for spec in step.specs}
    levels = sorted({*setting.levels, *setting.accordion})
    wire = [[wire_bytes(compressor, specs[name], level, WORKERS) for level in levels] for name in names]
    return Tensors(names, levels, np.array(wire), step)


def on_links(setting: Setting, step: RecordedStep, lgreco: list[dict], accordion: list[dict]) -> str:
    """Return the table of the choices of each policy in every epoch of a run of lgreco, from the errors of that run."""
    updates = [(row["epoch"], update) for row in lgreco for update in row["decisions"]["lgreco"]["updates"]]
    of = tensors_of(setting, step, updates[0][1]["names"])
    lines = [
        "| link | who | modelled step, ms | computation's share | wire bytes | error over the limit |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for bandwidth in LINKS:
        found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        for epoch, update in updates:
            errors = np.array([update["errors"][str(level)] for level in of.levels if str(level) in update["errors"]]).T
            where = [i for i, level in enumerate(of.levels) if str(level) in update["errors"]]
            own = of._replace(levels=[of.levels[i] for i in where], wire=of.wire[:, where])
            refined, limit = own.chosen(dict(zip(own.names, update["refined"], strict=True))), update["error_limit"]
            plan = next(row["plan"]["levels"] for row in accordion if row["epoch"] == epoch)
            picked = {
                "uniform": refined,
                "accordion": own.chosen(plan),
                "lgreco": choose(errors, own.wire, refined, limit, [Turn(0.0, 0.0, range(len(refined)))]),
                "advised": fastest(errors, own, refined, limit, bandwidth),
            }
            for who, levels in picked.items():
                numbers = own.seconds(levels, bandwidth), total(own.wire, levels), total(errors, levels) / limit
                found[who].append(numbers)
        for who, rows in found.items():
            seconds, sent, error = (statistics.fmean(row[k] for row in rows) for k in range(3))
            link = megabits(bandwidth) if who == "uniform" else ""
            share = f"{100 * step.backward_end / seconds:.0f} %"
            lines.append(f"| {link} | {who} | {1000 * seconds:.2f} | {share} | {human_bytes(sent)} | {error:.3f} |")
    return "\n".join(lines)


def fastest(errors: np.ndarray, of: Tensors, refined: list[int], limit: float, bandwidth: float) -> list[int]:
    """Return the choice of `advised`, by its own code."""
    policy = Advised(bandwidth=bandwidth)
    policy.turns, policy.wait = of.path(bandwidth)
    policy.rate = bandwidth
    return policy.best(errors, of.wire, refined, limit)[0]


def of_runs(setting: Setting, step: RecordedStep, runs: dict[str, list[list[dict]]]) -> str:
    """Return the table of trainings: accuracy over seeds, and the modelled steps of the plans in force."""
    lines = [
        "| arm | accuracy at the end, % (range) | wire bytes | "
        + " | ".join(f"step on {megabits(link)}, ms" for link in TRAINED)
        + " |",
        "|---|---:|---:|" + "---:|" * len(TRAINED),
    ]
    for arm, seeds in runs.items():
        last = [100 * rows[-1]["accuracy"] for rows in seeds]
        sent = statistics.fmean(rows[-1]["wire_bytes"] for rows in seeds)
        accuracy = f"{statistics.fmean(last):.2f} ({min(last):.2f} to {max(last):.2f})"
        steps = [f"{1000 * mean_step(setting, step, seeds, link):.2f}" for link in TRAINED]
        lines.append(f"| {arm} | {accuracy} | {human_bytes(sent)} | {' | '.join(steps)} |")
    return "\n".join(lines)


def mean_step(setting: Setting, step: RecordedStep, seeds: list[list[dict]], bandwidth: float) -> float:
    """Return the mean over epochs and seeds of the modelled step under the plan at the end of each epoch."""
    plans = [row["plan"]["levels"] for rows in seeds for row in rows]
    of = tensors_of(setting, step, list(plans[0]))  # of dense none has a level
    return statistics.fmean(of.seconds(of.chosen(plan), bandwidth) for plan in plans)


# ---- words


def megabits(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:g} Gbit/s" if bandwidth >= 1e9 else f"{bandwidth / 1e6:g} Mbit/s"


def folder_name(arm: str) -> str:
    return "-".join(re.findall(r"[\w.]+", arm))


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()


def about(step: RecordedStep) -> str:
    """Return a one-sentence summary of the timeline."""
    codec = sum(bucket.codec for bucket in step.buckets)
    first, last = min(step.ready), max(step.ready)
    return (
        f"Timeline: the backward pass is over after {1000 * step.backward_end:.1f} ms, gradients are ready from "
        f"{1000 * first:.1f} to {1000 * last:.1f} ms, in {len(step.buckets)} buckets; coding takes "
        f"{1000 * codec:.1f} ms."
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("results/runs/compare_advised"))
    parser.add_argument("--page", type=Path, default=PAGE, help="what stands above the mark there stays")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    parts = []

    def of_seeds(name: str, typed: Sequence[str]) -> list[list[dict]]:
        common = [f"epochs={args.epochs}", "checkpoint.every=0"]
        return [trained([*typed, *common, f"seed={s}"], args.runs / f"{name}-{args.epochs}-{s}") for s in args.seeds]

    dense = of_seeds("dense", [])
    for setting in SETTINGS:
        timeline = args.runs / f"timeline-{setting.compressor}.json"
        if not timeline.exists():
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(record, (setting, str(timeline), f"{folder}/store"), nprocs=2)
        step = read_timeline(timeline)
        typed = {arm: [word.format(timeline=timeline) for word in words] for arm, words in arms(setting).items()}
        runs = {arm: of_seeds(f"{setting.compressor}-{folder_name(arm)}", words) for arm, words in typed.items()}
        accordion = next(rows for arm, rows in runs.items() if arm.startswith("accordion"))
        limit = f"{setting.knob} {setting.reference:g}"
        parts += [
            f"## {setting.compressor}: at the error of {limit}",
            about(step),
            "### What each chooses of the same errors",
            on_links(setting, step, runs["lgreco"][0], accordion[0]),
            "### Trainings",
            of_runs(setting, step, {"dense": dense, **runs}),
        ]
    print("\n\n".join(parts))
    head = [
        f"`python -m scripts.studies.compare_advised --epochs {args.epochs}`, "
        f"commit {git('rev-parse', '--short', 'HEAD')}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, one thread a process; "
        f"n = {len(args.seeds)} seeds in the tables of trainings, and the epochs of one run in the others.",
    ]
    words = args.page.read_text(encoding="utf-8").partition(MARK)[0] if args.page.exists() else ""
    args.page.write_text("\n\n".join([words + MARK, *head, *parts]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
