"""CUDA without a driver: the pretended device under the name `cuda:0`, and recorders in place of torch.cuda.

Code takes the branches of a GPU with real numbers, and torch.cuda accepts the calls that the installed torch accepts.
Streams order nothing here, because everything runs at once; a graph is a tape. Kernels are launched through `launch`,
where their arguments are checked as Triton checks them on a GPU.
"""

import contextlib
import inspect
import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, profiler
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from accordion_bench.codecs import engines
from accordion_bench.comm import graphs
from accordion_bench.conformance import pretend_device
from accordion_bench.conformance.placement import Strict, Tape
from accordion_bench.conformance.pretend_device import DEVICE, Pretend, one_launch, pretended, real
from accordion_bench.tensors.kernels.on_gpu import launch

GPU = torch.device("cuda", 0)
NUMBERS = (bool, int, float)  # of Python: a number of NumPy has no type for Triton
TYPES = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
}
LARGEST_GRID = (2**31 - 1, 65535, 65535)
CPU = profiler.ProfilerActivity.CPU
FORBIDDEN = "operation not permitted when stream is capturing"


def on_meta(device: Any) -> Any:
    """Return the device on which tensors of `cuda` are kept; others unchanged."""
    if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
        assert torch.device(device).index in (None, 0), f"{device} is not there"
        return DEVICE
    return device


class ByName(TorchFunctionMode):
    """Replaces the device `cuda` in calls of torch, and pinned memory that only a driver can allocate."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cuda:
            func, args = Tensor.to, (args[0], GPU)
        kwargs = dict(kwargs or {})
        args = tuple(on_meta(x) if isinstance(x, torch.device) else x for x in args)
        if getattr(func, "__name__", "") == "to":
            args = tuple(on_meta(x) if isinstance(x, str) else x for x in args)
        if "device" in kwargs:
            kwargs["device"] = on_meta(kwargs["device"])
        if isinstance(kwargs.get("generator"), Generator):
            kwargs["generator"] = None
        pinned = kwargs.pop("pin_memory", False)
        out = func(*args, **kwargs)
        if pinned:
            out._is_pinned = True
        return out


class Driver:
    """What is remembered of one pretended CUDA.

    Attributes:
        launched: (name, types and constants of its arguments) of each launch.
        memory: tensors that were made within a graph, which it keeps.
        captured: number of captured graphs.
        tape: of the graph that is being captured; None = none is.
    """

    def __init__(self) -> None:
        self.launched: list[tuple[str, tuple[Any, ...]]] = []
        self.memory: list[Any] = []
        self.captured = 0
        self.tape: Tape | None = None
        self.streams = [Stream(GPU)]

    def waits(self) -> None:
        """Refuse what makes the host wait while a graph is captured."""
        if self.tape is not None:
            raise RuntimeError(FORBIDDEN)


class Stream:
    """A stream; `current` is that of the thread."""

    numbers = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device, self.cuda_stream = device, next(self.numbers)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        assert isinstance(event, Event)

    def wait_stream(self, stream: "Stream") -> None:
        assert isinstance(stream, Stream)

    def synchronize(self) -> None:
        DRIVER.waits()

    def is_capturing(self) -> bool:
        return DRIVER.tape is not None


class Event:
    """An event; one that is recorded in a graph has a time only if it is external."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.timed, self.external, self.at, self.in_graph = enable_timing, external, None, False

    def record(self, stream: Stream | None = None) -> None:
        self.at, self.in_graph = time.perf_counter(), DRIVER.tape is not None

    def elapsed_time(self, other: "Event") -> float:
        DRIVER.waits()
        for event in (self, other):
            assert event.timed and event.at is not None, "an event without a time is read"
            assert event.external or not event.in_graph, "an event of a graph is read"
        return 1000 * (other.at - self.at)

    def synchronize(self) -> None:
        DRIVER.waits()

    def query(self) -> bool:
        return True


class Generator:
    """A generator of the GPU, which stands for torch's default generator of the CPU."""

    def __init__(self, device: Any = GPU) -> None:
        self.state: Any = self
        self.seed = 0

    def manual_seed(self, seed: int) -> "Generator":
        if DRIVER.tape is not None:
            raise RuntimeError("cannot seed a generator while a graph is captured")
        self.state.seed = seed
        torch.default_generator.manual_seed(seed)
        return self

    def graphsafe_get_state(self) -> "Generator":
        return self.state

    def graphsafe_set_state(self, state: "Generator") -> None:
        assert isinstance(state, Generator)
        self.state = state


class Graph:
    """A graph, by a tape."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.tape = Tape()

    def replay(self) -> None:
        DRIVER.waits()
        with one_launch("graph"):
            self.tape.replay()


@contextlib.contextmanager
def graph(
    cuda_graph: Graph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Record what is launched inside; nothing may be uploaded, and nobody may wait."""
    assert pool is None or isinstance(pool, tuple)
    before, counts = torch.get_rng_state(), Pretend.counts
    waited, uploads = counts.waits.copy(), counts.uploads
    DRIVER.tape = cuda_graph.tape
    try:
        with current(stream), Strict(), cuda_graph.tape:
            yield
        if counts.waits != waited or counts.uploads != uploads:
            raise RuntimeError(f"{FORBIDDEN}: {counts.waits - waited} waits, {counts.uploads - uploads} uploads")
        DRIVER.captured += 1
    finally:
        DRIVER.tape = None
        torch.set_rng_state(before)
        cuda_graph.tape.undo()


@contextlib.contextmanager
def current(stream: Stream | None) -> Iterator[None]:
    DRIVER.streams.append(stream or DRIVER.streams[-1])
    try:
        yield
    finally:
        DRIVER.streams.pop()


def checked(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[Any, ...]:
    """Check a launch as Triton does; return the types of its arguments, and its constants.

    Raises:
        AssertionError: a GPU would refuse it.
    """
    of = f"{kernel.__name__}{grid}"
    assert all(type(n) is int and 0 < n <= most for n, most in zip(grid, LARGEST_GRID, strict=False)), of
    assert len(grid) <= 3, of
    signature = inspect.signature(kernel.fn)
    options = {"num_warps", "num_stages"}
    bound = signature.bind(*args, **{name: x for name, x in constants.items() if name not in options})
    bound.apply_defaults()
    types = []
    for name, x in bound.arguments.items():
        constexpr = "constexpr" in str(signature.parameters[name].annotation)
        if isinstance(x, Tensor):
            assert not constexpr, f"{of}: {name} is a constant, got a tensor"
            assert isinstance(x, Pretend), f"{of}: {name} is on the CPU"
            assert x.dtype in TYPES, f"{of}: {name} is {x.dtype}"
            types.append((name, str(x.dtype)))
        elif constexpr:
            hash(x)
            assert not hasattr(x, "dtype"), f"{of}: {name} is {type(x)}"
            types.append((name, x))
        else:
            assert type(x) in NUMBERS, f"{of}: {name} is {type(x)}"
            assert not isinstance(x, int) or -(2**63) <= x < 2**64, f"{of}: {name} is {x}"
            types.append((name, type(x).__name__))
    return tuple(types)


DRIVER = Driver()


def properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(uuid="GPU-0", total_memory=2**37, major=9, minor=0, multi_processor_count=132, name="none")


class Device(contextlib.nullcontext):
    """The current device, the only one."""


def cell(x: Tensor, to: torch.device) -> Tensor:
    """Return memory of a cell with its values at capture, because a tape computes while it records."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return Pretend(x.clone())


REPLACED: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": Graph,
    "graph": graph,
    "stream": current,
    "device": Device,
    "current_stream": lambda device=None: DRIVER.streams[-1],
    "set_device": lambda device: None,
    "synchronize": lambda device=None: DRIVER.waits(),
    "is_current_stream_capturing": lambda: DRIVER.tape is not None,
    "current_device": lambda: 0,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "get_device_name": lambda device=None: "no GPU",
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": properties,
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
    "graph_pool_handle": lambda: (0, 1),
    "is_bf16_supported": lambda including_emulation=True: True,
    "empty_cache": lambda: None,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "set_sync_debug_mode": lambda debug_mode: None,
}


def as_installed(name: str, ours: Any) -> Any:
    """Return a replacement that accepts the arguments of the installed torch's function alone."""
    if isinstance(ours, type):
        return ours
    signature = inspect.signature(getattr(torch.cuda, name))

    def called(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        return ours(*args, **kwargs)

    return called


@contextlib.contextmanager
def cuda(interpreted: bool = True, kernels: bool = True) -> Iterator[Driver]:
    """Pretend that this machine has a GPU.

    Args:
        interpreted: whether kernels compute, by Triton's interpreter; otherwise launches are checked alone.
        kernels: whether codecs use kernels in Triton; otherwise the reference computes, and is counted as them.
    """
    global DRIVER
    before, DRIVER = DRIVER, Driver()
    driver = DRIVER

    def start(kernel: Any, grid: Any, device: torch.device, args: Any, constants: Any) -> None:
        assert device.type == "cuda", f"{kernel.__name__} is launched on {device}"
        driver.launched.append((kernel.__name__, checked(kernel, grid, args, constants)))

        def launched() -> None:
            with one_launch(kernel.__name__):
                if interpreted:
                    kernel[grid](*map(real, args), **constants)

        if driver.tape is None:
            launched()
        else:
            driver.tape.operations.append((launched, (), {}, None))

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        out = operation(func, args, kwargs)
        if driver.tape is not None:
            driver.memory.append(out)
        if not interpreted and func._schema.name.removeprefix("aten::").removeprefix("new_").startswith("empty"):
            for x in tree_leaves(out):
                real(x).detach().zero_()
        return out

    profile, operation, generator = profiler.profile, pretend_device._run, Generator()
    with contextlib.ExitStack() as stack, pretended():
        patch = lambda *of, **more: stack.enter_context(mock.patch.object(*of, **more))  # noqa: E731
        for name, ours in REPLACED.items():
            patch(torch.cuda, name, as_installed(name, ours))
        patch(torch.cuda, "default_generators", (generator,))
        patch(torch.accelerator, "current_stream", torch.cuda.current_stream)
        patch(graphs.CudaGraphs, "new_generator", lambda graphs: Generator(graphs.device))
        patch(Pretend, "device", GPU, create=True)
        patch(Pretend, "is_cuda", True, create=True)
        patch(Pretend, "is_meta", False, create=True)
        patch(Tensor, "record_stream", lambda x, stream: None)
        patch(graphs, "_elsewhere", cell)
        patch(launch, "start", start)
        patch(profiler, "profile", lambda activities, **more: profile(activities=[CPU], **more))
        patch(pretend_device, "_run", run)
        if kernels:
            patch(engines, "STAND_INS", [])
        stack.enter_context(ByName())
        try:
            yield driver
        finally:
            DRIVER = before
