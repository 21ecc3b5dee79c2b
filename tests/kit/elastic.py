"""Elastic workers, each in a process, with constant gradients, so that the results are known."""

import contextlib
import datetime
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import accordion_bench as ab
from accordion_bench.comm import generations
from accordion_bench.exchange.exchange import Exchange
from tests.kit.processes import forked

LR = 0.5
ENDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
AMID = "amid "  # before an end: within an exchange, when its first bucket has come


class Constant(nn.Module):
    """Model of two tensors in two layers; their gradients are the worker's number plus one, times 1, 2, ..."""

    def __init__(self, inputs: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(inputs, 2, bias=False), nn.Linear(2, 1, bias=False)])
        for layer in self.layers:
            nn.init.zeros_(layer.weight)

    def forward(self, name: int) -> torch.Tensor:
        sums = ((layer.weight * slopes(layer.weight)).sum() for layer in self.layers)
        return sum(sums, torch.zeros(())) * (name + 1)


def slopes(x: torch.Tensor) -> torch.Tensor:
    """Return 1, 2, ... in the shape of x."""
    return torch.arange(1.0, 1 + x.numel()).view(x.shape)


class Run:
    """Workers of one run, with a store hosted by this process.

    Args:
        folder: folder for the results of the workers.
        steps: number of steps of the run.
        options: arguments of `ab.local`; with sync=every_step of `ab.attach`.
    """

    def __init__(self, folder: Path, steps: int, **options: Any) -> None:
        self.folder, self.steps = folder, steps
        self.options = {"elastic": True, "min_workers": 2, "timeout": 5.0, **options}
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.processes: dict[int, Any] = {}

    def start(self, *names: int, first: int = 0, end: tuple[int, str] = (-1, ""), **other: Any) -> None:
        """Start workers.

        Args:
            names: numbers of the workers.
            first: number of workers that start together; 0 = these join later.
            end: (step, how): end the worker before the average after this step.
            other: options that differ.
        """
        if not first:
            wait_for(lambda: self.store.check(["members/generation-1"]))
        with forked(), _environment({"WORLD_SIZE": str(first or 1)}):
            for name in names:
                told = self.folder / f"{name}.json", self.steps, end, {**self.options, **other}
                process = multiprocessing.get_context("spawn").Process(
                    target=work, args=(("127.0.0.1", self.store.port), name, *told)
                )
                process.start()
                self.processes[name] = process

    def told(self, name: int, seconds: float = 60) -> dict[str, Any]:
        """Return the result that a worker has written at its end."""
        self.processes[name].join(seconds)
        file = self.folder / f"{name}.json"
        assert file.exists(), f"worker {name} has said nothing; exit status {self.processes[name].exitcode}"
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def close(self) -> None:
        """Kill the workers that are still running."""
        for process in self.processes.values():
            process.kill()
            process.join()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def wait_for(found: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until `found()` is true."""
    until = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < until
        time.sleep(0.02)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def work(
    place: tuple[str, int], name: int, file: Path, steps: int, end: tuple[int, str], options: dict[str, Any]
) -> None:
    """Run one worker to its end, and write its state after each step to a file."""
    generations.BEAT, generations.SILENCE = 0.1, 1.5
    torch.set_num_threads(1)
    store = dist.TCPStore(*place, None, False, datetime.timedelta(seconds=60), wait_for_workers=False)
    model, sync = Constant(options.pop("inputs", 3)), options.pop("sync", "local_sgd")
    pace, optimizer = options.pop("pace", 0.0), torch.optim.SGD(model.parameters(), LR, options.pop("momentum", 0.0))
    own: dict[str, Any] = {"values": {}, "members": {}, "samples": {}, "took": {}, "whole": {}, "ranks": {}}
    try:
        if sync == "every_step":
            local = ab.attach(model, optimizer, store=store, batch_size=2, **options)
        else:
            local = ab.local(model, optimizer, sync, store=store, batch_size=2, **options)
        own["entered"] = local.position.step
        while local.position.step < steps:
            step = local.position.step
            own["samples"][step], own["ranks"][step] = local.samples(24).tolist(), local.comm.rank
            time.sleep(pace)
            model(name).backward()
            if step == end[0]:
                _end(end[1])
            began = time.monotonic()
            local.optimizer.step()
            own["took"][step] = time.monotonic() - began
            local.optimizer.zero_grad()
            own["whole"][step] = [layer.weight.tolist() for layer in model.layers]
            own["values"][step] = [float(layer.weight.detach()[0, 0]) for layer in model.layers]
            own["members"][step] = local.comm.workers
        local.finish()
        own |= {"end": float(model.layers[0].weight.detach()[0, 0]), "row": local.metrics()}
    except Exception as error:
        own["error"] = f"{type(error).__name__}: {error}"
    file.write_text(json.dumps(own, default=str))


def _end(how: str) -> None:
    """End this process, now or after the first bucket of the next exchange."""
    number = ENDS[how.removeprefix(AMID)]
    if not how.startswith(AMID):
        os.kill(os.getpid(), number)
    send, sent = Exchange.send, []

    def ending(self: Exchange, *arguments: Any) -> Any:
        if sent:
            os.kill(os.getpid(), number)
        sent.append(self)
        return send(self, *arguments)

    Exchange.send = ending  # type: ignore[method-assign]
