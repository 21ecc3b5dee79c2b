"""`ab.advice`: predict whether compression or local steps speed up the training of a given model on a cluster."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion_bench.advising.advice import Advice, Pays, advise
from accordion_bench.advising.arms import (
    AdvisedArm,
    chosen_arms,
    measured_methods,
    optimizer_step_seconds,
    random_gradients,
)
from accordion_bench.advising.cluster import Cluster, cluster_like_here, link_named
from accordion_bench.advising.counted_step import CountedStep, costs_on, counted_step, relative_copy_time, step_on
from accordion_bench.advising.gpus import HALF, AskedDevice, Gpu, asked_device, measured_gpu, operation_seconds
from accordion_bench.advising.predict import MethodCost, pays_below
from accordion_bench.advising.rehearsal import Beside, optimizer_of
from accordion_bench.advising.step_times import Loss, MakeOptimizer, StepTimes, measured_step, trained_module
from accordion_bench.advising.verdict import verdict
from accordion_bench.comm.replicas import check_clipping
from accordion_bench.network.link_model import Network
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.plan import TensorSpec


def advice(
    model: nn.Module,
    example_batch: Any,
    workers: int,
    network: str | Mapping[str, Any] | Network = "1gbit",
    *,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
    methods: Sequence[str] = (),
    workers_per_machine: int = 1,
    inside: str | None = None,
    seconds: float = 40.0,
    batch_size: int = 0,
    gpu: str | None = None,
    compute_ms: float | None = None,
    precision: str | None = None,
    clip_norm: float | None = None,
    clip_at: str | None = None,
) -> Advice:
    """Predict the step time of each method for this model on a cluster, without training and in one process.

        found = ab.advice(model, (images, labels), workers=16, network="10gbit")
        print(*found.verdict, sep="\\n")
        found.table()    # a row for each method

    A copy of the model and each method's exchange of its gradients are timed under the settings of this process. Links
    are modelled.

    Args:
        model: model on its device.
        example_batch: batch as the data loader returns it, on the same device.
        workers: number of workers of the cluster, at least 2.
        network: link between machines: a name in conf/network, its options (`{"bandwidth": "25gbit"}`), or a Network,
            which contains the number of workers per machine.
        loss: loss(model, batch), a scalar; None = cross-entropy of a batch (inputs, labels).
        optimizer: function that makes the optimizer from a list of parameters; None = SGD with momentum.
        methods: names in conf/compressor and conf/sync to compare with none and bf16; empty = all.
        workers_per_machine: number of workers that share a machine's link.
        inside: link between the workers of a machine, a name in conf/network.
        seconds: approximate time for timing all methods.
        batch_size: samples in the batch, for messages; 0 = unknown.
        gpu: estimate the step on this GPU instead of timing it: a100, h100, h200, l40s, 4090. The step's operations are
            counted. Codec times are those of an H200, scaled by the memory bandwidth.
        compute_ms: milliseconds of a forward and backward pass on the cluster's GPUs. Codecs are timed here if the
            model is on a GPU, otherwise estimated.
        precision: precision of the forward pass on `gpu`: float32 (None), bfloat16, float16.
        clip_norm, clip_at: clipping, as in `ab.attach`. Clipping before the exchange waits for all gradients.

    Raises:
        ConfigError: an argument is invalid, or the model does not accept the batch.

    Example:
        >>> model = torch.nn.Linear(64, 10)
        >>> batch = torch.zeros(8, 64), torch.zeros(8, dtype=torch.int64)
        >>> found = ab.advice(model, batch, workers=16, network="10gbit", compute_ms=5, methods=["topk"])
        >>> table = found.table()  # a row for each method
        >>> bool(found.verdict)
        True
    """
    try:
        checks.integer("workers", workers, at_least=2, instead=16)
        checks.number("seconds", seconds, above=0, instead=40.0)
        link, options = link_named(network, workers_per_machine, inside)
        if workers % link.workers_per_machine:
            raise ValueRefused("workers_per_machine", f"a divisor of workers={workers}", link.workers_per_machine, 1)
        asked = asked_device(gpu, compute_ms)
        if precision is not None:
            checks.choice("precision", precision, ["float32", *HALF])
        check_clipping(clip_norm, clip_at)
        device = next(trained_module(model).parameters()).device
        looked_at = TimedMethods(
            chosen_arms(methods, key="methods", beside=Beside(clip_norm, clip_at)), device, seconds, optimizer=optimizer
        )
        work = (model, example_batch, loss or cross_entropy)
        if asked:
            counted = counted_step(*work, batch_size)
            found = asked_for(asked, counted, looked_at, precision, at_hand=device.type == "cuda")
        else:
            times = measured_step(*work, optimizer, batch_size=batch_size)
            found = here(times, looked_at, counted_step(*work, computed=True) if device.type == "cpu" else None)
        table = advised(found, lambda kind: cluster_like_here(link, workers, kind, torch.get_num_threads()), options)
    except ConfigError as refused:
        raise refused.in_python() from None
    return replace(table, verdict=verdict(table))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of a batch (inputs, labels)."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


ESTIMATED = (
    "the step is estimated from the rate of products that an {} sustained in published trainings, and from at least "
    "{:.0f} us on the host to start each operation; the real step may take half or twice as long"
)
READY = "gradients are assumed to be ready as their products are computed; comm.timeline() records the real times"


@dataclass(frozen=True)
class Basis:
    """Inputs of the prediction, measured on this machine or estimated for another GPU."""

    # times, costs: step of one worker alone, and costs of the methods
    times: StepTimes
    costs: list[MethodCost]
    left_out: dict[str, str]  # reason by method for the methods without costs
    doubts: tuple[str, ...] = ()  # reasons why these times may differ from the cluster's, one clause each
    on_gpus: "Basis | None" = None  # the same inputs for GPUs of unknown step time; None = not computed


@dataclass(frozen=True)
class TimedMethods:
    """Methods to time on this machine, and the settings of the timing."""

    arms: Sequence[AdvisedArm]  # the methods, dense fp32 first
    device: torch.device  # device of this machine for the timing
    seconds: float  # approximate time for all methods
    progress: Callable[[str], None] = lambda _: None  # called with the name of each method before it is timed
    # function that makes the optimizer of the dense step; None = that of the first method
    optimizer: MakeOptimizer | None = None

    def update(self, specs: Sequence[TensorSpec]) -> float:
        """Return the seconds of an optimizer's step on this device."""
        make = self.optimizer or (lambda params: optimizer_of(self.arms[0].chosen.optimizer, params))
        return optimizer_step_seconds(make, random_gradients(specs, self.device))

    def measured(self, specs: Sequence[TensorSpec], seconds: float) -> tuple[list[MethodCost], dict[str, str]]:
        """Return the costs measured on this device, and the reason for each method that could not be measured."""
        return measured_methods(self.arms, specs, self.device, seconds, self.progress)

    def on(
        self, gpu: Gpu, costs: Sequence[MethodCost], specs: Sequence[TensorSpec]
    ) -> tuple[list[MethodCost], dict[str, str], float]:
        """Return (costs converted to a GPU, reasons for methods without costs, relative time of a copy there)."""
        longer = relative_copy_time(gpu, random_gradients(specs, self.device))
        return (*costs_on(gpu, costs, self.arms, specs, longer), longer)


def here(times: StepTimes, methods: TimedMethods, counted: CountedStep | None = None) -> Basis:
    """Time the methods on this machine; counted operations of the step give an additional estimate on GPUs."""
    costs, left_out = methods.measured(times.specs, methods.seconds)
    on_gpus = None
    if counted is not None:
        theirs, more, longer = methods.on(measured_gpu(), costs, times.specs)
        shape = counted.lasting(1.0, longer * times.update, "cuda", "GPUs")
        on_gpus = Basis(shape, theirs, more)
    return Basis(times, costs, left_out, (), on_gpus)


def on_gpu(
    gpu: Gpu, times_of: Callable[[float], StepTimes], specs: Sequence[TensorSpec], methods: TimedMethods
) -> Basis:
    """Estimate the methods on a GPU that is not available. Messages are made here; codec times are estimated.

    `times_of` returns the step times for the seconds of the optimizer's step.
    """
    costs, left_out = methods.measured(specs, 0.0)
    theirs, more, longer = methods.on(gpu, costs, specs)
    known = measured_gpu().name
    doubt = f"codecs are estimated: as timed on an {known}, at the default level of each method"
    if gpu != measured_gpu():
        doubt += f", scaled by the memory bandwidth of an {gpu.name}"
    return Basis(times_of(longer * methods.update(specs)), theirs, {**left_out, **more}, (doubt,))


def asked_for(
    asked: AskedDevice,
    counted: CountedStep,
    methods: TimedMethods,
    precision: str | None = None,
    deterministic: bool = False,
    at_hand: bool = False,
) -> Basis:
    """Return the inputs of the prediction for a named GPU or a given step time.

    Args:
        asked, counted, precision, deterministic: as for `step_on`.
        methods: methods to time or estimate.
        at_hand: whether a given step time is that of this device, on which the methods are then timed.
    """
    at_hand = at_hand and asked.gpu is None
    device = methods.device.type if at_hand else "cuda"

    def times_of(update: float) -> StepTimes:
        return step_on(asked, counted, update, precision, deterministic, device)

    if at_hand:
        found = here(times_of(methods.update(counted.specs)), methods)
    else:
        found = on_gpu(asked.codecs_of, times_of, counted.specs, methods)
    own = READY if asked.gpu is None else ESTIMATED.format(asked.gpu.name, 1e6 * operation_seconds())
    return replace(found, doubts=(own, *found.doubts))


def advised(
    found: Basis, cluster_of: Callable[[str], Cluster], network: Mapping[str, object], link_error: float = 0.0
) -> Advice:
    """Compute the advice without its verdict, for the cluster of devices `cpu` or `cuda` and these options of the link.

    `link_error` is the relative error of the fitted link; 0 = exact.
    """
    pays, theirs = None, found.on_gpus
    if theirs is not None:
        limit = pays_below(theirs.times, theirs.costs, cluster_of("cuda"))
        pays = Pays(limit, f"GPUs with codecs as on an {measured_gpu().name}")
    table = advise(found.times, found.costs, cluster_of(found.times.device), link_error, pays)
    doubts = (*table.doubts, *found.doubts)
    return replace(table, network=dict(network), doubts=doubts, left_out=dict(found.left_out))
