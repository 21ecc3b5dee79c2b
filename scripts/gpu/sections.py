"""The sections of scripts/gpu/report.py: each takes a Setting and gives a Section."""

import json
import os
import re
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context
from accordion_bench.conformance.subject import Setup, from_yaml
from accordion_bench.options.conf_dir import package_dir
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.kernels import on_gpu
from scripts import launches
from scripts.bench import codec
from scripts.bench.harness import ratio, spread
from scripts.gpu import steps as timed
from scripts.gpu.exchange import maker
from scripts.launches import gpt2, resnet50, small, stated

ROOT = Path(__file__).resolve().parents[2]
NETWORKS = {"ResNet-50": resnet50, "gpt2": gpt2}
WAITS_INSIDE_TORCH = {"atomo": "torch's SVD reads whether it has converged"}
ABSENT = "Needs CUDA, and this machine has none."


@dataclass(frozen=True)
class Setting:
    """What the sections may know.

    device: `cuda`; `cpu` tries the sections that measure; "" = neither, they say that they need CUDA.
    smallest: as little as shows that everything runs.
    rounds: of every measurement.
    seed: of the gradients.
    out: folder for files beside the report.
    names: of compressors.
    """

    device: str
    smallest: bool
    rounds: int
    seed: int
    out: Path
    names: Sequence[str]

    @property
    def specs(self) -> list[TensorSpec]:
        """Tensors of ResNet-50."""
        return small(resnet50()) if self.smallest or self.device == "cpu" else resnet50()


@dataclass
class Section:
    """lines: Markdown; facts: the same for programs; failed: a check did not hold."""

    lines: list[str]
    facts: Any = field(default_factory=dict)
    failed: bool = False


def absent() -> Section:
    """Of what needs CUDA, where there is none."""
    return Section([ABSENT], {"skipped": ABSENT})


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """In Markdown."""
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in [heads, *rows]]
    return [lines[0], "|---" * len(heads) + "|", *lines[1:]]


# ---- correctness


def tests(setting: Setting) -> Section:
    """The tests that need CUDA; those of several GPUs skip themselves where there is one."""
    if setting.device != "cuda":
        return absent()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-rs", "-n0", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return _checked(done, setting.out / "tests.log")


def sanitizer(setting: Setting) -> Section:
    """Torch's CUDA sanitizer, which looks for streams that race, around exchanges; with two GPUs around steps, too."""
    if setting.device != "cuda":
        return absent()
    names = ",".join(setting.names)
    command = [sys.executable, "-m", "scripts.gpu.sections", names, str(setting.seed)]
    environ = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    return _checked(done, setting.out / "sanitizer.log")


def _checked(done: subprocess.CompletedProcess[str], log: Path) -> Section:
    """Whether a program ended well; all it said is beside the report."""
    said = done.stdout + done.stderr
    log.write_text(said, encoding="utf-8")
    last = (said.strip().splitlines() or ["it said nothing"])[-1]
    verdict = "ended well" if done.returncode == 0 else f"FAILED with {done.returncode}"
    return Section(
        [f"{verdict}: `{last}` (`{log.name}`)"], {"code": done.returncode, "last": last}, bool(done.returncode)
    )


def waits(setting: Setting) -> Section:
    """What makes the host wait: nothing, in compressors of fixed size; else torch says how often."""
    if setting.device != "cuda":
        return absent()
    rows, failed = [], False
    for name in setting.names:
        once = Once(name, setting)
        once.run()
        torch.cuda.synchronize()
        reason = WAITS_INSIDE_TORCH.get(name, "")
        if not once.setup.compressor.traits.fixed_size:
            reason = "its size depends on the data"
        said = _warned(once) if reason else _forbidden(once)
        failed = failed or not (reason or said == "none")
        rows.append((name, said, reason))
    return Section(table(["compressor", "waits", "allowed, because"], rows), rows, failed)


def _forbidden(once: "Once") -> str:
    """`none`, or what torch says of the first wait."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        once.run()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def _warned(once: "Once") -> str:
    """How often torch warns of a wait."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            once.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return str(sum("synchroniz" in str(one.message) for one in heard))


class Once:
    """A compressor with fresh gradients, ready for one exchange after another in one process.

    Args:
        name: see `exchange.maker`.
        setting: device, tensors, seed.
    """

    def __init__(self, name: str, setting: Setting) -> None:
        device = setting.device
        self.setup = Setup(
            maker(name)(), specs=setting.specs, dtype=torch.float32, comm=Comm(1, device=device), device=device
        )
        generator = torch.Generator().manual_seed(setting.seed)
        self.xs_W = [(torch.randn(1, *s.shape, generator=generator) * 1e-3).to(device) for s in setting.specs]
        self.step = 0

    def run(self) -> list[Tensor]:
        """One exchange."""
        setup, ctx = self.setup, self.context()
        return setup.compressor.exchange(
            setup.exchange.as_sent(self.xs_W), ctx, setup.exchange.state, setup.comm
        ).update

    def context(self) -> Context:
        """Of the next step."""
        self.step += 1
        return self.setup.context(self.step)


# ---- counts


def counts(setting: Setting) -> Section:
    """Launches and waits of one exchange, counted on a pretended device; with CUDA the kernels that really start."""
    page = package_dir().parent / "docs" / "performance.md"
    budgets = stated(page.read_text(encoding="utf-8")) if page.exists() else {}
    networks = {"ResNet-50": resnet50} if setting.smallest else NETWORKS
    rows, failed = [], False
    for name in setting.names:
        for network, specs in networks.items():
            found = launches.count_launches(from_yaml(name), small(specs()))
            ours = sum(found.launches.values()), sum(found.waits.values())
            allowed = budgets.get((name, network))
            over = allowed is not None and (ours[0] > allowed[0] or ours[1] > allowed[1])
            failed = failed or over
            real = _kernels(name, setting) if setting.device == "cuda" and network == "ResNet-50" else ""
            shown = "{} / {}".format(*allowed) if allowed else "none stated"
            rows.append((name, network, *ours, f"{shown}{', EXCEEDED' if over else ''}", real))
    heads = ["compressor", "network", "launches", "waits", "stated, launches / waits", "kernels and waits of CUDA"]
    return Section(table(heads, rows), rows, failed)


def _kernels(name: str, setting: Setting) -> str:
    """Kernels started by one exchange of one process, and how often the host waited, as the profiler sees them."""
    from torch import profiler

    once = Once(name, setting)
    for _ in range(launches.WARM):
        once.run()
    torch.cuda.synchronize()
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]) as recorded:
        once.run()
    calls = {event.key: event.count for event in recorded.key_averages()}
    started = sum(number for key, number in calls.items() if re.match(r"(cu|cuda)LaunchKernel", key))
    return f"{started} / {calls.get('cudaStreamSynchronize', 0)}"


# ---- times and memory


def codecs(setting: Setting) -> Section:
    """Encode and decode next to a plain copy of the same tensors; by torch, too, where kernels in Triton do it."""
    if not setting.device:
        return absent()
    rows = []
    for floats in [1] if setting.smallest else [11, 25, 138]:
        specs = codec.shapes(floats, flat=False)
        xs_W, numel = codec.gradients(specs, setting.device), sum(s.numel for s in specs)
        target = [torch.empty_like(x_W) for x_W in xs_W]
        copy = codec.Codec("copy", {"both": _copier(target, xs_W)}, 4 * numel)
        # its SVDs take hours at 138 million
        names = [name for name in setting.names if name != "atomo" or floats < 138]
        made = [copy]
        for one in codec.chosen(names, specs, xs_W):
            made.append(one)
            if on_gpu.usable(xs_W):
                parts = {part: _by_torch(run) for part, run in one.parts.items()}
                made.append(codec.Codec(f"{one.name}, by torch", parts, one.payload))
        codec.measure(made, setting.rounds, setting.device)
        for one in made:
            seconds = sum(one.seconds_of(part) for part in one.parts)
            times = seconds / copy.seconds_of("both")
            rows.append((floats, one.name, f"{1e6 * seconds:.0f}", f"{times:.2f}", f"{4 * numel / one.payload:.1f}"))
    heads = ["million floats", "compressor", "encode + decode, µs", "in copies", "times smaller"]
    return Section(table(heads, rows), rows)


def _by_torch(run: Callable[[], None]) -> Callable[[], None]:
    """The same without kernels in Triton."""

    def without_kernels() -> None:
        with mock.patch.object(on_gpu, "usable", lambda xs: False):
            run()

    return without_kernels


def _copier(target: Sequence[Tensor], xs_W: Sequence[Tensor]) -> Callable[[], None]:
    return lambda: torch._foreach_copy_(list(target), list(xs_W))


def memory(setting: Setting) -> Section:
    """Peak of what one process has allocated during exchanges, beside the gradients, in models."""
    if setting.device != "cuda":
        return absent()
    rows, model = [], 4 * sum(spec.numel for spec in setting.specs)
    for name in setting.names:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        once = Once(name, setting)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            once.run()
        kept, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        rows.append((name, f"{(kept - model) / model:.2f}", f"{(peak - model) / model:.2f}"))
        del once
    heads = ["compressor", "kept (residuals, momentum), in models", "peak, in models"]
    return Section(table(heads, rows), rows)


def steps(setting: Setting) -> Section:
    """A training step next to stock DistributedDataParallel and its hooks, a process for each GPU."""
    if not setting.device:
        return absent()
    if reason := timed.cannot():
        return Section([reason], {"skipped": reason})
    world = torch.cuda.device_count() if setting.device == "cuda" else 2
    found = timed.measured(setting.device, world, setting.rounds, setting.smallest, setting.out)
    rows = [
        (name, f"{1000 * statistics.median(seconds):.2f}", spread(*ratio(seconds, found[timed.rival(name)])))
        for name, seconds in found.items()
    ]
    heads = ["step", "ms, median", "in steps of its rival: median (quartiles)"]
    note = f"{world} processes; of every rival, see the rows that begin with DDP. Trace of two steps: `trace.json`."
    return Section([*table(heads, rows), "", note], found)


def training(setting: Setting) -> Section:
    """Images per second of four workers in one process, next to a plain loop with the same images per step."""
    if not setting.device:
        return absent()
    if reason := timed.cannot():
        return Section([reason], {"skipped": reason})
    facts, rows = {}, []
    for how, images, found in timed.training(setting.device, setting.rounds, setting.smallest):
        facts[how] = found
        for arm, seconds in found.items():
            speed = images / statistics.median(seconds)
            rows.append((how, arm, f"{speed:,.0f}", spread(*ratio(found["a plain loop"], seconds))))
    heads = ["", "arm", "images per second", "of the plain loop's: median (quartiles)"]
    return Section(table(heads, rows), facts)


SECTIONS: dict[str, Callable[[Setting], Section]] = {
    "tests": tests,
    "sanitizer": sanitizer,
    "waits": waits,
    "counts": counts,
    "codecs": codecs,
    "steps": steps,
    "training": training,
    "memory": memory,
}


def main() -> None:
    """Exchanges on a GPU, for the sanitizer; with two GPUs steps whose buckets leave early."""
    if len(sys.argv) != 3:
        sys.exit("scripts.gpu.sections is started by scripts.gpu.report, which runs the sections")
    names, seed = sys.argv[1].split(","), int(sys.argv[2])
    setting = Setting("cuda", True, 2, seed, Path(), names)
    for name in names:
        once = Once(name, setting)
        for _ in range(3):
            once.run()
        torch.cuda.synchronize()
    if torch.cuda.device_count() > 1 and not timed.cannot():
        timed.measured("cuda", torch.cuda.device_count(), 2, True, None)
    print(json.dumps({"exchanged": names}))


if __name__ == "__main__":
    with torch.no_grad():
        main()
