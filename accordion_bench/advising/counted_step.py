"""Estimate step time and codec times on a GPU that is not available, by counting operations.

The floating-point operations of products and the number of torch operations are counted on tensors without data:

    step = max(operations of products / sustained rate of the GPU, number of operations x start-up time on the host)

Message lengths are measured here. Codec times are those measured on another GPU. Memory-bound work (dense gradients,
differences and outer steps of local methods, optimizers) is timed here and scaled by the ratio of copy speeds. Error
feedback, which the codec times do not include, moves 24 bytes per element.
"""

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from accordion_bench.advising.arms import AdvisedArm
from accordion_bench.advising.gpus import COMPUTE, AskedDevice, CodecTime, Gpu, codec_times, operation_seconds
from accordion_bench.advising.predict import BucketCost, MethodCost
from accordion_bench.advising.step_times import (
    Loss,
    Passes,
    StepTimes,
    copied,
    explained_memory_errors,
    timed,
    trained_module,
    usual,
)
from accordion_bench.attaching.own_parameters import trained_specs, unwrapped
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.counted_work import CountedWork
from accordion_bench.tensors.keyed_rng import kept_rng

META = torch.device("meta")
DENSE = "none"
FEEDBACK = 24  # bytes: read gradient and residual, write their sum; read it and the decoded tensor, write the residual
COPIED = 8  # bytes moved per element copied
COPIES = 5  # timed copies


@dataclass(frozen=True)
class Amount:
    """Work done from the start of the step up to some point."""

    convolved: float  # floating-point operations of convolutions
    multiplied: float  # floating-point operations of other products
    started: int  # number of torch operations, without views

    def seconds(self, gpu: Gpu, precision: str | None, deterministic: bool = False) -> tuple[float, float]:
        """Return (seconds of the products on the GPU, seconds in which the host starts all operations)."""
        convolutions, products = gpu.rates(precision, deterministic)
        return self.convolved / convolutions + self.multiplied / products, operation_seconds() * self.started


@dataclass(frozen=True)
class CountedStep:
    """Counted work of a step of one worker."""

    specs: tuple[TensorSpec, ...]  # the trained tensors, in the model's order
    ready: tuple[Amount, ...]  # for each tensor, the work done before its gradient is available
    whole: Amount  # work of the forward and backward pass
    model: str  # name of the model
    batch_size: int  # samples per step; 0 = unknown

    def lasting(self, seconds: float, update: float, device: str, on: str) -> StepTimes:
        """Return step times for given seconds of the passes and of the optimizer's step, on a device with this name.

        Gradients are ready in proportion to computed products.
        """
        return self._times([self._share(one) for one in self.ready], seconds, update, device, on)

    def on_gpu(self, gpu: Gpu, precision: str | None, deterministic: bool, update: float) -> StepTimes:
        """Return the estimated step times on a GPU; arguments as for `step_on`."""
        products, host = self.whole.seconds(gpu, precision, deterministic)
        by_host = [one.started / self.whole.started for one in self.ready]
        shares = by_host if host > products else [self._share(one) for one in self.ready]
        return self._times(shares, max(products, host), update, "cuda", gpu.in_words)

    def _share(self, amount: Amount) -> float:
        """Return the share of all products, or of all operations if the step has no products."""
        whole = self.whole.convolved + self.whole.multiplied
        return (amount.convolved + amount.multiplied) / whole if whole else amount.started / self.whole.started

    def _times(self, shares: Sequence[float], seconds: float, update: float, device: str, on: str) -> StepTimes:
        return StepTimes(
            specs=self.specs,
            ready=tuple(seconds * share for share in shares),
            backward_end=seconds,
            update=update,
            steps=(),
            batch_size=self.batch_size,
            model=self.model,
            device=device,
            source="",
            on=on,
        )


def counted_step(
    model: nn.Module, batch: Any, loss: Loss, batch_size: int = 0, name: str = "", computed: bool = False
) -> CountedStep:
    """Count the work of a step of a model. Model, gradients and random state do not change.

    Tensors are on the meta device, so counting needs no memory and little time. If the loss needs data, a copy of the
    model computes the step once on the model's device.

    Args:
        model, batch, loss, batch_size: as for `measured_step`, with its errors.
        name: name of the model; "" = the name of its class.
        computed: whether to compute the step without trying the meta device first. This is faster after a timed step,
            because for the meta device torch imports its compiler.
    """
    inner = trained_module(model)
    device = next(inner.parameters()).device
    found = None
    with kept_rng(device), explained_memory_errors(batch_size):
        if not computed:
            with contextlib.suppress(Exception):  # any error of a loss that needs data
                found = _counted(_without_data(inner), tree_map_only(Tensor, lambda x: x.to(META), batch), loss)
        ready, whole = found or _computed(copied(inner), batch, loss)
    specs, called = trained_specs(inner), name or type(unwrapped(inner)).__name__
    return CountedStep(tuple(specs), tuple(ready), whole, called, batch_size)


def step_on(
    asked: AskedDevice,
    counted: CountedStep,
    update: float,
    precision: str | None = None,
    deterministic: bool = False,
    device: str = "cuda",
) -> StepTimes:
    """Return the step times on the requested device.

    Args:
        asked: a named GPU or a given step time.
        counted: counted work of the step.
        update: seconds of the optimizer's step on that device.
        precision: precision of the forward pass; null = float32.
        deterministic: whether TF32 is disabled.
        device: device type of a given step time: `cpu` or `cuda`.
    """
    if asked.gpu is not None:
        return counted.on_gpu(asked.gpu, precision, deterministic, update)
    assert asked.compute is not None
    told = f"a {'CPU' if device == 'cpu' else 'GPU'} with {COMPUTE}={1000 * asked.compute:g}"
    return counted.lasting(asked.compute, update, device, told)


def _counted(model: nn.Module, batch: Any, loss: Loss) -> tuple[list[Amount], Amount]:
    """Return the work done before each gradient is available, and the work of both passes."""
    with CountedWork() as work, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about hooks of recurrent layers whose input needs no gradient
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                work.count_as_one(module)
        return Passes(model, batch, loss, lambda: Amount(work.convolved, work.multiplied, work.started)).take()


def _without_data(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {
        id(param): nn.Parameter(param.detach().to(META), param.requires_grad) for param in model.parameters()
    }
    memo |= {id(buffer): buffer.detach().to(META) for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def _computed(model: nn.Module, batch: Any, loss: Loss) -> tuple[list[Amount], Amount]:
    """Count with data. Recurrent layers are decomposed, because their fused kernels hide their products."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with decomposed() if recurrent else contextlib.nullcontext():
        return _counted(model, batch, loss)


@contextlib.contextmanager
def decomposed() -> Iterator[None]:
    """Disable fused kernels of recurrent layers within the context, so that their products are counted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about TF32 on Intel's GPUs
        with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
            yield


def costs_on(
    gpu: Gpu, costs: Sequence[MethodCost], arms: Sequence[AdvisedArm], specs: Sequence[TensorSpec], longer: float
) -> tuple[list[MethodCost], dict[str, str]]:
    """Return (costs of the arms on a GPU, the reason by name for each that cannot be estimated).

    `costs` are measured on this machine; `longer` is `relative_copy_time`, for memory-bound work.
    """
    compressors = {arm.name: _compressor(arm) for arm in arms}
    feedback = {arm.name: bool(arm.chosen.compressor.get("error_feedback")) for arm in arms}
    found, left_out = [], {}
    for cost in costs:
        name = compressors[cost.name]
        if name == DENSE:
            found.append(cost.scaled(longer))
        elif name in codec_times():
            moved = FEEDBACK / gpu.copies if feedback[cost.name] else 0.0
            found.append(_timed(cost, codec_times()[name], gpu, specs, moved, longer))
        else:
            left_out[cost.name] = "its codec was not timed on a GPU, so that it cannot be estimated"
    return [replace(cost, repetitions=()) for cost in found], left_out


def relative_copy_time(gpu: Gpu, tensors: Sequence[Tensor]) -> float:
    """Return the duration of a copy of these tensors on a GPU relative to here; below 1 if the GPU is faster."""
    copies = [torch.empty_like(tensor) for tensor in tensors]

    def copy_all() -> None:
        for ours, theirs in zip(copies, tensors, strict=True):
            ours.copy_(theirs)

    there = COPIED * sum(tensor.numel() for tensor in tensors) / gpu.copies
    return there / usual(timed(copy_all, tensors[0].device, 1 + COPIES))


def _timed(
    cost: MethodCost, codec: CodecTime, gpu: Gpu, specs: Sequence[TensorSpec], moved: float, longer: float
) -> MethodCost:
    """Scale each bucket to the codec's time, plus `moved` seconds per element; its parts keep their ratio."""

    def timed(bucket: BucketCost) -> BucketCost:
        numbers = sum(specs[i].numel for i in bucket.members)
        wanted = codec.on(gpu, len(bucket.members), numbers) + moved * numbers if numbers else 0.0
        here = bucket.encode + sum(bucket.decode)
        return bucket.scaled(wanted / here) if here else bucket

    buckets, crowded = (tuple(map(timed, few)) for few in (cost.buckets, cost.crowded))
    return replace(cost, buckets=buckets, crowded=crowded, extra=longer * cost.extra)


def _compressor(arm: AdvisedArm) -> str:
    typed: Mapping[str, str] = dict(word.split("=", 1) for word in arm.overrides)
    return typed.get("compressor", DENSE)
