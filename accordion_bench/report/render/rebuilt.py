"""What only the classes of a run tell, which are built again here or in another process: which layers are sent dense
at a level, when the learning rate drops.

To import a class takes half a gigabyte: of a server, another process does it, and ends when it has answered.
"""

import contextlib
import functools
import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from accordion_bench.methods import labels
from accordion_bench.methods.labels import declared_of_class
from accordion_bench.options.instantiate import build, is_trusted
from accordion_bench.processes.interrupt import end_with_parent
from accordion_bench.report.read.load import Run

LARGEST, MOST = 10_000_000, 100  # of the numbers and lists of options with which something is built
DEEPEST = 10_000  # of the numbers of a model, which count its layers
LR_DROP = 0.5  # a learning rate of at most this times the last one is a drop


def lr_drops(run: Run) -> list[int]:
    """Epochs that start with a learning rate that has dropped at once; a steady decay, however steep, has no drop.

    None where a row does not tell its learning rate.
    """
    if any(row.get("lr") is None for row in run.rows):
        return []
    rates = [row["lr"] for row in run.rows]
    halved = [epoch for epoch in range(1, len(rates)) if rates[epoch] <= LR_DROP * rates[epoch - 1]]
    factor = _schedule(run) if halved else None
    if factor is None:
        return halved
    ends = {epoch: factor(math.nextafter(epoch, 0)) / factor(epoch - 1) for epoch in halved}
    return [epoch for epoch in halved if rates[epoch] <= LR_DROP * rates[epoch - 1] * ends[epoch]]


def _schedule(run: Run) -> Callable[[float], float] | None:
    """The factor of a run's learning rate; None where it is none of ours, or this version cannot rebuild it."""
    if not _may_build(run.config, "schedule"):
        return None
    try:
        rebuilt = {"epochs": run.config["epochs"], "workers": run.config["workers"] or 1}
        return build(run.config["schedule"], "schedule", **rebuilt)
    except Exception:
        return None


def dense_layers(config: dict[str, Any], level: float) -> frozenset[str]:
    """Parameters that travel dense at a level; none where the run's model is none of ours, or cannot be rebuilt."""
    known = all(_may_build(config, group) for group in ("compressor", "model", "dataset"))
    return look(config, level) if known else frozenset()


def of_classes(config: dict[str, Any], level: float) -> frozenset[str]:
    """The same of a configuration whose classes may be called."""
    from accordion_bench.compressors.assemble import wrapped_compressor

    try:
        compressor = wrapped_compressor(config["compressor"], config["optimizer"]).compressor
        task = {"model": config["model"], "dataset": config["dataset"]}
        shapes = _shapes(json.dumps(task, sort_keys=True))
        return frozenset(spec.name for spec in shapes if not compressor.compresses(spec, level))
    except Exception:  # an older run's options may have no meaning today; the map is then drawn without this detail
        return frozenset()


# how classes are asked: for a report that is served, in another process
look: Callable[[dict[str, Any], float], frozenset[str]] = of_classes


def _may_build(config: dict[str, Any], group: str) -> bool:
    """Whether the options of a config group name a class of that group, and are of a size that costs nothing."""
    node = config.get(group)
    if not isinstance(node, dict) or not is_trusted(node.get("_target_"), group):
        return False
    most = DEEPEST if group == "model" else LARGEST
    values = [item for value in node.values() for item in (value if isinstance(value, list) else [value])]
    small = all(abs(item) <= most for item in values if isinstance(item, int | float))
    plain = all(isinstance(item, int | float | str | None) for item in values)
    return small and plain and len(values) <= MOST


@functools.cache
def _shapes(task_json: str) -> tuple[Any, ...]:
    """The trained tensors of a model for a data set: runs that differ in their compressor share them.

    Shapes alone: the tensors take no memory, and no values. For random ones without memory torch would import its
    compiler, which takes longer than all else in a report.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    from accordion_bench.config.components import build_model
    from accordion_bench.options.instantiate import build
    from accordion_bench.plan import TensorSpec
    from accordion_bench.tensors.keyed_rng import kept_rng

    class NoValues(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.__name__ == "normal_":  # a tensor's, or that of torch.nn.init
                return args[0] if args else kwargs["tensor"]
            return function(*args, **(kwargs or {}))

    task = json.loads(task_json)
    with kept_rng(), torch.device("meta"), NoValues():
        model = build_model(task["model"], build(task["dataset"], "dataset"))
    return tuple(TensorSpec(name, tuple(parameter.shape)) for name, parameter in model.named_parameters())


_known: dict[str, Any] = {}  # by what was asked


@contextlib.contextmanager
def classes_apart() -> Iterator[None]:
    """Inside, no class is imported here to name or draw an arm, unless torch is loaded; answers are kept."""
    if "torch" in sys.modules:
        yield
        return
    global look
    with contextlib.closing(_Asked()) as asked:
        labels.look = functools.partial(asked, declared_of_class)
        look = functools.partial(asked, of_classes)
        try:
            yield
        finally:
            labels.look, look = declared_of_class, of_classes


class _Asked:
    """Asks classes in another process, which is started for the first question without a kept answer."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.pool: ProcessPoolExecutor | None = None

    def __call__(self, look: Callable[..., Any], *about: Any) -> Any:
        if os.getpid() != self.pid:  # one of a pool that reads many runs: it ends soon
            return look(*about)
        key = json.dumps([look.__name__, *about], sort_keys=True, default=str)
        if key not in _known:
            if self.pool is None:
                spawned = multiprocessing.get_context("spawn")
                self.pool = ProcessPoolExecutor(1, spawned, _begin, (sys.path,))
            try:
                _known[key] = self.pool.submit(look, *about).result()
            except BrokenProcessPool:  # it was killed
                return look(*about)
        return _known[key]

    def close(self) -> None:
        """End the other process."""
        if self.pool is not None:
            self.pool.shutdown()


def _begin(path: list[str]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with what it was asked
    sys.path[:] = path
