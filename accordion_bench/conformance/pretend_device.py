"""Simulated accelerator: tensors that report the device `meta`, hold their values on the CPU, and count operations.

Code that branches on `device.type` takes the device's branch, with real numbers. The type is `meta` because torch needs
no driver for it and it is not `cpu`. Operations that CUDA refuses are refused here too: conversion to NumPy, and
operations on tensors of two devices.
"""

import contextlib
import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from accordion_bench.codecs import engines
from accordion_bench.codecs.bucket import Bucket, Target
from accordion_bench.codecs.coding import BlockNumbers, Coding
from accordion_bench.codecs.compiled import measurable
from accordion_bench.codecs.engine import Engine, OnDevice, Selection
from accordion_bench.codecs.layout import Message
from accordion_bench.codecs.low_rank_on_gpu import HIGHEST
from accordion_bench.codecs.matrix_tiles import TileForm
from accordion_bench.tensors import sixteen_bits

DEVICE = torch.device("meta")
NARROWEST = 64  # minimum capacity of kernels for bins, in coordinates; bins of equal capacity share a launch
aten = torch.ops.aten

# operations whose result size depends on data, so that the host waits for the device; so does a boolean index
SIZED_BY_DATA = {"nonzero", "masked_select", "bincount", "unique_dim", "_unique2", "unique_consecutive"}
READ_BY_HOST = {"_local_scalar_dense", "equal", "is_nonzero"}
# operations without a kernel: they only allocate memory or change metadata
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "is_pinned"}


@dataclass
class Counts:
    """Counts since the last reset: launched operations and waits of the host, by name, and asynchronous uploads."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    uploads: int = 0

    def reset(self) -> None:
        self.launches.clear()
        self.waits.clear()
        self.uploads = 0


class Pretend(Tensor):
    """Tensor on the simulated device; `numbers` holds its values on the CPU."""

    numbers: Tensor
    counts = Counts()

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "Pretend":
        return torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=DEVICE,
        )

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretend({self.numbers})"

    def _read(self, how: str) -> Tensor:
        self.counts.waits[how] += 1
        return self.numbers

    def item(self) -> Any:
        return self._read("item").item()

    def tolist(self) -> Any:
        return self._read("tolist").tolist()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    __index__ = __int__

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a tensor of the device to numpy")

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def untyped_storage(self) -> Any:
        return self.numbers.untyped_storage()

    def __deepcopy__(self, memo: Any) -> Tensor:
        copied = self.detach().clone()
        return nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})


class PretendDevice(TorchDispatchMode):
    """Mode in which tensors made with `device=DEVICE`, or copied there, are on the simulated device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        ours = device is not None and torch.device(device) == DEVICE
        if ours or any(isinstance(leaf, Pretend) for leaf in tree_leaves((args, kwargs))):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


class FromLists(TorchFunctionMode):
    """Mode for `torch.tensor(numbers, device=DEVICE)`, which torch implements below the level of dispatch modes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu") == DEVICE:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


@contextlib.contextmanager
def one_launch(name: str, times: int = 1) -> Iterator[None]:
    """Count all operations in the block as `times` launches of one name."""
    counts = Pretend.counts
    kept = counts.launches.copy(), counts.waits.copy(), counts.uploads
    try:
        yield
    finally:
        counts.launches, counts.waits, counts.uploads = kept
        if times:
            counts.launches[name] += times


class PretendedKernels(OnDevice):
    """Replacement for a GPU's kernels, which counts their launches and computes with the reference implementation."""

    name, one_by_one = "triton", True

    def encode_dense(self, bucket: Bucket, message: Message, coding: Coding, shared: Tensor | None = None) -> None:
        feedback = bucket.feedback
        if feedback is None or not feedback.fits_kernels(bucket.rows_W, shared):
            super().encode_dense(bucket, message, coding, shared)
            return
        with one_launch("fed", 0):  # the kernel that reads coordinates also adds residuals
            formed = bucket.formed()
        self.encode_formed(formed, message, coding)
        with one_launch("fed", 0):  # the kernel that writes codes also writes residuals
            self.add_dense(Target(feedback.rows_W, -1.0), message, coding)
            feedback.mask()

    def encode_formed(self, bucket: Bucket, message: Message, coding: Coding, shared: Tensor | None = None) -> None:
        if not measurable(message.layout, coding):
            super().encode_formed(bucket, message, coding, shared)
            return
        with one_launch("encode"):
            super().encode_formed(bucket, message, coding, shared)

    def encode(self, bucket: Bucket, message: Message, coding: Coding, numbers: BlockNumbers) -> None:
        with one_launch("encode", 1 + (numbers.middles is not None)):
            super().encode(bucket, message, coding, numbers)

    def select_in_bins(
        self, residuals_W: Sequence[Tensor], news_W: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        padded = {max(NARROWEST, 1 << (size - 1).bit_length()) for size in sizes}
        with one_launch("select_in_bins", 1 + 2 * len(padded)):
            return super().select_in_bins(residuals_W, news_W, sizes)

    def encode_sparse(self, bucket: Bucket, selection: Selection, message: Message) -> None:
        of_keys = not isinstance(message.rows, Tensor)
        with one_launch("encode_sparse", 3 + of_keys + 2 * message.layout.signs):
            super().encode_sparse(bucket, selection, message)

    def add_sparse(self, target: Target, message: Message) -> None:
        rounds = -(-len(message.rows) // len(target.rows_R[0]))
        with one_launch("add_sparse", 2 + rounds + (target.divisor != 1)):
            super().add_sparse(target, message)

    def add_tiles(self, target: Target, message: Message, forms: Sequence[TileForm]) -> None:
        with one_launch("add_tiles", -(-len(message.rows) // len(target.rows_R[0])) + (target.divisor != 1)):
            super().add_tiles(target, message, forms)

    def orthonormalise(self, factors: Sequence[Tensor], passes: int = 2) -> list[Tensor]:
        if any(factor.shape[2] > HIGHEST for factor in factors):
            return super().orthonormalise(factors, passes)
        with one_launch("orthonormalise"):
            return super().orthonormalise(factors, passes)


ONE = "norms write read numbers factors add_codes places take put add_momenta momentum_steps"
ONE += " multiply products subtract_products replace_degenerate"
LAUNCHES = {**dict.fromkeys(ONE.split(), 1), "largest": 21, "above": 30, "about": 30, "nonzero": 5, "encode_tiles": 4}
"""Number of launches of the other operations that have kernels."""


def _launched(operation: Callable[..., Any], times: int) -> Callable[..., Any]:
    @functools.wraps(operation)
    def run(*args: Any, **more: Any) -> Any:
        with one_launch(operation.__name__, times):
            return operation(*args, **more)

    return run


for _name, _times in LAUNCHES.items():
    setattr(PretendedKernels, _name, _launched(getattr(OnDevice, _name), _times))

KERNELS = PretendedKernels()


def kernels_for(xs: Sequence[Tensor]) -> Engine | None:
    """Return the kernels of the simulated device if all tensors are on it."""
    return KERNELS if xs and all(isinstance(x, Pretend) for x in xs) else None


@contextlib.contextmanager
def pretended() -> Iterator[Counts]:
    """Simulate a device within the block and yield its counts.

    Pinned memory, fused optimizers and kernels for codes and casts are available on it.
    """
    Pretend.counts.reset()

    def pin_memory(x: Tensor) -> Tensor:
        pinned = x.clone()
        pinned._is_pinned = True  # type: ignore[attr-defined]
        return pinned

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", pin_memory))
        for name in ("sgd", "adam", "adagrad"):  # fused optimizers refuse unknown device types
            module = importlib.import_module(f"torch.optim.{name}")
            allowed = mock.patch.object(module, "_device_dtype_check_for_fused", lambda *_, **__: None)
            stack.enter_context(allowed)
        for name in ("sum_of_shares", "widened"):
            counted = functools.partial(_by_one_kernel, name, getattr(sixteen_bits, name))
            stack.enter_context(mock.patch.object(sixteen_bits, name, counted))
        engines.STAND_INS.append(kernels_for)
        stack.callback(engines.STAND_INS.remove, kernels_for)
        stack.enter_context(FromLists())
        stack.enter_context(PretendDevice())
        yield Pretend.counts


def _by_one_kernel(name: str, computed: Callable[..., Tensor], *args: Any) -> Tensor:
    """Count one launch if an argument is on the device, and compute as elsewhere."""
    if not any(isinstance(leaf, Pretend) for leaf in tree_leaves(args)):
        return computed(*args)
    with one_launch(name):
        return computed(*args)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.removeprefix("aten::")
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    kwargs = dict(kwargs)
    target = kwargs.get("device")
    if target is not None:
        kwargs["device"] = "cpu"
    copy = _copy(name, args, kwargs, target)
    if copy is None:
        _refuse_two_devices(name, leaves)
        _count(func, name, args)
    ours = {id(leaf.numbers): leaf for leaf in leaves if isinstance(leaf, Pretend)}
    out = func(*tree_map(real, args), **tree_map(real, kwargs))
    if name in READ_BY_HOST or copy == "down":
        return out
    if copy == "down into":
        return args[0]

    def wrapped(x: Any) -> Any:
        if type(x) is not Tensor:
            return x
        return ours[id(x)] if id(x) in ours else Pretend(x)

    return tree_map(wrapped, out)


def real(x: Any) -> Any:
    """Return the CPU values of a tensor on the device; other objects unchanged."""
    return x.numbers if isinstance(x, Pretend) else x


def _copy(name: str, args: Any, kwargs: dict[str, Any], target: Any) -> str | None:
    """Count a copy between host and device and return its direction; None if the operation is not such a copy."""
    counts, waits_not = Pretend.counts, kwargs.get("non_blocking", False)
    if name == "copy_":
        there, here = args[0], args[1]
        waits_not = args[2] if len(args) > 2 else waits_not
        if isinstance(there, Pretend) == isinstance(here, Pretend):
            return None
        if not isinstance(there, Pretend):
            counts.waits["copy to the host"] += 1
            return "down into"
    elif name == "_to_copy" and target is not None:
        here = args[0]
        if isinstance(here, Pretend):
            if torch.device(target) == DEVICE:
                return None
            counts.waits["copy to the host"] += 1
            return "down"
    else:
        return None
    if waits_not and getattr(here, "_is_pinned", False):
        counts.uploads += 1
    else:
        counts.waits["copy from pageable memory"] += 1
    return "up"


def _refuse_two_devices(name: str, leaves: list[Tensor]) -> None:
    if any(type(x) is Tensor and x.ndim for x in leaves) and any(isinstance(x, Pretend) for x in leaves):
        raise RuntimeError(f"{name}: expected all tensors on one device, found some on the CPU")


def _count(func: Any, name: str, args: Any) -> None:
    counts = Pretend.counts
    if name in READ_BY_HOST:
        counts.waits[name] += 1
        return
    if name in SIZED_BY_DATA or (name.startswith("index") and _by_booleans(args)):
        counts.waits[name] += 1
    if name == "repeat_interleave" and "self_int" not in str(func):
        counts.waits[name] += 1
    if _launches(func, name):
        counts.launches[name] += 1


def _by_booleans(args: Any) -> bool:
    return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1:2]))


@functools.cache
def _launches(func: Any, name: str) -> bool:
    view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
    return not view and name not in NO_KERNEL
