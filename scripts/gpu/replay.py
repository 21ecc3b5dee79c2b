"""What replayed steps are worth on a GPU, in one command of at most nine minutes: the same bits, then times.

    python -m scripts.gpu.replay                                # a machine with CUDA; results/gpu/replay
    python -m scripts.gpu.replay --only replay                  # some sections
    python -m scripts.gpu.replay --device cpu --out FOLDER      # anywhere: on a tape, as small as it goes

Sections: `requests`, what a step asks of a device, counted on one that is not there; `ceilings`, a copy, a matrix
product, an empty kernel and a graph of 200; `replay`, eager steps and replayed ones from the same start, to the bit;
`exchange`, the same of every compressor alone, with times and kernels; `workers`, four workers in one process, eager,
replayed, and replayed all at once, next to a plain loop of the same images, with predictions beside what was found.
What is known is on disk before the next section begins. Ends with 1 where bits differ.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.conformance.placement import TapeGraphs
from accordion_bench.conformance.pretend_device import pretended
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.report.render.tables import folded
from accordion_bench.training import training_step as training
from accordion_bench.training.trainer import Trainer
from scripts.bench.arms import our_step, plain_step, trainer_for
from scripts.bench.harness import interleaved
from scripts.gpu import exchange as exchanges
from scripts.gpu.report import header
from scripts.gpu.sections import Setting, table
from scripts.gpu.steps import plain_network
from scripts.packed import write_packed

WORKERS = 4
IMAGES = ["dataset=synthetic"]
BITS = [  # what is compared to the bit
    [*IMAGES, "model=resnet8", "batch_size=16"],
    [*IMAGES, "model=vgg19", "model.width=8", "model.classifier=paper", "batch_size=16"],
    [*IMAGES, "model=resnet8", "batch_size=16", "compressor=powersgd", "compressor.min_compression_rate=0"],
    [*IMAGES, "model=resnet8", "batch_size=16", "compressor=topk"],
    [*IMAGES, "model=resnet8", "batch_size=16", "compressor=efsignsgd"],
    [*IMAGES, "model=resnet8", "batch_size=16", "compressor=qsgd"],
    [*IMAGES, "model=resnet8", "batch_size=16", "optimizer=adamw", "precision=bfloat16"],
    [*IMAGES, "model=resnet8", "batch_size=16", "sync=local_sgd", "sync.period=4"],
]
STEPS = 9
MODELS = {"ResNet-18": "model=resnet18", "VGG-19": "model=vgg19"}
HOW = {
    "bfloat16, channels_last": ["precision=bfloat16", "channels_last=true"],
    "TF32, channels_last": ["channels_last=true"],
}
AT_ONCE = [f"workers_at_once={WORKERS}"]
# share of the plain loop's speed, predicted before anything was measured: one worker after another, and all at once
PREDICTED = {
    ("ResNet-18", "bfloat16, channels_last"): (0.82, 0.90),
    ("VGG-19", "bfloat16, channels_last"): (0.72, 0.84),
    ("ResNet-18", "TF32, channels_last"): (0.85, 0.91),
    ("VGG-19", "TF32, channels_last"): (0.85, 0.91),
}
PROFILED = ("none, replayed", "a plain loop")
ARMS = {"eager": (False, []), "replayed": (True, []), "replayed at once": (True, AT_ONCE)}


@dataclass(frozen=True)
class Asked:
    """device: `cuda` or `cpu`; rounds: of every time; out: folder of the page.

    names: of compressors, none = all; seconds: after these a section that takes long begins nothing more.
    """

    device: str
    rounds: int
    out: Path
    names: list[str] = field(default_factory=list)
    seconds: float = 150.0

    @property
    def tiny(self) -> bool:
        """As small as it goes."""
        return self.device != "cuda"


def made(overrides: list[str], asked: Asked, replays: bool, workers: int = WORKERS) -> Trainer:
    """A trainer whose steps are replayed, or not; on a CPU a tape stands in for graphs."""
    before = training.graphs_of
    if replays and asked.device != "cuda":
        training.graphs_of = lambda device: TapeGraphs()
    try:
        typed = [*overrides, f"graphs={'null' if replays else 'false'}"]
        trainer = trainer_for(typed, Comm(workers, device=asked.device))
    finally:
        training.graphs_of = before
    trainer.runner.finite.late = True
    return trainer


def requests(asked: Asked) -> tuple[list[str], dict[str, Any]]:
    """What a step of four workers asks of the device: kernels or graphs, waits, uploads."""
    model = "model=resnet8" if asked.tiny else "model=resnet18"
    rows, found = [], {}
    for name in ("none", "powersgd", "topk", "qsgd"):
        counted = {}
        for replays in (False, True):
            with pretended() as counts:
                typed = [*IMAGES, model, "batch_size=2", f"compressor={name}", "dataset.train_size=512"]
                trainer = made(typed, Asked("meta", 1, asked.out), replays)
                for _ in range(14):
                    counts.reset()
                    trainer.train_step()
                launches, waits = sum(counts.launches.values()), sum(counts.waits.values())
                counted["replayed" if replays else "eager"] = [
                    launches,
                    counts.launches["graph"],
                    waits,
                    counts.uploads,
                ]
        found[name] = counted
        rows.append([name, *counted["eager"][:1], *counted["replayed"][:2], *counted["replayed"][2:]])
    return table([model, "eager requests", "replayed", "of them graphs", "waits", "uploads"], rows), found


def ceilings(asked: Asked) -> tuple[list[str], dict[str, Any]]:
    """What the card can do, which every other number is read against."""
    if asked.tiny:
        return ["Needs CUDA."], {}
    size = 1_073_741_824
    x, y = torch.empty(size, device="cuda"), torch.randn(size, device="cuda")
    copy = timed(lambda: x.copy_(y))
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = timed(lambda: matrix @ matrix)
    small = torch.zeros(1, device="cuda")
    launch = timed(lambda: [small.add_(1) for _ in range(200)]) / 200
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(200):
            small.add_(1)
    node = timed(graph.replay) / 200
    found = {
        "copy, TB/s": (8 * size / copy / 1e12, 4.3),
        "bf16 product, TFLOP/s": (2 * 8192**3 / product / 1e12, 790),
        "a launch, µs": (1e6 * launch, 7.5),
        "a node of a graph, µs": (1e6 * node, 1.5),
    }
    rows = [[name, f"{value:.3g}", predicted] for name, (value, predicted) in found.items()]
    return table(["", "found", "predicted"], rows), {name: value for name, (value, _) in found.items()}


def timed(work: Callable[[], object], times: int = 20) -> float:
    """Seconds of one, the median of seven rounds of so many."""
    seconds = []
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            work()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / times)
    return statistics.median(seconds[1:])


def replay(asked: Asked) -> tuple[list[str], dict[str, Any]]:
    """Whether replayed steps compute what eager ones do."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    rows, found = [], {}
    for overrides in BITS[:1] if asked.tiny else BITS:
        name = " ".join(item for item in overrides if item not in IMAGES)
        tiny = ["dataset.train_size=1024", "dataset.test_size=8", *(["batch_size=2"] if asked.tiny else [])]
        eager, replayed, at_once = (made([*overrides, *tiny, *own], asked, replays) for replays, own in ARMS.values())
        for trainer in (eager, replayed, at_once):
            with trainer.step.graphs.training():
                for _ in range(STEPS):
                    trainer.train_step()
        differs = [first_difference(eager, other) for other in (replayed, at_once)]
        reasons = "; ".join(f"{work}: {why}" for work, why in replayed.step.replayed.eager.items())
        rows.append([name, *(difference or "the same bits" for difference in differs), reasons or "none"])
        found[name] = {"differs": "; ".join(filter(None, differs)), "eager": replayed.step.replayed.eager}
        del eager, replayed, at_once, trainer
    torch.use_deterministic_algorithms(False)
    return table([f"{STEPS} steps of {WORKERS} workers", *list(ARMS)[1:], "stays eager"], rows), found


def first_difference(one: Trainer, other: Trainer) -> str:
    """The first tensor in which two trainers differ; "" = none."""
    names = [spec.name for spec in one.axis.specs]
    kinds = {
        "gradient": zip(names, one.axis.gradients_W, other.axis.gradients_W, strict=True),
        "buffer": zip(one.axis.buffers_W, one.axis.buffers_W.values(), other.axis.buffers_W.values(), strict=True),
        "parameter": zip(names, one.axis.shared, other.axis.shared, strict=True),
    }
    for kind, pairs in kinds.items():
        for name, x, y in pairs:
            if not torch.equal(x, y):
                return f"{kind} {name}, by up to {(x - y).abs().max().item():.3g}"
    return ""


def workers(asked: Asked) -> tuple[list[str], dict[str, Any]]:
    """Four workers in one process next to a plain loop whose batch is theirs together."""
    batch = 2 if asked.tiny else 128
    rows: list[list[str]] = []
    facts: dict[str, Any] = {}
    end = time.monotonic() + asked.seconds
    for model, typed in {"ResNet-8": "model=resnet8"}.items() if asked.tiny else MODELS.items():
        for how, options in list(HOW.items())[: 1 if asked.tiny else None]:
            if time.monotonic() > end:
                rows.append([f"{model}, {how}", "not reached", "", "", ""])
                continue
            torch.backends.cudnn.benchmark = True
            common = [*IMAGES, typed, *options]
            size = ["dataset.train_size=64", "dataset.test_size=8"] if asked.tiny else []
            arms: dict[str, Callable[[], None]] = {}
            for name in ("none", "powersgd"):
                for how_often, (replays, more) in ARMS.items():
                    own = made([*common, *size, f"batch_size={batch}", f"compressor={name}", *more], asked, replays)
                    arms[f"{name}, {how_often}"] = our_step(own)
            alone = made([*common, *size, f"batch_size={WORKERS * batch}"], asked, False, workers=1)
            arms["a plain loop"] = plain_step(alone, plain_network(alone))
            with torch.enable_grad():
                found = interleaved(arms, asked.rounds, 1 if asked.tiny else 10, asked.device)
            facts[f"{model}, {how}"] = found
            if not asked.tiny:
                with torch.enable_grad():
                    timed_kernels = {arm: exchanges.kernels(arms[arm])[:12] for arm in PROFILED}
                facts[f"{model}, {how}: kernels of a step"] = timed_kernels
            for arm, seconds in found.items():
                shares = [own and plain / own for own, plain in zip(seconds, found["a plain loop"], strict=True)]
                predicted = dict(zip(list(ARMS)[1:], PREDICTED.get((model, how), ("", "")), strict=True))
                told = str(predicted.get(arm.removeprefix("none, "), ""))
                ms = f"{1000 * statistics.median(seconds):.2f}"
                rows.append([f"{model}, {how}", arm, ms, f"{statistics.median(shares):.3f}", told])
            del arms, alone
    return table(["", "arm", "ms a step", "speed, of the plain loop's", "predicted"], rows), facts


def exchange(asked: Asked) -> tuple[list[str], dict[str, Any]]:
    """Exchanges of one worker, eager and replayed, next to a copy of the gradients."""
    names = asked.names or (["none", "topk"] if asked.tiny else [])
    rows, found = exchanges.measured(not asked.tiny, asked.rounds, asked.seconds, names)
    return table(exchanges.HEADS, rows), found


SECTIONS = {
    "requests": requests,
    "ceilings": ceilings,
    "replay": replay,
    "exchange": exchange,
    "workers": workers,
}


def main() -> int:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SECTIONS), choices=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--compressors",
        nargs="+",
        default=[],
        metavar="NAME",
        help="as topk or topk:chunk=64; default: all",
    )
    parser.add_argument("--seconds", type=float, default=150.0, help="of `exchange` and of `workers`, about")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("results") / "gpu" / "replay")
    typed = parser.parse_args()
    if typed.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs CUDA, and this machine has none; type --device cpu --out FOLDER")
    if typed.device == "cpu" and typed.out == parser.get_default("out"):
        parser.error("results/gpu/replay is for measurements on a GPU; type --out FOLDER")
    if typed.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {typed.rounds}; type --rounds 3")
    if typed.seconds <= 0:
        parser.error(f"--seconds must be above 0, got {typed.seconds:g}; type --seconds 150")
    for name in typed.compressors:
        if name.partition(":")[0] not in yaml_files("compressor"):
            parser.error(f"--compressors: {name} is none of {', '.join(sorted(yaml_files('compressor')))}")
    typed.out.mkdir(parents=True, exist_ok=True)
    asked = Asked(typed.device, typed.rounds, typed.out, typed.compressors, typed.seconds)
    facts = header(Setting(typed.device, asked.tiny, typed.rounds, 0, typed.out, []))
    lines, kept = ["# Replayed steps on a GPU", "", *(f"- {key}: {value}" for key, value in facts.items())], {}
    for name in typed.only:
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            told, kept[name] = SECTIONS[name](asked)
        except Exception as error:
            told, kept[name] = [f"{type(error).__name__}: {error}"], {"error": str(error)}
        lines += ["", f"## {name}", "", *told]
        (typed.out / "README.md").write_text(folded("\n".join(lines)) + "\n", encoding="utf-8")
        write_packed(typed.out / "replay.json.xz", json.dumps({"header": facts, **kept}, indent=1))
        print("\n".join(told), flush=True)
    differs = any(
        own.get("differs")
        for name in ("replay", "exchange")
        for own in kept.get(name, {}).values()
        if isinstance(own, dict)
    )
    return int(differs or any("error" in own for own in kept.values()))


if __name__ == "__main__":
    sys.exit(main())
