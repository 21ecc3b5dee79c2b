"""Encode and decode speed of every compressor, compared with a plain copy in the same run; no network. Prints Markdown.

    python -m scripts.bench.codec                                  # every YAML, 11 million floats, one CPU thread
    python -m scripts.bench.codec --floats 1 11 138 --only topk qsgd
    python -m scripts.bench.codec --grace CHECKOUT                 # beside GRACE's compressors
    python -m scripts.bench.codec --groupings                      # one tensor, many, small and large networks
    python -m scripts.bench.codec --threads 2                      # beside one thread
    python -m scripts.bench.codec --avx2 ...                       # as on a processor without AVX-512
    python -m scripts.bench.codec --device cuda --floats 11 25 138

GB/s refer to the gradient (4 bytes per coordinate): one worker's tensors of a network are encoded into a new message,
and one message is decoded and added to an existing sum. Rounds are interleaved over the compressors, and a copy is
timed beside each; the table contains medians, and ratios with quartiles over the rounds. Error feedback is off, because
it is the same for all. Compressors without a pair of encode and decode show the time of both, in an exchange of one
worker. "At least" is the target of the column before it.
"""

import argparse
import os
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.conformance.subject import with_optimizer
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.partition import levelled
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import conf_dir, read_options
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.runs.folder import environment
from accordion_bench.tensors import kernels
from scripts.bench.arms import as_a_run
from scripts.bench.harness import command_line, in_rounds, print_head, print_row, quartiles, seconds_of
from scripts.studies import grace_codecs

NETWORKS = {1: "squeezenet1_1", 11: "resnet18", 25: "resnet50", 138: "vgg16"}
ALQ = [-1, -0.0272, -0.0115, -0.0035, 0.0035, 0.0115, 0.0272, 1]
# besides each YAML as it is: what the speed targets name
VARIANTS = {
    "topk, 1 %": ("topk", {"density": 0.01}),
    "topk of tiles, 2 bits": ("topk", {"density": 1 / 64, "chunk": 64, "value_bits": 2}),
    "randomk, 1 %": ("randomk", {"density": 0.01}),
    "int8, nearest": ("int8", {"rounding": "nearest"}),
    "qsgd, 2 bits": ("qsgd", {"bits": 2}),
    "qsgd, 3 bits": ("qsgd", {"bits": 3}),
    "nuqsgd, 3 bits": ("nuqsgd", {"bits": 3}),
    "ALQ levels, 3 bits": ("qsgd", {"levels": ALQ, "bits": None}),
}


class Target(NamedTuple):
    """Target throughput on one thread, over ResNet-18's 62 tensors, relative to a copy's and to GRACE's."""

    copy: float
    grace: float | None


TARGETS = {
    **dict.fromkeys(("fp16", "bf16"), Target(0.5, 1.0)),
    **dict.fromkeys(("signsgd", "efsignsgd"), Target(0.35, 2.5)),
    **dict.fromkeys(("qsgd, 2 bits", "qsgd, 3 bits", "qsgd", "ALQ levels, 3 bits"), Target(0.12, 6.0)),
    **dict.fromkeys(("terngrad", "trn"), Target(0.12, 6.0)),
    "topk, 1 %": Target(0.2, 8.0),
    **dict.fromkeys(("int8", "int8, nearest", "fp8"), Target(0.25, None)),
    **dict.fromkeys(("fp4", "topk of tiles, 2 bits"), Target(0.14, None)),
}
LEAST_IN_ONE = 0.9  # throughput in one tensor, of the fastest grouping's
MOST_WHEN_SMALL = 1.3  # time per coordinate of a network of a million, of the fastest grouping's
LEAST_BY_THREADS = 1.6  # throughput with two threads, of one thread's
GROUPINGS = ((11, False), (11, True), (138, False), (138, True), (1, False))  # millions of floats, in one tensor or not

# a processor without AVX-512: what torch and numba read; without features numba takes this machine's, whatever the name
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt",
}


@dataclass
class Codec:
    """Timed parts of one compressor: encode and decode, or both in one.

    Args:
        name: name of its row.
        parts: functions that are timed.
        payload: bytes that a worker sends.
        threads: number of threads of torch and the kernels.
    """

    name: str
    parts: dict[str, Callable[[], None]]
    payload: float
    threads: int = 1
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def seconds_of(self, part: str) -> float:
        """Median over the rounds."""
        return statistics.median(self.seconds[part])

    def totals(self) -> list[float]:
        """Seconds of all parts, round by round."""
        return [sum(parts) for parts in zip(*self.seconds.values(), strict=True)]


class Ratio(NamedTuple):
    """Ratio of two codecs' throughputs: median and quartiles over the rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(one: Codec, other: Codec, size: float = 1.0) -> Ratio:
    """Return the ratio of one's throughput to other's; the two calls of a round are adjacent.

    Args:
        one, other: codecs of the same rounds.
        size: number of coordinates of `one` divided by that of `other`.
    """
    return Ratio(*quartiles([size * theirs / own for own, theirs in zip(one.totals(), other.totals(), strict=True)]))


def shapes(floats: int, flat: bool) -> list[TensorSpec]:
    """Return the shapes of the parameters of a network of about this number of millions."""
    import torchvision  # which takes two seconds

    with torch.device("meta"):
        model = getattr(torchvision.models, NETWORKS[floats])()
    specs = [TensorSpec(name, tuple(p.shape)) for name, p in model.named_parameters()]
    return [TensorSpec("flat", (1, sum(s.numel for s in specs)))] if flat else specs


def gradients(specs: list[TensorSpec], device: str) -> list[torch.Tensor]:
    """Return tensors [1, ...] with heavy tails, as gradients have; contiguous in memory, as in an exchange."""
    g = torch.Generator().manual_seed(0)
    flat = torch.cat([torch.randn(s.numel, generator=g) ** 3 * 1e-3 for s in specs]).to(device)
    parts = flat.split([s.numel for s in specs])
    return [part.view(1, *s.shape) for part, s in zip(parts, specs, strict=True)]


def codec(
    name: str,
    yaml_name: str,
    changes: dict,
    specs: list[TensorSpec],
    xs_W: list[torch.Tensor],
    sums: Sequence[torch.Tensor] | None = None,
) -> Codec | None:
    """Return a compressor without error feedback, worker momentum and scope; None if it does not support these tensors.

    Args:
        name: name of its row.
        yaml_name: name of the file.
        changes: options that differ from the file's.
        specs, xs_W: tensors [1, ...].
        sums: sums to which decoded messages are added, shaped as the tensors; None = created for this codec.
    """
    node = read_options(conf_dir() / "compressor" / f"{yaml_name}.yaml") | changes
    node = {key: value for key, value in node.items() if key not in ("worker_momentum", "weight_decay_mode")}
    if "error_feedback" in node:
        node |= {"error_feedback": False}
    node.pop("residual_units", None)
    wrapped = with_optimizer(node)()
    compressor, comm = wrapped.compressor, Comm(1, device=str(xs_W[0].device))
    ladder = Ladder(compressor.traits.knob or "", (compressor.level,) if compressor.traits.knob else ())
    exchange = Exchange(compressor, specs, ladder, comm, xs_W[0])
    plan = Plan(dict.fromkeys(levelled(compressor, exchange.sent), 0))
    ctx = exchange.context(StepInfo(plan, 1000, 0.1, 1000.0))
    pairs = list(zip(ctx.specs, ctx.levels, strict=True))
    payload = sum(payload_bytes(compressor, s, level, 1) for s, level in pairs)
    if not any(level is not None and compressor.compresses(s, level) for s, level in pairs):
        return None
    if isinstance(compressor, OneShot) and compressor.traits.fixed_size:
        sums = [torch.zeros_like(x_W) for x_W in xs_W] if sums is None else sums
        return Codec(name, one_shot(compressor, xs_W, sums, ctx, comm), payload)
    state = exchange.state
    return Codec(name, {"both": lambda: compressor.exchange(xs_W, ctx, state, comm)}, payload)


def one_shot(
    compressor: OneShot, xs_W: list[torch.Tensor], sums: Sequence[torch.Tensor], ctx: Context, comm: Comm
) -> dict[str, Callable[[], None]]:
    """Encode all tensors, and decode one message of each into a sum."""
    levels = {i: v for i, v in enumerate(ctx.levels) if v is not None and compressor.compresses(ctx.specs[i], v)}
    what = [ctx.specs[i] for i in levels], list(levels.values())
    rows_W, sums_R = [xs_W[i].flatten(1) for i in levels], {k: sums[i].flatten(1) for k, i in enumerate(levels)}
    message = compressor.encode_all(rows_W, *what, ctx, comm.local)

    def encode() -> None:
        nonlocal message
        message = compressor.encode_all(rows_W, *what, ctx, comm.local)

    def decode() -> None:
        compressor.add_all_(sums_R, message, *what, ctx)

    return {"encode": encode, "decode": decode}


def copying(target: Sequence[torch.Tensor], xs_W: Sequence[torch.Tensor]) -> Codec:
    """Return a codec that copies the tensors."""

    def copy() -> None:
        for mine, theirs in zip(target, xs_W, strict=True):
            mine.copy_(theirs)

    return Codec("copy", {"both": copy}, sum(4 * x_W.numel() for x_W in xs_W))


def measure(codecs: list[Codec], rounds: int, device: str) -> None:
    """Time all codecs in interleaved rounds; the first is warm-up."""
    before = torch.get_num_threads()

    def once(number: int) -> dict[str, float]:
        torch.set_num_threads(codecs[number].threads)
        return {part: seconds_of(run, device=device) for part, run in codecs[number].parts.items()}

    found = in_rounds(range(len(codecs)), rounds + 1, once)
    torch.set_num_threads(before)
    for one, told in zip(codecs, found.values(), strict=True):
        one.seconds = {part: [seconds[part] for seconds in told[1:]] for part in one.parts}


def chosen(names: Sequence[str], specs: list[TensorSpec], xs_W: list[torch.Tensor]) -> list[Codec]:
    """Return the codecs of some rows, without those that do not support these tensors."""
    sums = [torch.zeros_like(x_W) for x_W in xs_W]
    made = [codec(name, *VARIANTS.get(name, (name, {})), specs, xs_W, sums) for name in names]
    return [one for one in made if one is not None]


def verdict(found: float, target: float) -> str:
    """Return whether a throughput's ratio reaches its target."""
    return f"{target:g} {'met' if found >= target else 'MISSED'}"


# ---- tables


def table(arguments: argparse.Namespace, floats: int) -> None:
    """Print every codec on the tensors of one network, beside a copy, and beside GRACE's."""
    specs = shapes(floats, arguments.flat)
    xs_W, numel = gradients(specs, arguments.device), sum(s.numel for s in specs)
    codecs, twins = chosen(arguments.only, specs, xs_W), dict[str, Codec]()
    target = [torch.empty_like(x_W) for x_W in xs_W]
    copies = {one.name: copying(target, xs_W) for one in codecs}  # one beside each codec: machines have their moods
    for one in codecs if arguments.grace else ():
        if (found := grace_codecs.twin(one.name, [x_W[0] for x_W in xs_W])) is not None:
            both, payload = found
            twins[one.name] = Codec(one.name, {"both": both}, payload)
    arms = [(copies[one.name], one, twins.get(one.name)) for one in codecs]
    measure([arm for together in arms for arm in together if arm is not None], arguments.rounds, arguments.device)

    kind = "one tensor" if arguments.flat else f"{len(specs)} tensors of {NETWORKS[floats]}"
    print(f"## {numel:,} floats, {kind}\n")
    heads = ["compressor", "encode GB/s", "decode GB/s", "both GB/s", "times smaller", "of a copy", "at least"]
    if arguments.grace:
        heads += ["GRACE, GB/s", "GRACE, times smaller", "of GRACE", "at least"]
    copied = statistics.median(seconds for one in copies.values() for seconds in one.totals())
    rows: list[list[object]] = [["copy", "", "", 4e-9 * numel / copied, "1.0"]]
    for one in codecs:
        total, aimed = statistics.median(one.totals()), None if arguments.flat else TARGETS.get(one.name)
        each = [4e-9 * numel / one.seconds_of(part) if part in one.parts else "" for part in ("encode", "decode")]
        of_copy, smaller = ratio(one, copies[one.name]), 4 * numel / one.payload
        row: list[object] = [one.name, *each, 4e-9 * numel / total, f"{smaller:.1f}", of_copy]
        row.append(verdict(of_copy.median, aimed.copy) if aimed else "")
        if theirs := twins.get(one.name):
            seconds, of_grace = statistics.median(theirs.totals()), ratio(one, theirs)
            row += [4e-9 * numel / seconds, f"{4 * numel / theirs.payload:.1f}", of_grace]
            row.append(verdict(of_grace.median, aimed.grace) if aimed and aimed.grace else "")
        rows.append(row)
    show(heads, rows)


def groupings(arguments: argparse.Namespace) -> None:
    """Print the codecs on one tensor and on many, on large networks and on a small one; beside the fastest of these."""
    arms: dict[tuple[int, bool], dict[str, Codec]] = {}
    numel: dict[tuple[int, bool], int] = {}
    for floats, flat in GROUPINGS:
        specs = shapes(floats, flat)
        xs_W, numel[floats, flat] = gradients(specs, "cpu"), sum(s.numel for s in specs)
        arms[floats, flat] = {one.name: one for one in chosen(arguments.only, specs, xs_W)}
    names = [name for name in arguments.only if all(name in found for found in arms.values())]
    measure([found[name] for name in names for found in arms.values()], arguments.rounds, "cpu")

    print("## GB/s by grouping, and of the fastest one's throughput\n")
    kinds = [f"{floats} M in {'one tensor' if flat else 'many'}" for floats, flat in GROUPINGS]
    heads = ["compressor", *kinds, "11 M in one", "138 M in one", "at least", "1 M, time per coordinate", "at most"]
    rows = []
    for name in names:
        own = {key: arms[key][name] for key in GROUPINGS}
        speed = {key: 4e-9 * numel[key] / statistics.median(one.totals()) for key, one in own.items()}
        best = max(speed, key=speed.__getitem__)
        of_best = {key: ratio(one, own[best], numel[key] / numel[best]) for key, one in own.items()}
        in_one = [of_best[11, True], of_best[138, True]]
        slower = 1 / of_best[1, False].median
        small = f"{MOST_WHEN_SMALL} {'met' if slower <= MOST_WHEN_SMALL else 'MISSED'}"
        least = verdict(min(found.median for found in in_one), LEAST_IN_ONE)
        rows.append([name, *speed.values(), *in_one, least, slower, small])
    show(heads, rows)


def by_threads(arguments: argparse.Namespace, floats: int) -> None:
    """Print each codec with several threads beside the same codec with one."""
    specs = shapes(floats, arguments.flat)
    xs_W, numel = gradients(specs, "cpu"), sum(s.numel for s in specs)
    alone = [copying([torch.empty_like(x_W) for x_W in xs_W], xs_W), *chosen(arguments.only, specs, xs_W)]
    together = [Codec(one.name, one.parts, one.payload, arguments.threads) for one in alone]
    measure([arm for pair in zip(alone, together, strict=True) for arm in pair], arguments.rounds, "cpu")

    print(f"## {numel:,} floats, {arguments.threads} threads beside one\n")
    heads = ["compressor", "one thread, GB/s", f"{arguments.threads} threads, GB/s", "of one thread", "at least"]
    rows = []
    for one, several in zip(alone, together, strict=True):
        speeds = [4e-9 * numel / statistics.median(arm.totals()) for arm in (one, several)]
        faster = ratio(several, one)
        aimed = one.name in TARGETS and arguments.threads == 2 and floats >= 11
        rows.append([one.name, *speeds, faster, verdict(faster.median, LEAST_BY_THREADS) if aimed else ""])
    show(heads, rows)


def show(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    print_head(*heads)
    for row in rows:
        cells = [f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row]
        print_row(*cells, *[""] * (len(heads) - len(cells)))
    print(flush=True)


# ---- the processor


def hold_to_avx2() -> None:
    """Restart this program with the environment variables that torch and numba read when they are loaded.

    Raises:
        ConfigError: the program was restarted, but torch or numba uses other instructions nonetheless.
    """
    if any(os.environ.get(name) != value for name, value in AVX2.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **AVX2})
    if instructions() not in (("AVX2", "AVX2"), ("AVX2", "absent")):
        raise ConfigError("--avx2 must hold torch and numba to AVX2, got {} and {}".format(*instructions()))


def instructions() -> tuple[str, str]:
    """Return the instructions that torch's kernels use here, and those of a loop that numba compiles now."""
    by_torch = torch.backends.cpu.get_cpu_capability()
    if not kernels.installed():
        return by_torch, "absent"
    import numba
    import numpy as np

    @numba.njit
    def chosen_codes(x, out):  # type: ignore[no-untyped-def]
        for i in range(x.size):
            if x[i] > np.float32(0.5):
                out[i] = np.uint8(np.uint32(x[i]) * np.uint32(7))

    chosen_codes(np.ones(64, np.float32), np.ones(64, np.uint8))
    (code,) = chosen_codes.inspect_asm().values()
    if re.search(r"%zmm|%k[1-7]", code):
        return by_torch, "AVX512"
    return by_torch, "AVX2" if "%ymm" in code else "others"


def main() -> None:
    """Run the command line."""
    names = sorted(file.stem for file in (conf_dir() / "compressor").glob("*.yaml"))
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--floats", nargs="+", type=int, default=[11], choices=list(NETWORKS), help="millions")
    parser.add_argument("--flat", action="store_true", help="one tensor instead of the network's")
    parser.add_argument("--only", nargs="+", default=[*names, *VARIANTS], metavar="NAME")
    parser.add_argument("--grace", metavar="CHECKOUT", help="a folder with GRACE (sands-lab/grace)")
    parser.add_argument("--groupings", action="store_true", help="one tensor and many, small networks and large ones")
    parser.add_argument("--threads", type=int, default=1, help="beside one thread")
    parser.add_argument("--avx2", action="store_true", help="hold torch and numba to AVX2")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    try:
        if arguments.avx2:
            hold_to_avx2()
        if arguments.grace:
            grace_codecs.check_checkout(arguments.grace)
    except ConfigError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    as_a_run(arguments.device)
    facts = environment()
    hardware = facts["gpus"] if arguments.device == "cuda" else facts["processor"]
    held = "torch {}, numba {}".format(*instructions())
    print(f"commit {facts['commit']}, {hardware} ({held}), {facts['versions']}, {arguments.rounds} rounds\n")
    if arguments.groupings:
        groupings(arguments)
        return
    for floats in arguments.floats:
        if arguments.threads > 1:
            by_threads(arguments, floats)
        else:
            table(arguments, floats)


if __name__ == "__main__":
    with torch.no_grad():
        main()
