"""Cost of local methods beside their local steps, in time and memory: ratios measured in one run; prints Markdown.

python -m scripts.bench.local             # all
python -m scripts.bench.local step        # some
"""

import subprocess
import sys
from collections.abc import Callable

from accordion_bench.comm.collectives import Comm
from accordion_bench.options.units import counted
from scripts.bench.arms import our_step, trainer_for
from scripts.bench.harness import interleaved, line, row, run_benches
from scripts.bench.step import BIG, MODELS, PEAK

NEVER = "sync.period=1000000000"


def bare_step(overrides: list[str], workers: int) -> Callable[[], None]:
    """Take a local step with the inner optimizers directly, without the checks of `sync`."""
    trainer = trainer_for([*overrides, "sync=local_sgd", NEVER], Comm(workers))
    trainer.sync.before_step = trainer.sync.after_step = lambda lr: None  # type: ignore
    return our_step(trainer)


def bench_step(rounds: int) -> None:
    """Compare a step without an averaging with the inner optimizers alone, and with a synchronous dense step."""
    for setting, overrides in {**MODELS, **BIG}.items():
        workers = 1 if setting in BIG else 4
        arms = {
            "idle": our_step(trainer_for([*overrides, "sync=local_sgd", NEVER], Comm(workers))),
            "bare": bare_step(overrides, workers),
            "every": our_step(trainer_for(overrides, Comm(workers))),
            "eight": our_step(trainer_for([*overrides, "sync=local_sgd"], Comm(workers))),
        }
        times = interleaved(arms, rounds, steps=8)
        where = f"{setting}, {counted(workers, 'worker')}"
        row("step with nothing to average / inner optimizers alone", where, times, ("idle", "bare"), 1.01)
        row("local SGD, period 8 / synchronous dense step", where, times, ("eight", "every"), 1.05)


def peak(*arguments: str) -> float:
    """Return the peak memory of three steps, in models."""
    out = subprocess.run([sys.executable, "-c", PEAK, *arguments], check=True, capture_output=True, text=True).stdout
    used, model = out.split()[-2:]
    return int(used) / int(model)


def bench_memory(rounds: int) -> None:
    """Measure peak memory in models: of one more worker, and of SlowMo and DiLoCo beside local SGD."""
    plain = ["model=resnet18", "dataset=synthetic", "batch_size=4"]
    local = [*plain, "sync=local_sgd", "sync.period=2"]
    few, many = peak("2", *local), peak("6", *local)
    what = "one more worker of local SGD (replica, gradient, momentum), in models"
    line(what, "resnet18", "", (many - few) / 4, 3.1)
    for name in ("slowmo", "diloco"):
        other = peak("2", *plain, f"sync={name}", "sync.period=2", "sync.buffers=keep")
        line(f"{name} beside local SGD, per process, in models", "resnet18, 2 workers", "", other - few, 2.0)


if __name__ == "__main__":
    run_benches({"step": bench_step, "memory": bench_memory}, __doc__, rounds=30)
