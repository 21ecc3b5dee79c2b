"""A training step counted, not timed, and codecs estimated: for a GPU that is not here.

Products and operations of the two passes are counted on tensors without data. A step takes the longer of what the
products take at the rate that the GPU sustains, and of what the host needs to start all operations.

Messages are as they were made here, codecs as they were timed on a GPU. What only moves memory (dense gradients,
differences and outer steps of local methods, optimizers) is timed here and scaled by the speed of a copy. Error
feedback, which the timed codecs lack, moves 24 bytes for each number.
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
    memory_told,
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
FEEDBACK = 24  # bytes: both tensors are read and the sum written; then it and what was decoded, and the residual
COPIED = 8  # bytes that a copy of one number moves
COPIES = 5  # that are timed


@dataclass(frozen=True)
class Amount:
    """The work that is done up to a moment.

    Args:
        convolved: floating-point operations of convolutions.
        multiplied: those of other products.
        started: operations of torch, without views.
    """

    convolved: float
    multiplied: float
    started: int

    def seconds(self, gpu: Gpu, precision: str | None, deterministic: bool = False) -> tuple[float, float]:
        """(Seconds of the products on a GPU, seconds of the host, which starts all operations)."""
        convolutions, products = gpu.rates(precision, deterministic)
        return self.convolved / convolutions + self.multiplied / products, operation_seconds() * self.started


@dataclass(frozen=True)
class CountedStep:
    """A step of one worker.

    Args:
        specs: the trained tensors, in the model's order.
        ready: of each tensor, what was computed until its gradient was there.
        whole: forward and backward pass.
        model: what it is called.
        batch_size: samples of a step; 0 = not known.
    """

    specs: tuple[TensorSpec, ...]
    ready: tuple[Amount, ...]
    whole: Amount
    model: str
    batch_size: int

    def lasting(self, seconds: float, update: float, device: str, on: str) -> StepTimes:
        """The step with a given time of forward and backward pass. Gradients are ready as the products are computed.

        Args:
            seconds: of forward and backward pass.
            update: of the optimizer's step.
            device: `cpu` or `cuda`.
            on: on which device, in words.
        """
        return self._times([self._share(one) for one in self.ready], seconds, update, device, on)

    def on_gpu(self, gpu: Gpu, precision: str | None, deterministic: bool, update: float) -> StepTimes:
        """The step on a GPU, estimated.

        Args:
            gpu: of the table.
            precision: of the forward pass; null = float32.
            deterministic: whether TF32 is left out.
            update: seconds of the optimizer's step.
        """
        products, host = self.whole.seconds(gpu, precision, deterministic)
        by_host = [one.started / self.whole.started for one in self.ready]
        shares = by_host if host > products else [self._share(one) for one in self.ready]
        return self._times(shares, max(products, host), update, "cuda", gpu.in_words)

    def _share(self, amount: Amount) -> float:
        """Share of all products; of all operations where there are no products."""
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
    """Count a step of a model; model, gradients and random numbers stay as they are.

    Tensors have shapes and no data, so that no memory is needed and hardly any time; where the loss needs numbers, a
    copy of the model computes the step once on its own device.

    Args:
        model: of DistributedDataParallel, the module inside.
        batch: what `loss` takes.
        loss: forward pass and loss.
        batch_size: samples of the batch, for messages; 0 = not known.
        name: of the model; "" = that of its class.
        computed: compute the step in any case: where it was timed before, that is quicker than tensors without data,
            for which torch imports its compiler.

    Raises:
        ConfigError: the model has nothing to train, or does not take the batch.

    Example:
        counted_step(model, (images, labels), loss).on_gpu(named("h100"), "bfloat16", False, update=0.0)
    """
    inner = trained_module(model)
    device = next(inner.parameters()).device
    found = None
    with kept_rng(device), memory_told(batch_size):
        if not computed:
            with contextlib.suppress(Exception):  # whatever a loss may do with numbers
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
    """The step on the device that is asked for.

    Args:
        asked: a GPU that is named, or a step time that is told.
        counted: the step.
        update: seconds of the optimizer's step there.
        precision: of the forward pass; null = float32.
        deterministic: whether TF32 is left out.
        device: of a step time that is told: `cpu` or `cuda`.
    """
    if asked.gpu is not None:
        return counted.on_gpu(asked.gpu, precision, deterministic, update)
    assert asked.compute is not None
    told = f"a {'CPU' if device == 'cpu' else 'GPU'} with {COMPUTE}={1000 * asked.compute:g}"
    return counted.lasting(asked.compute, update, device, told)


def _counted(model: nn.Module, batch: Any, loss: Loss) -> tuple[list[Amount], Amount]:
    """What is computed until each gradient is there, and in all."""
    with CountedWork() as work, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells of hooks of recurrent layers whose input needs no gradient
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                work.count_as_one(module)
        return Passes(model, batch, loss, lambda: Amount(work.convolved, work.multiplied, work.started)).take()


def _without_data(model: nn.Module) -> nn.Module:
    """A copy with parameters and buffers of the same shapes that hold nothing."""
    memo: dict[int, Any] = {
        id(param): nn.Parameter(param.detach().to(META), param.requires_grad) for param in model.parameters()
    }
    memo |= {id(buffer): buffer.detach().to(META) for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def _computed(model: nn.Module, batch: Any, loss: Loss) -> tuple[list[Amount], Amount]:
    """As `_counted`, on real numbers. Recurrent layers are decomposed, since their kernels hide their products."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with decomposed() if recurrent else contextlib.nullcontext():
        return _counted(model, batch, loss)


@contextlib.contextmanager
def decomposed() -> Iterator[None]:
    """Recurrent layers as the products that they consist of, which are counted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells of TF32 on Intel's GPUs
        with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
            yield


def costs_on(
    gpu: Gpu, costs: Sequence[MethodCost], arms: Sequence[AdvisedArm], specs: Sequence[TensorSpec], longer: float
) -> tuple[list[MethodCost], dict[str, str]]:
    """The costs of methods on a GPU, estimated.

    Args:
        gpu: of the table.
        costs: measured here.
        arms: that they are of.
        specs: the trained tensors.
        longer: times as long as here that what only moves memory takes there, see `times_as_long`.

    Returns:
        (the costs, and by name why others cannot be estimated).
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


def times_as_long(gpu: Gpu, tensors: Sequence[Tensor]) -> float:
    """How many times as long as here a copy of these tensors takes on a GPU: below 1 where that is faster."""
    copies = [torch.empty_like(tensor) for tensor in tensors]

    def copy_all() -> None:
        for ours, theirs in zip(copies, tensors, strict=True):
            ours.copy_(theirs)

    there = COPIED * sum(tensor.numel() for tensor in tensors) / gpu.copies
    return there / usual(timed(copy_all, tensors[0].device, 1 + COPIES))


def _timed(
    cost: MethodCost, codec: CodecTime, gpu: Gpu, specs: Sequence[TensorSpec], moved: float, longer: float
) -> MethodCost:
    """Each bucket takes what the codec takes for its tensors; how that divides is as it was here.

    Args:
        moved: seconds for each number beside the codec.
        longer: times as long, of what lies beside the exchange.
    """

    def timed(bucket: BucketCost) -> BucketCost:
        numbers = sum(specs[i].numel for i in bucket.members)
        wanted = codec.on(gpu, len(bucket.members), numbers) + moved * numbers if numbers else 0.0
        here = bucket.encode + sum(bucket.decode)
        return bucket.scaled(wanted / here) if here else bucket

    buckets, crowded = (tuple(map(timed, few)) for few in (cost.buckets, cost.crowded))
    return replace(cost, buckets=buckets, crowded=crowded, extra=longer * cost.extra)


def _compressor(arm: AdvisedArm) -> str:
    """The name of its YAML file."""
    typed: Mapping[str, str] = dict(word.split("=", 1) for word in arm.overrides)
    return typed.get("compressor", DENSE)
