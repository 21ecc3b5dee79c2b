"""Encode and decode speed of every compressor, next to a plain copy in the same run; no network. Prints Markdown.

    python scripts/bench_codec.py                                  # every YAML, 11 million floats, one CPU thread
    python scripts/bench_codec.py --floats 1 11 138 --only topk qsgd
    python scripts/bench_codec.py --device cuda --floats 11 25 138

GB/s are of gradient (4 bytes per coordinate): one worker's tensors of a network are encoded, and one message of each
is decoded and added up. Rounds are interleaved over the compressors and the copy; medians. Error feedback is off: it is
the same for all. Compressors that are no pair of encode and decode show the time of both, in a run of one worker.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torchvision

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.compressors.base import Context
from accordion_bench.compressors.oneshot import Group, OneShot
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.partition import levelled
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.choice_file import read_options
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.runs.environment import environment

NETWORKS = {1: "squeezenet1_1", 11: "resnet18", 25: "resnet50", 138: "vgg16"}
SGD = {"_target_": "torch.optim.SGD", "momentum": 0.9, "nesterov": True}
NO_MOMENTUM = {"_target_": "torch.optim.SGD", "momentum": 0.0}
ALQ = [-1, -0.0272, -0.0115, -0.0035, 0.0035, 0.0115, 0.0272, 1]
# besides each YAML as it is: what the speed targets name
VARIANTS = {
    "topk, 1 %": ("topk", {"density": 0.01}),
    "randomk, 1 %": ("randomk", {"density": 0.01}),
    "int8, nearest": ("int8", {"rounding": "nearest"}),
    "qsgd, 2 bits": ("qsgd", {"bits": 2}),
    "qsgd, 3 bits": ("qsgd", {"bits": 3}),
    "nuqsgd, 3 bits": ("nuqsgd", {"bits": 3}),
    "ALQ levels, 3 bits": ("qsgd", {"levels": ALQ, "bits": None}),
}


@dataclass
class Codec:
    """What is timed of one compressor: encode and decode, or both in one."""

    name: str
    parts: dict[str, Callable[[], None]]
    payload: float
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def seconds_of(self, part: str) -> float:
        """Median over the rounds."""
        return statistics.median(self.seconds[part])


def shapes(floats: int, flat: bool) -> list[TensorSpec]:
    """The parameters of a network of about so many million."""
    with torch.device("meta"):
        model = getattr(torchvision.models, NETWORKS[floats])()
    specs = [TensorSpec(name, tuple(p.shape)) for name, p in model.named_parameters()]
    return [TensorSpec("flat", (1, sum(s.numel for s in specs)))] if flat else specs


def gradients(specs: list[TensorSpec], device: str) -> list[torch.Tensor]:
    """Tensors [1, ...] with heavy tails, as gradients have."""
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(1, *s.shape, generator=g) ** 3 * 1e-3).to(device) for s in specs]


def codec(name: str, yaml_name: str, changes: dict, specs: list[TensorSpec], xs_W: list[torch.Tensor]) -> Codec:
    """A compressor without error feedback, worker momentum and scope."""
    node = read_options(conf_dir() / "compressor" / f"{yaml_name}.yaml") | changes
    node = {key: value for key, value in node.items() if key not in ("worker_momentum", "weight_decay_mode")}
    if "error_feedback" in node:
        node |= {"error_feedback": False}
    node.pop("residual_units", None)
    try:
        wrapped = wrapped_compressor(node, SGD)
    except ConfigError:
        wrapped = wrapped_compressor(node, NO_MOMENTUM)
    compressor, comm = wrapped.compressor, Comm(1, device=str(xs_W[0].device))
    ladder = Ladder(compressor.traits.knob or "", (compressor.level,) if compressor.traits.knob else ())
    exchange = Exchange(compressor, specs, ladder, comm, xs_W[0], 0)
    plan = Plan(dict.fromkeys(levelled(compressor, exchange.sent), 0))
    ctx = exchange.context(StepInfo(plan, 1000, 0.1, 1000.0))
    payload = sum(compressor.payload_bytes(s, level, 1) for s, level in zip(ctx.specs, ctx.levels, strict=True))
    if isinstance(compressor, OneShot) and compressor.traits.fixed_size:
        return Codec(name, one_shot(compressor, xs_W, ctx, comm), payload)
    state = exchange.state
    return Codec(name, {"both": lambda: compressor.exchange(xs_W, ctx, state, comm)}, payload)


def one_shot(compressor: OneShot, xs_W: list[torch.Tensor], ctx: Context, comm: Comm) -> dict[str, Callable[[], None]]:
    """Encode all tensors, and decode one message of each into a sum."""
    levels = {i: v for i, v in enumerate(ctx.levels) if v is not None and compressor.compresses(ctx.specs[i], v)}
    groups: list[Group] = compressor.encode_groups(xs_W, ctx, levels, comm)
    totals = [torch.zeros(len(g.ids), ctx.specs[g.ids[0]].numel, device=xs_W[0].device) for g in groups]

    def encode() -> None:
        groups[:] = compressor.encode_groups(xs_W, ctx, levels, comm)

    def decode() -> None:
        for total, group in zip(totals, groups, strict=True):
            compressor.add_decoded_(total, group.message, ctx.specs[group.ids[0]], group.level, ctx)

    return {"encode": encode, "decode": decode}


def clocked(run: Callable[[], None], device: str) -> float:
    """Seconds of one call."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(codecs: list[Codec], rounds: int, device: str) -> None:
    """Interleaved rounds over all codecs."""
    for round_ in range(rounds + 1):
        for one in codecs if round_ % 2 else codecs[::-1]:
            for part, run in one.parts.items():
                seconds = clocked(run, device)
                if round_:  # the first round is warm-up
                    one.seconds.setdefault(part, []).append(seconds)


def table(codecs: list[Codec], numel: int) -> None:
    """One line per compressor; the first codec is the copy."""
    gigabytes, copy_seconds = 4e-9 * numel, codecs[0].seconds_of("both")
    print("| compressor | encode GB/s | decode GB/s | both GB/s | payload bytes | times smaller | both / copy |")
    print("|---|---|---|---|---|---|---|")
    for one in codecs:
        each = {part: one.seconds_of(part) for part in one.parts}
        total = sum(each.values())
        shown = [f"{gigabytes / each[part]:.2f}" if part in each else "" for part in ("encode", "decode")]
        smaller = f"{4 * numel / one.payload:.1f}"
        print(
            f"| {one.name} | {shown[0]} | {shown[1]} | {gigabytes / total:.2f} | {one.payload:,.0f} | {smaller} | "
            f"{total / copy_seconds:.1f} |",
            flush=True,
        )


def main() -> None:
    """Print one table per size."""
    names = sorted(file.stem for file in (conf_dir() / "compressor").glob("*.yaml"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--floats", nargs="+", type=int, default=[11], choices=list(NETWORKS), help="millions")
    parser.add_argument("--flat", action="store_true", help="one tensor instead of the network's")
    parser.add_argument("--only", nargs="+", default=[*names, *VARIANTS], metavar="NAME")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts = environment()
    hardware = facts["gpus"] if arguments.device == "cuda" else facts["processor"]
    print(f"commit {facts['commit']}, {hardware}, {facts['versions']}, 1 thread, {arguments.rounds} rounds\n")
    for floats in arguments.floats:
        specs = shapes(floats, arguments.flat)
        xs_W, numel = gradients(specs, arguments.device), sum(s.numel for s in specs)
        target = [torch.empty_like(x) for x in xs_W]

        def copy(xs_W=xs_W, target=target) -> None:
            for mine, theirs in zip(target, xs_W, strict=True):
                mine.copy_(theirs)

        chosen = [(name, *VARIANTS.get(name, (name, {}))) for name in arguments.only]
        codecs = [codec(name, yaml_name, changes, specs, xs_W) for name, yaml_name, changes in chosen]
        codecs.insert(0, Codec("copy", {"both": copy}, 4 * numel))
        measure(codecs, arguments.rounds, arguments.device)
        kind = "one tensor" if arguments.flat else f"{len(specs)} tensors of {NETWORKS[floats]}"
        print(f"## {numel:,} floats, {kind}\n")
        table(codecs, numel)
        print(flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
