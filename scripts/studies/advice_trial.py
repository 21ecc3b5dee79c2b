"""Times of a step and of each method's codec on this machine, by the advice's own measurement: no link, no training.

As many processes as share the machine later do the same at the same time, so the times include contention for memory.
"""

import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from threading import Barrier
from typing import TYPE_CHECKING, Any

import yaml

from accordion_bench.advising.predict import BucketCost, Messages, MethodCost
from accordion_bench.advising.step_times import StepTimes
from accordion_bench.plan import TensorSpec
from scripts.studies.advice_cells import ALONE, ARMS, MODELS, Cell

if TYPE_CHECKING:
    from accordion_bench.advising.arms import AdvisedArm

SAME = {"DDP": "dense"}  # the same bytes in the same buckets: DistributedDataParallel is foretold as dense is


def trial(model: str, arms: Sequence[str], budget: float, together: Barrier) -> dict[str, Any]:
    """Measure, in one of the processes, the step, then every arm's exchange.

    Args:
        model: one of `MODELS`.
        arms: some of `ARMS`.
        budget: time for the codecs, in seconds.
        together: barrier at which all processes wait for each other.
    """
    import torch

    from accordion_bench.advising.arms import measured_methods
    from accordion_bench.advising.step_times import measured_step
    from accordion_bench.comm.collectives import Comm
    from scripts.bench.arms import trainer_for

    torch.set_num_threads(1)
    trainer = trainer_for(MODELS[model], Comm(1))
    batch, task = next(trainer.step.feed.step()).read(), trainer.task
    together.wait()
    times = measured_step(
        trainer.axis.model,
        batch,
        lambda model, batch: task.loss(model, *batch, 0, 0),
        batch_size=len(batch[1]),
    )
    times = replace(times, model=model)
    together.wait()
    asked = [advised_arm(name) for name in arms if name != ALONE and name not in SAME]
    costs, left_out = measured_methods(asked, times.specs, trainer.device, budget) if asked else ([], {})
    return {"step": asdict(times), "methods": {cost.name: asdict(cost) for cost in costs}, "left_out": left_out}


def advised_arm(name: str) -> "AdvisedArm":
    """Return one of our arms in the form of the advice, under our name."""
    from accordion_bench.advising.arms import arm_of

    typed = dict(override.split("=", 1) for override in ARMS[name])
    options = {key.partition(".")[2]: yaml.safe_load(typed[key]) for key in typed if key.startswith("compressor.")}
    return replace(arm_of(typed.get("compressor", "none"), typed.get("sync", "every_step"), options), name=name)


def tried(model: str, arms: Sequence[str], budget: float, processes: int) -> Cell:
    """Return the measurements of the first of this number of processes while the others did the same."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(processes, context) as pool:
        together = manager.Barrier(processes, timeout=300)  # seconds: after a failure none waits for ever
        running = [pool.submit(trial, model, arms, budget, together) for _ in range(processes)]
        first, *_ = [one.result() for one in running]
    return first


# ---- from the file


def times_from(said: Cell) -> StepTimes:
    """Return a step read back from its written form."""
    specs = tuple(TensorSpec(spec["name"], tuple(spec["shape"])) for spec in said["specs"])
    return StepTimes(**{**said, "specs": specs, "ready": tuple(said["ready"]), "steps": tuple(said["steps"])})


def cost_from(said: Cell) -> MethodCost:
    """Return a method's cost read back from its written form."""
    lists = {key: tuple(said[key]) for key in ("overrides", "repetitions")}
    buckets = {key: tuple(map(_bucket, said[key])) for key in ("buckets", "crowded")}
    crowded = math.inf if said["crowded_from"] is None else said["crowded_from"]  # JSON has no infinity
    parts = tuple(map(tuple, said.get("parts", ())))
    return MethodCost(**{**said, **lists, **buckets, "parts": parts, "crowded_from": crowded})


def _bucket(said: Cell) -> BucketCost:
    messages = {kind: Messages(*sent) for kind, sent in said["messages"].items()}
    return BucketCost(tuple(said["members"]), said["encode"], tuple(said["decode"]), messages)
