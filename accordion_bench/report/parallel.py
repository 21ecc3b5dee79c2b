"""Work in other processes: a parallel map with progress on stderr, and details of a run that need its classes.

Importing the classes of a run takes half a gigabyte. A server therefore rebuilds them in another process, which ends
after the answers.
"""

import contextlib
import functools
import gc
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from tqdm import tqdm

from accordion_bench import output
from accordion_bench.methods import labels
from accordion_bench.options.instantiate import build, is_trusted
from accordion_bench.processes.interrupt import end_with_parent

S = TypeVar("S")
T = TypeVar("T")
PATIENCE = 9.5  # seconds between lines of progress
MANY = 200  # smallest number of items for which starting processes pays off
TOGETHER = 8  # items per message


def told(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield the items while showing progress on stderr; `what` is the activity, such as `drawing`."""
    if output.can_draw(sys.stderr):
        yield from tqdm(items, total=total, desc=what, file=sys.stderr, leave=False, delay=1, mininterval=0.2)
        return
    said = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if time.monotonic() - said >= PATIENCE:
            said = time.monotonic()
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)


def each(work: Callable[[S], T], items: Sequence[S], what: str) -> list[T]:
    """Return the results of all items, in order. If a process is killed, all are recomputed in this process.

    Args:
        work: function defined at module level.
        items: arguments, small enough to be sent to a process.
        what: the activity, for the progress.
    """
    if len(items) >= MANY and cores() > 1:
        try:
            with _pool(cores()) as pool:
                return list(told(pool.map(work, items, chunksize=TOGETHER), len(items), what))
        except BrokenProcessPool:
            pass
    return [work(item) for item in told(items, len(items), what)]


def map_isolated(
    work: Callable[..., T], items: Sequence[tuple[Any, ...]], what: str, killed: Callable[..., T]
) -> list[T]:
    """Return the results of all items, in order, when one of them may exhaust the memory.

    Each item is sent separately. If a process is killed, each remaining item gets its own process.

    Args:
        work: function defined at module level.
        items: arguments, small enough to be sent to a process.
        what: the activity, for the progress.
        killed: function that returns the result of an item whose own process was killed, too.
    """

    def submitted(pool: ProcessPoolExecutor, item: tuple[Any, ...]) -> "Future[T] | None":
        try:
            return pool.submit(work, *item)
        except BrokenProcessPool:
            return None

    def alone(item: tuple[Any, ...]) -> T:
        try:
            with _pool(1) as own:
                return own.submit(work, *item).result()
        except BrokenProcessPool:
            return killed(*item)

    if min(len(items), cores()) < 2:
        return [work(*item) for item in told(items, len(items), what)]
    done: list[T] = []
    with _pool(min(len(items), cores())) as pool:
        try:
            asked = [submitted(pool, item) for item in items]
            for item, one in told(zip(items, asked, strict=True), len(items), what):
                try:
                    done.append(one.result() if one else alone(item))
                except BrokenProcessPool:
                    done.append(alone(item))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return done


def cores() -> int:
    """Return the number of processes that may compute at once; more than one only where forking is safe."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin)


def _begin() -> None:
    """Initialise a process: freeze inherited objects for the garbage collector, and limit torch to one thread."""
    end_with_parent()
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


# ---- details of layers sent dense at a level, and of learning-rate drops


LARGEST, MOST = 10_000_000, 100  # bounds of option values and list lengths accepted for building
DEEPEST = 10_000  # bound of a model's option values, which count its layers
LR_DROP = 0.5  # a learning rate of at most this times the previous one is a drop


def lr_drops(config: dict[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the epochs that start with a sudden drop of the learning rate; a steady decay, however steep, is no drop.

    Empty if a row lacks its learning rate.
    """
    rates = [row["lr"] for row in rows if row.get("lr") is not None]
    if len(rates) < len(rows):
        return []
    halved = [epoch for epoch in range(1, len(rates)) if rates[epoch] <= LR_DROP * rates[epoch - 1]]
    factor = _schedule(config) if halved else None
    if factor is None:
        return halved
    ends = {epoch: factor(math.nextafter(epoch, 0)) / factor(epoch - 1) for epoch in halved}
    return [epoch for epoch in halved if rates[epoch] <= LR_DROP * rates[epoch - 1] * ends[epoch]]


def _schedule(config: dict[str, Any]) -> Callable[[float], float] | None:
    """Return the learning-rate factor of a run by epoch; None if its class is untrusted or cannot be rebuilt."""
    if not _may_build(config, "schedule"):
        return None
    try:
        return build(config["schedule"], "schedule", epochs=config["epochs"], workers=config["workers"] or 1)
    except Exception:
        return None


def dense_layers(config: dict[str, Any], level: float) -> frozenset[str]:
    """Return the parameters that are sent dense at a level; empty if a class is untrusted or cannot be rebuilt."""
    known = all(_may_build(config, group) for group in ("compressor", "model", "dataset"))
    return look(config, level) if known else frozenset()


def of_classes(config: dict[str, Any], level: float) -> frozenset[str]:
    """Return the same for a configuration whose classes are trusted."""
    from accordion_bench.compressors.assemble import wrapped_compressor

    try:
        compressor = wrapped_compressor(config["compressor"], config["optimizer"]).compressor
        task = {"model": config["model"], "dataset": config["dataset"]}
        shapes = _shapes(json.dumps(task, sort_keys=True))
        return frozenset(spec.name for spec in shapes if not compressor.compresses(spec, level))
    except Exception:  # options of an older run may be invalid now; the map is then drawn without this detail
        return frozenset()


# how classes are queried; for a served report, in another process
look: Callable[[dict[str, Any], float], frozenset[str]] = of_classes


def _may_build(config: dict[str, Any], group: str) -> bool:
    """Whether the options of a config group name a trusted class of that group, and are small enough to be cheap."""
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
    """Return the specs of a model's trained tensors for a data set, shared by runs that differ in their compressor.

    The model is built on the meta device, without memory or values. Random initialisation is skipped, because on meta
    tensors torch would import its compiler, which takes longer than the rest of a report.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    from accordion_bench.config.components import build_model
    from accordion_bench.plan import TensorSpec
    from accordion_bench.tensors.keyed_rng import kept_rng

    class NoValues(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.__name__ == "normal_":  # of a tensor or of torch.nn.init
                return args[0] if args else kwargs["tensor"]
            return function(*args, **(kwargs or {}))

    task = json.loads(task_json)
    with kept_rng(), torch.device("meta"), NoValues():
        model = build_model(task["model"], build(task["dataset"], "dataset"))
    return tuple(TensorSpec(name, tuple(parameter.shape)) for name, parameter in model.named_parameters())


_known: dict[str, Any] = {}  # answers by query


@contextlib.contextmanager
def classes_apart() -> Iterator[None]:
    """Context that imports classes in another process only, unless torch is already loaded; answers are cached."""
    if "torch" in sys.modules:
        yield
        return
    global look
    with contextlib.closing(_Asked()) as asked:
        labels.look = functools.partial(asked, labels.declared_of_class)
        look = functools.partial(asked, of_classes)
        try:
            yield
        finally:
            labels.look, look = labels.declared_of_class, of_classes


class _Asked:
    """Queries classes in another process, which is started for the first query without a cached answer."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.pool: ProcessPoolExecutor | None = None

    def __call__(self, look: Callable[..., Any], *about: Any) -> Any:
        if os.getpid() != self.pid:  # in a process of a pool that reads many runs, which ends soon
            return look(*about)
        key = json.dumps([look.__name__, *about], sort_keys=True, default=str)
        if key not in _known:
            if self.pool is None:
                spawned = multiprocessing.get_context("spawn")
                self.pool = ProcessPoolExecutor(1, spawned, _begin_apart, (sys.path,))
            try:
                _known[key] = self.pool.submit(look, *about).result()
            except BrokenProcessPool:  # the process was killed
                return look(*about)
        return _known[key]

    def close(self) -> None:
        """End the other process."""
        if self.pool is not None:
            self.pool.shutdown()


def _begin_apart(path: list[str]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends with its parent's queries
    sys.path[:] = path
