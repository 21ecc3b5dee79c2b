"""Step-time ratios, each measured in one run: interleaved rounds, medians; prints Markdown.

python -m scripts.bench.step                  # all
python -m scripts.bench.step plain detector   # some
"""

import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from accordion_bench.comm.collectives import Comm
from accordion_bench.config.components import build_components, build_model
from accordion_bench.conformance.subject import Setup, from_yaml, gradients
from accordion_bench.plan import TensorSpec
from scripts.bench.arms import our_step, plain_step, trainer_for
from scripts.bench.harness import interleaved, line, row, run_benches

MODELS = {
    "resnet8, digits, batch 32": ["model=resnet8", "dataset=digits", "batch_size=32"],
    "resnet20, 32x32, batch 32": ["model=resnet20", "dataset=synthetic", "batch_size=32"],
}
BIG = {"resnet18, 32x32, batch 16": ["model=resnet18", "dataset=synthetic", "batch_size=16"]}
GPT = {
    "gpt_small, 256 bytes, batch 4": [
        *("model=gpt_small", "dataset=pydocs_bytes", "dataset.context=256", "batch_size=4", "optimizer=adamw"),
        *("optimizer.betas=[0.9,0.95]", "optimizer.weight_decay=0.1", "optimizer.decay_on=matrices"),
    ]
}


def bench_plain(rounds: int) -> None:
    """Compare one worker with a plain PyTorch loop."""
    for setting, overrides in {**MODELS, **BIG, **GPT}.items():
        trainer = trainer_for(overrides, Comm(1))
        model = build_model(trainer.config.model, build_components(trainer.config, 1).dataset)
        times = interleaved({"ours": our_step(trainer), "plain": plain_step(trainer, model)}, rounds)
        target = 1.05 if "digits" in setting else 1.03  # a step of 5 ms, in which each 50 microseconds are 1 %
        target = 1.02 if setting in GPT else target
        row("dense step / plain PyTorch, 1 worker", setting, times, ("ours", "plain"), target)


def bench_workers(rounds: int) -> None:
    """Compare four workers in one process with four steps of one worker."""
    for setting, overrides in MODELS.items():
        arms = {"four": our_step(trainer_for(overrides, Comm(4))), "one": our_step(trainer_for(overrides, Comm(1)))}
        row("4 workers / 4 x 1 worker", setting, interleaved(arms, rounds), ("four", "one"), 1.05, factor=4)


def bench_detector(rounds: int) -> None:
    """Compare a step in an epoch in which Accordion collects with one in which it does not."""
    for setting, overrides in {**MODELS, **BIG}.items():
        trainer = trainer_for([*overrides, "compressor=powersgd", "adaptive=accordion"], Comm(1))
        trainer.fast = our_step(trainer)
        sums = trainer.policy_runner.epoch_sums.sums

        def collecting(trainer=trainer, sums=sums) -> None:
            trainer.policy_runner.epoch_sums.sums = sums
            trainer.fast()

        def idle(trainer=trainer) -> None:
            trainer.policy_runner.epoch_sums.sums = {}
            trainer.fast()

        times = interleaved({"collecting": collecting, "idle": idle}, 2 * rounds)
        row("detector on / off", setting, times, ("collecting", "idle"), 1.01)


def _ddp_process(rank: int, folder: str, setting: str, overrides: list[str], rounds: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    trainer = trainer_for(overrides, Comm(1, 2, rank))
    model = build_model(trainer.config.model, build_components(trainer.config, 1).dataset)
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.15 renames broadcast_buffers, 2.11 has only that
    wrapped = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    arms = {"ours": our_step(trainer), "ddp": plain_step(trainer, wrapped)}
    times = interleaved(arms, rounds)
    if rank == 0:
        row("dense step / DistributedDataParallel, 2 gloo processes", setting, times, ("ours", "ddp"), 1.03)
    dist.barrier()
    dist.destroy_process_group()


def bench_ddp(rounds: int) -> None:
    """Compare two processes with stock DistributedDataParallel, which overlaps its all-reduce with backward."""
    context = multiprocessing.get_context("spawn")
    for setting, overrides in {**MODELS, **BIG, **GPT}.items():
        with tempfile.TemporaryDirectory() as folder:
            arguments = (folder, setting, overrides, rounds)
            children = [context.Process(target=_ddp_process, args=(rank, *arguments)) for rank in range(2)]
            for child in children:
                child.start()
            for child in children:
                child.join()


PEAK = """
import re, sys
from scripts.bench.arms import our_step, trainer_for
from accordion_bench.comm.collectives import Comm
trainer = trainer_for(sys.argv[2:], Comm(int(sys.argv[1])))
step = our_step(trainer)
for _ in range(3):
    step()
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]  # ru_maxrss would be inherited
print(int(peak) * 1024, sum(s.numel for s in trainer.axis.specs) * 4)
"""


def bench_memory(rounds: int) -> None:
    """Measure the peak memory of each further worker, in models; gradient + residual are two."""
    for name in ("powersgd", "topk", "none"):
        overrides = ["model=resnet18", "dataset=synthetic", "batch_size=4", f"compressor={name}"]
        peaks = []
        for workers in (2, 6):
            command = [sys.executable, "-c", PEAK, str(workers), *overrides]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            peaks.append(int(out[-2]) / int(out[-1]))
        slope, target = (peaks[1] - peaks[0]) / 4, 1.1 if name == "none" else 2.1
        line("peak memory of one more worker, in models", f"resnet18, {name}", "", slope, target)


BESIDE = """
import os, re, sys
import torch, torch.distributed as dist
from scripts.bench.arms import our_step, trainer_for
from accordion_bench.comm.collectives import Comm
torch.set_num_threads(1)
rank, meeting, *overrides = sys.argv[1:]
dist.init_process_group("gloo", store=dist.FileStore(meeting, 2), rank=int(rank), world_size=2)
trainer = trainer_for(overrides, Comm(1, 2, int(rank)))
step = our_step(trainer)
for _ in range(4):
    step()
dist.barrier()
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
print(int(peak) * 1024, sum(s.numel for s in trainer.axis.specs) * 4, flush=True)
os._exit(0)
"""


def bench_beside(rounds: int) -> None:
    """Measure the peak memory of a process beyond that of stock DistributedDataParallel, in models.

    The result is the cost of a ResNet-18 beyond a small model in the same set-up, so that imports do not count.
    """

    def peak(*overrides: str) -> tuple[float, int]:
        with tempfile.TemporaryDirectory() as folder:
            typed = ["dataset=synthetic", "batch_size=4", *overrides]
            command = [sys.executable, "-c", BESIDE]
            ranks = [
                subprocess.Popen([*command, str(rank), f"{folder}/store", *typed], stdout=subprocess.PIPE, text=True)
                for rank in range(2)
            ]
            told = [[int(number) for number in rank.communicate()[0].split()] for rank in ranks]
            return statistics.mean(bytes_ for bytes_, _ in told), told[0][1]

    def models(*overrides: str) -> float:
        large, size = peak("model=resnet18", *overrides)
        return (large - peak("model=resnet8", *overrides)[0]) / size

    ddp = models("comm.engine=ddp")
    residuals_of = {"none": 0, "powersgd": 1, "efsignsgd": 1, "topk": 1, "qsgd": 0, "distefblocksgd": 2}
    for name, residuals in residuals_of.items():
        beyond = models(f"compressor={name}") - ddp
        what = "peak memory beyond DistributedDataParallel, in models: residuals and buckets"
        line(what, f"resnet18, {name}", "", beyond, residuals + 1)


def bench_signs(rounds: int) -> None:
    """Compare an exchange of 1-bit Adam past its freeze, its step included, with dist-EF-blockSGD's; one worker."""
    for setting, overrides in {**BIG, **GPT}.items():
        specs = trainer_for(overrides, Comm(1)).axis.specs
        arms = {name: exchanging(name, specs) for name in ("onebitadam", "distefblocksgd")}
        times = interleaved(arms, rounds)
        row("exchange of 1-bit Adam / dist-EF's", setting, times, ("onebitadam", "distefblocksgd"), 1.1)


def exchanging(name: str, specs: Sequence[TensorSpec]) -> Callable[[], None]:
    """Return exchanges of random gradients by a compressor at its defaults."""
    setup = Setup(from_yaml(name)(), workers=1, specs=specs, dtype=torch.float32)
    xs_W = gradients(specs, 1, dtype=torch.float32)
    ctx = setup.context()
    state, comm = setup.exchange.state, setup.comm

    def exchange() -> None:
        setup.compressor.exchange(xs_W, ctx, state, comm)

    return exchange


FIRST_STEP = """
import sys, time
from accordion_bench.training import trainer
step = trainer.Trainer.train_step
def first(self):
    print("FIRST", time.time(), flush=True)
    step(self)
    print("DONE", time.time(), flush=True)
    sys.stdout.flush()
    import os; os._exit(0)
trainer.Trainer.train_step = first
from accordion_bench.__main__ import main
sys.argv = ["accordion_bench", "paths.runs=" + sys.argv[1]]
main()
"""


def bench_start(rounds: int) -> None:
    """Measure from the command to the end of the first training step of the default run, and `import torch` alone."""
    command, imports = [], []
    for _ in range(max(3, rounds // 8)):
        start = time.time()
        command_line = [sys.executable, "-c", "import torch, time; print(time.time())"]
        imports.append(float(subprocess.run(command_line, check=True, capture_output=True).stdout) - start)
        start = time.time()
        with tempfile.TemporaryDirectory() as folder:
            run = subprocess.run([sys.executable, "-c", FIRST_STEP, folder], check=True, capture_output=True, text=True)
        command.append(float(run.stdout.split("DONE")[1]) - start)
    total, torch_alone = statistics.median(command), statistics.median(imports)
    line("from the command to the end of the first step", "default run", f"{total:.2f} s", total, 5, " s")
    line(f"the same beyond `import torch` ({torch_alone:.2f} s)", "default run", "", total - torch_alone, 2, " s")


if __name__ == "__main__":
    every = {
        "start": bench_start,
        "plain": bench_plain,
        "workers": bench_workers,
        "detector": bench_detector,
        "ddp": bench_ddp,
        "memory": bench_memory,
        "beside": bench_beside,
        "signs": bench_signs,
    }
    run_benches(every, __doc__, rounds=40)
