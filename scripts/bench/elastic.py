"""Cost of elastic workers: in every step, when one is lost, and when one enters; prints Markdown.

    python -m scripts.bench.elastic              # all
    python -m scripts.bench.elastic steps        # a step with `sync.elastic=true` over one without
    python -m scripts.bench.elastic changes      # a worker is killed or stopped, and another one enters

Four gloo processes of one worker each on this machine, ResNet-20 on 8x8 images. The two kinds of steps take their turns
in the same processes. In a round of changes the last worker ends before an exchange, and a fifth one, which has started
and waits, enters later. A change holds the others up for their longest step around it, less the median step.
"""

import datetime
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.harness import interleaved, line, print_row, ratio, run_benches, spread

MODEL = [
    *("model=resnet20", "dataset=synthetic", "dataset.size=8", "dataset.train_size=16384", "dataset.test_size=64"),
    *("batch_size=8", "checkpoint.every=0"),
]
WORKERS = 4
TIMEOUT = 5.0  # comm.timeout, seconds
WARM, LOST = 7, 23  # steps that are not counted; before the one in which a worker ends, which is the last of a round
BETWEEN, AFTER = 17, 16  # steps from there until another worker may enter, and after it has entered
STEPS = {"dense": [], "TopK 10 %": ["compressor=topk", "compressor.density=0.1"]}
CHANGES = {
    "every step, dense": [],
    "every step, dense, SGD without momentum": ["optimizer.momentum=0"],
    "every step, TopK 10 %": STEPS["TopK 10 %"],
    "local SGD, period 8": ["sync=local_sgd", "sync.period=8"],
    "DiLoCo, period 8": ["sync=diloco", "sync.period=8"],
}
PERIOD = 8


# ---- in a worker


def entrance(port: int, name: str) -> Any:
    """The part of the store in which the workers of a run meet."""
    import torch.distributed as dist

    from accordion_bench.comm.sealed_store import SealedStore

    patience = datetime.timedelta(seconds=300)
    base = dist.TCPStore("127.0.0.1", port, None, False, patience, wait_for_workers=False)
    return SealedStore(base, WORKERS).under(name)


def entered(port: int, name: str, number: int, overrides: list[str], wait: Callable[[Any], object]) -> Any:
    """The trainer of a worker that has entered an elastic run.

    Args:
        port: of the store.
        name: of the run.
        number: of the worker.
        overrides: of the run.
        wait: called with the run's store once this worker is ready to enter.
    """
    import torch

    from accordion_bench.comm.collectives import Comm
    from accordion_bench.comm.elastic import ElasticMembership
    from accordion_bench.comm.generations import Terms
    from scripts.bench.arms import trainer_for

    torch.set_num_threads(1)
    store = entrance(port, name)
    comm = Comm(1, WORKERS)
    membership = ElasticMembership(store, comm, Terms(WORKERS, 1, TIMEOUT, {}, number))
    trainer = trainer_for([*MODEL, *overrides, "sync.elastic=true"], comm)
    trainer.runner.preload()
    wait(store)
    membership.enter(trainer.shared_state())
    trainer.begin_epoch()
    return trainer


def together(store: Any) -> None:
    """Wait until the first workers are ready, so that none counts as missing while it still imports."""
    store.add("ready", 1)
    while store.add("ready", 0) < WORKERS:
        time.sleep(0.01)


def step_of(trainer: Any) -> Callable[[], None]:
    """One step of a trainer, within an epoch."""

    def step() -> None:
        with trainer.step.graphs.training():
            trainer.train_step()

    return step


def time_steps(port: int, number: int, out: Path, rounds: int) -> None:
    """Seconds of steps of each kind in each round, with and without `sync.elastic`."""
    import torch.distributed as dist

    from accordion_bench.comm.collectives import Comm
    from scripts.bench.arms import trainer_for

    found = {}
    for name, overrides in STEPS.items():
        elastic = entered(port, name, number, overrides, together)
        plain = trainer_for([*MODEL, *overrides], Comm(1, WORKERS, dist.get_rank()))
        found[name] = interleaved({"elastic": step_of(elastic), "plain": step_of(plain)}, rounds, steps=8)
        elastic.comm.membership.together(elastic.comm.barrier)
        elastic.comm.membership.leave()
    if number == 0:
        out.write_text(json.dumps(found), encoding="utf-8")


def time_changes(port: int, number: int, out: Path, overrides: list[str], end: int) -> None:
    """Take steps while the last worker ends and a fifth one enters; write seconds and members of each step."""
    newcomer = number == WORKERS
    began = 0.0

    def called(store: Any) -> None:
        nonlocal began
        while not store.add("called", 0):
            time.sleep(0.01)
        began = time.perf_counter()

    trainer = entered(port, "run", number, overrides, called if newcomer else together)
    entering = time.perf_counter() - began
    comm, step = trainer.comm, step_of(trainer)
    found: list[tuple[float, int]] = []
    left = AFTER if newcomer else float("inf")
    while left > 0:
        if number == WORKERS - 1 and len(found) == LOST:
            trainer.sync.before_step = lambda lr: os.kill(os.getpid(), end)
        start, before = time.perf_counter(), comm.workers
        step()
        found.append((time.perf_counter() - start, comm.workers))
        if number == 0 and len(found) == LOST + BETWEEN:
            entrance(port, "run").add("called", 1)
        left = AFTER if comm.workers > before else left - 1
    model = 4 * sum(x.numel() for x in trainer.axis.params)
    told = {"steps": found, "entering": entering, "model": model, "bytes": comm.membership.columns()["joining_bytes"]}
    out.with_name(f"{number}.json").write_text(json.dumps(told), encoding="utf-8")
    comm.membership.together(comm.barrier)
    comm.membership.leave()


# ---- in the parent


def launch(target: Callable[..., None], workers: int, *arguments: Any) -> list[Any]:
    """Run some workers; what those have written who came to the end.

    Args:
        target: runs in each, with port, number and file.
        workers: how many.
        arguments: more of them.
    """
    import torch.distributed as dist

    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["scripts.bench.arms", "accordion_bench.comm.elastic", "torch._dynamo"])
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "0.json")
        children = [
            server.Process(target=target, args=(store.port, number, out, *arguments)) for number in range(workers)
        ]
        for child in children:
            child.start()
        for number in (0, *range(1, workers)):
            children[number].join(300 if number != WORKERS - 1 else 1)
        for child in children:
            child.kill()
            child.join()
        if not out.exists():
            raise RuntimeError(f"worker 0 ended with exit status {children[0].exitcode}")
        return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(Path(folder).iterdir())]


def bench_steps(rounds: int) -> None:
    """A step with the vote of all, over one without."""
    (found,) = launch(time_steps, WORKERS, rounds)
    for name, times in found.items():
        measured = spread(*ratio(times["elastic"], times["plain"]))
        ours = f"{1000 * statistics.median(times['elastic']):.1f} ms"
        print_row("step with `sync.elastic=true` / without", f"{name}, 4 processes", ours, measured, "", "")


def change(overrides: list[str], end: int, period: int) -> dict[str, float]:
    """What one round of changes has cost.

    Args:
        overrides: of the run.
        end: signal by which the last worker ends.
        period: steps of a round.
    """
    *survivors, newcomer = launch(time_changes, WORKERS + 1, overrides, int(end))
    found = {"lost": 0.0, "joined": 0.0}
    for one in survivors:
        seconds = [took for took, _ in one["steps"]]
        members = [WORKERS, *(count for _, count in one["steps"])]
        for i, took in enumerate(seconds):
            usual = statistics.median(seconds[i % period + WARM :: period])
            what = "lost" if members[i + 1] < members[i] else "joined" if members[i + 1] > members[i] else None
            if what:
                found[what] = max(found[what], took - usual)
    step = statistics.median(took for took, _ in survivors[0]["steps"][WARM:])
    return found | {
        "entering": newcomer["entering"] / (period * step),
        "stood": found["joined"] / (period * step),
        "round": period * step,
        "bytes": newcomer["bytes"] / newcomer["model"],
    }


def bench_changes(rounds: int) -> None:
    """Seconds for which the others wait for a lost worker, and what a new one costs."""
    for end in (signal.SIGKILL, signal.SIGSTOP):
        for name, overrides in CHANGES.items():
            period = PERIOD if f"sync.period={PERIOD}" in overrides else 1
            if end == signal.SIGSTOP and name != "every step, dense" and period == 1:
                continue
            every = [change(overrides, end, period) for _ in range(rounds)]
            middle = {key: statistics.median(one[key] for one in every) for key in every[0]}
            longest = max(one["lost"] for one in every)
            what = f"a worker {'killed' if end == signal.SIGKILL else 'stopped'}: the others are held up"
            more = f", longest {longest:.2f} s"
            line(what, f"{name}, comm.timeout={TIMEOUT:g}", "", middle["lost"], TIMEOUT + 2, " s", more)
            if end == signal.SIGKILL:
                line("a worker enters: its bytes, in models", name, "", middle["bytes"], 1.0)
                ours = f"{1000 * middle['joined']:.0f} ms"
                more = f"; a round takes {1000 * middle['round']:.0f} ms"
                line("a worker enters: the others are held up, in rounds", name, ours, middle["stood"], 1.0, more=more)
                line("a worker enters: from the door to its first step, in rounds", name, "", middle["entering"], 1.0)


if __name__ == "__main__":
    run_benches({"steps": bench_steps, "changes": bench_changes}, __doc__, rounds=3)
