"""CPU replacement for CUDA graphs: a tape.

A tape records operations and replays them later on the same memory. As in a CUDA capture, the captured work has no
effect until it is replayed. Operations that a GPU cannot replay are refused: numbers read by the host, tensors made
from numbers of the host, CPU generators. Python numbers among the arguments keep their value at capture.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from accordion_bench.comm.graphs import Graphs, NotCapturable
from accordion_bench.comm.on_device import Streams
from accordion_bench.conformance.pretend_device import (
    DEVICE,
    NO_KERNEL,
    READ_BY_HOST,
    SIZED_BY_DATA,
    Pretend,
    one_launch,
    real,
)
from accordion_bench.exchange.dry_exchange import tensors_in
from accordion_bench.tensors.upload import capture_uploads, filled

T = TypeVar("T")
READS = {"numpy", "tolist", "item", "__array__", "__bool__", "__int__", "__float__", "__index__"}
UNDECLARED = {"running_mean", "running_var"}  # written by batch_norm, although its schema does not say so
UNSEEDED = 0x5EED_0F_7A9E  # seed of torch's generator during a capture
FROM_HOST = {torch.tensor, torch.as_tensor, torch.from_numpy}


class Tape(TorchDispatchMode):
    """Records operations while they are computed; `undo` reverts their writes, `replay` computes them again."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self._before: list[tuple[Tensor, Tensor]] = []  # written tensors and copies of their previous values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in READ_BY_HOST | SIZED_BY_DATA:
            raise NotCapturable(f"the host reads a number of the device ({name})")
        if kwargs.get("generator") is not None:
            raise NotCapturable(f"{name} draws from a generator of the host")
        self._keep(func, args, kwargs)
        out = func(*args, **kwargs)
        views = any(
            returned.alias_info is not None and not returned.alias_info.is_write for returned in func._schema.returns
        )
        if not (views or name in NO_KERNEL or name == "lift_fresh" or name.startswith("profiler")):
            self.operations.append((func, *tree_map(_as_it_lies, (args, kwargs)), out))
        return out

    def _keep(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        declared = func._schema.arguments
        given = [
            *zip(declared, args, strict=False),
            *((own, kwargs[own.name]) for own in declared if own.name in kwargs),
        ]
        for argument, value in given:
            declares = argument.alias_info is not None and argument.alias_info.is_write
            if declares or argument.name in UNDECLARED:
                written = list(tensors_in(value))
                self._before += [(x, real(x).detach().clone()) for x in written]

    @torch.no_grad()
    def undo(self) -> None:
        """Restore all tensors that were written."""
        for x, before in reversed(self._before):
            real(x).detach().copy_(before)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        """Compute all operations again, in order and on the same memory."""
        for func, args, kwargs, out in self.operations:
            pairs = zip(tensors_in(out), tensors_in(func(*args, **kwargs)), strict=True)
            for there, now in pairs:
                if there is not now and there.numel() and there.data_ptr() != now.data_ptr():
                    real(there).detach().copy_(real(now).detach())


class Strict(TorchFunctionMode):
    """Mode that refuses operations a tape cannot record: host reads, and tensors made from host data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FROM_HOST:
            raise NotCapturable(f"the host makes a tensor from its own numbers ({func.__name__})")
        if getattr(func, "__name__", "") in READS:
            raise NotCapturable(f"the host reads a number of the device ({func.__name__})")
        return func(*args, **(kwargs or {}))


class TapeGraphs(Graphs):
    """Graphs that are captured on a tape.

    Attributes:
        captured, replayed: number of captures and replays, by name of the pool.
    """

    captures = True

    def __init__(self, streams: Streams | None = None) -> None:
        super().__init__(streams)
        self.captured: dict[str, int] = {}
        self.replayed: dict[str, int] = {}

    def new_generator(self) -> torch.Generator:
        return torch.Generator()

    @contextlib.contextmanager
    def drawing_from(self, generator: torch.Generator) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(outside)

    def capture(self, run: Callable[[], T], pool: str) -> tuple[Callable[..., None], T]:
        tape, state = Tape(), torch.get_rng_state()
        torch.default_generator.manual_seed(UNSEEDED)
        try:
            with capture_uploads(_place) as cells, Strict(), tape:
                out = run()
            if torch.default_generator.initial_seed() != UNSEEDED:
                raise NotCapturable("it seeds a generator")
        finally:
            torch.set_rng_state(state)
            tape.undo()
        self.captured[pool] = self.captured.get(pool, 0) + 1

        def replay() -> None:
            self.replayed[pool] = self.replayed.get(pool, 0) + 1
            with one_launch("graph"):
                tape.replay()

        return functools.partial(filled, cells, replay), out


def _place(x: Tensor, to: torch.device) -> Tensor:
    """Return memory for a host tensor, with its values at capture, because a tape computes while it records."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return Pretend(x.clone()) if to == DEVICE else x.to(to)


def _as_it_lies(x: Any) -> Any:
    """Detach a parameter, which fixes its current memory: a graph does not follow later assignments to `.data`."""
    return x.detach() if isinstance(x, torch.nn.Parameter) else x
