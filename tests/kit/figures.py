"""Synthetic finished runs for every kind of figure, and the report's figures as objects."""

import copy
import functools
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import yaml
from matplotlib.figure import Figure

from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.report import BANDWIDTHS
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.grouping import group, settings
from accordion_bench.report.read import Run
from accordion_bench.report.render.figures import KINDS

LAYERS = [f"stages.0.{i}.conv.weight" for i in range(6)]


@functools.cache
def yaml_node(group, name):
    return yaml.safe_load((conf_dir() / group / f"{name}.yaml").read_text())


def node(group, name, **options):
    return {**copy.deepcopy(yaml_node(group, name)), **options}


def run(
    compressor="none", seed=0, adaptive=None, sync="every_step", period=None, end=0.9, cost=1.0, spread=0.004, **changes
):
    """Return a finished run of 6 epochs with every column; `changes` are options of the compressor or of the run.

    Args:
        end: metric after the last epoch.
        cost: bytes as a share of dense.
        spread: spread of the metric over seeds.
    """
    metric = changes.pop("metric", "accuracy")
    epochs, shared = changes.pop("epochs", 6), changes.pop("shared", False)
    of_run = {key: changes.pop(key) for key in ("workers", "batch_size", "scale", "target") if key in changes}
    policy = {adaptive: node("adaptive", adaptive)} if adaptive else {}
    config = {
        "model": node("model", "resnet8"),
        "dataset": node("dataset", "digits"),
        "compressor": node("compressor", compressor, **changes),
        "sync": node("sync", sync, **({"period": period} if period else {})),
        "adaptive": policy,
        "network": {"bandwidth": 1e9, "latency": 5e-5},
        "seed": seed,
        "epochs": epochs,
        "batch_size": 32,
        "workers": 4,
        "choices": {"model": "resnet8", "dataset": "digits", "compressor": compressor, "sync": sync},
        **of_run,
    }
    own = zlib.crc32(f"{compressor} {adaptive} {sync} {period} {sorted(changes.items())} {seed}".encode()) % 5 - 2
    noise = spread * ((seed * 7919) % 5 - 2) + 0.1 * spread * own  # of the seed, and of the arm with this seed
    rows = []
    for epoch in range(epochs):
        away = math.exp(-epoch)
        value = end + noise - 0.5 * away if metric == "accuracy" else (end + 10 * noise) * (1 + 9 * away)
        wire, rounds = int(1.5e6 * cost * (epoch + 1)), 60 * (epoch + 1)
        compute, comm = 0.2 * (epoch + 1), 8 * (wire + 30) / 1e9 + (rounds + 3) * 5e-5
        level = 0.2 + 0.1 * (epoch > 1)
        parts = {"data": 0.01, "compute": 0.8, "exposed": 0.12, "update": 0.04, "policy": 0.03}
        inside = {"encode": 0.05, "comm": None if shared else 0.06, "decode": 0.01}
        spent = {f"{k}_seconds": None if v is None else v * (epoch + 1) for k, v in (parts | inside).items()}
        rows.append(
            {
                "epoch": epoch,
                "step": 10 * (epoch + 1),
                "lr": 0.1 if epoch < 3 else 0.01,
                metric: value,
                "payload_bytes": int(1e6 * cost * (epoch + 1)),
                "wire_bytes": wire,
                "rounds": rounds,
                "control_wire_bytes": 30,
                "control_rounds": 3,
                **spent,
                "seconds": (epoch + 1) * sum(parts.values()),
                "modelled_seconds": compute + comm,
                "modelled_comm_seconds": comm,
                "plan": {
                    "batch_size": 32,
                    "levels": levels(epoch) if adaptive == "accordion" else {},
                    "codebooks": {"2": [-1.0, -level, level, 1.0]} if adaptive == "alq" else {},
                },
                "decisions": {"accordion": {"names": LAYERS, "norm": [1.0 + epoch] * 6}} if adaptive else {},
                "norms": {layer: math.exp(-epoch) * (1 + i) for i, layer in enumerate(LAYERS)} if policy else None,
                "simulated_seconds": 1.5 * (epoch + 1) if period else None,
                "consensus_distance": 0.3 * away if period else None,
                "compression_error": 0.1 / (epoch + 1) if compressor == "qsgd" else None,
            }
        )
    keep = {key: value for key, value in rows[-1].items() if key.endswith(("_bytes", "seconds", "rounds"))}
    summary = {**keep, "metric_name": metric, "metric": rows[-1][metric], "best_metric": rows[-1][metric]}
    summary |= {"epochs": epochs, "workers": config["workers"]}
    return Run(Path(f"{compressor}-{seed}"), config, {}, summary, rows)


def levels(epoch):
    return {layer: 2 if epoch < 2 + i % 3 else 1 for i, layer in enumerate(LAYERS)}


def arms_of(*runs):
    return group(runs)[0]


@functools.cache
def everything(metric="accuracy", **changes):
    """Return ten arms with three seeds, whose runs produce every figure of one setting."""
    scale = {"accuracy": (0.9, 1), "perplexity": (100, -100)}[metric]

    def score(bonus):
        return scale[0] + scale[1] * bonus

    made = []
    for seed in (0, 1, 2):
        target = {"accuracy": 0.7, "perplexity": 150}[metric]
        of = functools.partial(run, seed=seed, metric=metric, target=target, **changes)
        made += [
            of(end=score(0.03)),
            of("powersgd", rank=1, end=score(0.0), cost=0.02),
            of("powersgd", rank=2, end=score(0.02), cost=0.04),
            of("powersgd", adaptive="accordion", end=score(0.02), cost=0.03),
            of("qsgd", bits=2, bucket_size=64, end=score(-0.02), cost=0.1),
            of("qsgd", bits=4, bucket_size=64, end=score(0.01), cost=0.2),
            of("qsgd", bits=4, bucket_size=512, end=score(0.0), cost=0.19),
            of("qsgd", adaptive="alq", bits=2, bucket_size=64, end=score(0.0), cost=0.1),
            of(sync="local_sgd", period=2, end=score(0.02), cost=0.5),
            of(sync="local_sgd", period=8, end=score(0.01), cost=0.12),
        ]
    return arms_of(*made)


def across():
    made = [run(sync="local_sgd", period=h, workers=w, seed=s) for h in (2, 8) for w in (2, 4, 8) for s in (0, 1)]
    return settings(arms_of(*made, *(run(workers=w) for w in (2, 4, 8))))


def figures_of(
    arms: Sequence[Arm], bandwidths: Sequence[float] = BANDWIDTHS, only: Sequence[str] = ()
) -> dict[str, Figure]:
    """Return the figures of one setting by name, in the order of KINDS, without empty ones.

    Args:
        only: names of the figures to draw; () = all.
    """
    drawn = {name: kind.draw(arms, bandwidths) for name, kind in KINDS.items() if not only or name in only}
    return {name: figure for name, figure in drawn.items() if figure is not None}
