"""`ab.advice`: whether communicating less would make the training of a model of one's own faster.

An answer is computed from times of a step and costs of methods: those of this machine, or of a GPU that is not here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion_bench.advising.advice import Advice, Pays, advise
from accordion_bench.advising.arms import AdvisedArm, chosen_arms
from accordion_bench.advising.cluster import Cluster, cluster_like_here, link_named
from accordion_bench.advising.codec_times import measured_methods, random_gradients, usual_update
from accordion_bench.advising.counted_step import CountedStep, costs_on, counted_step, step_on, times_as_long
from accordion_bench.advising.gpus import (
    HALF,
    AskedDevice,
    Gpu,
    asked_device,
    codecs_told,
    measured_gpu,
    operation_seconds,
)
from accordion_bench.advising.predict import MethodCost, pays_below
from accordion_bench.advising.rehearsal import Beside, optimizer_of
from accordion_bench.advising.step_times import Loss, MakeOptimizer, StepTimes, measured_step, trained_module
from accordion_bench.advising.verdict import verdict
from accordion_bench.network.link_model import Network
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.clip import check_clipping


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
    """What each method would take for this model on a cluster. Nothing is trained, and one process is enough.

        found = ab.advice(model, (images, labels), workers=16, network="10gbit")
        print(*found.verdict, sep="\\n")
        found.table()    # a row for each method

    A copy of the model is timed, and every method's exchange of its gradients, under the settings of this process, as
    your loop would compute; links are modelled.

    Args:
        model: on its device.
        example_batch: a batch as it comes from a data loader, on the same device.
        workers: of the cluster.
        network: the link between machines: a name in conf/network, its options (`{"bandwidth": "25gbit"}`), or a
            Network, which says by itself how many workers a machine has.
        loss: loss(model, batch), a scalar; None = cross-entropy of a batch (inputs, labels).
        optimizer: makes the optimizer of some parameters; None = SGD with momentum.
        methods: names in conf/compressor and conf/sync, beside none and bf16; none = all.
        workers_per_machine: that share a machine's link.
        inside: the link between those, a name in conf/network.
        seconds: for timing all methods, about.
        batch_size: samples in the batch, for messages; 0 = not known.
        gpu: estimate a step on this GPU, which is not here: a100, h100, h200, l40s, 4090; its work is counted, and
            codecs are those timed on an H200, by the memory's speed.
        compute_ms: a step's forward and backward pass take so many milliseconds on the cluster's GPUs; codecs are
            timed here where the model is on a GPU, else estimated.
        precision: of the forward pass on `gpu`: float32 (None), bfloat16, float16.
        clip_norm, clip_at: clipping, as in `ab.attach`; before the exchange it waits for all gradients.

    Raises:
        ConfigError: what was passed breaks a rule, or the model does not take the batch.

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
    """Cross-entropy of a batch (inputs, labels)."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


ESTIMATED = (
    "the step is estimated: its products at the rate that an {} sustained in published trainings, and at least {:.0f} "
    "us for each operation, which the host must start; a network may take half as long, or twice"
)
READY = "gradients are taken to be ready as their products are computed; record comm.timeline() for when they are"


@dataclass(frozen=True)
class Basis:
    """What advice is computed from.

    Args:
        times: of a step.
        costs: of the methods.
        left_out: methods that have none, and why.
        doubts: why this may not be the cluster's speed, a clause each.
        on_gpus: the same where the step is computed on GPUs, whose step time is not known; None = not looked at.
    """

    times: StepTimes
    costs: list[MethodCost]
    left_out: dict[str, str]
    doubts: tuple[str, ...] = ()
    on_gpus: "Basis | None" = None


@dataclass(frozen=True)
class TimedMethods:
    """Which methods are looked at, and how.

    Args:
        arms: the methods, dense fp32 first.
        device: of this machine, on which they are timed.
        seconds: for timing all of them, about.
        progress: is told the name of each method before it begins.
        optimizer: makes the one of the dense step; None = as the first method has it.
    """

    arms: Sequence[AdvisedArm]
    device: torch.device
    seconds: float
    progress: Callable[[str], None] = lambda _: None
    optimizer: MakeOptimizer | None = None

    def update(self, specs: Sequence[TensorSpec]) -> float:
        """Seconds of the optimizer's step here."""
        make = self.optimizer or (lambda params: optimizer_of(self.arms[0].chosen.optimizer, params))
        return usual_update(make, random_gradients(specs, self.device))

    def measured(self, specs: Sequence[TensorSpec], seconds: float) -> tuple[list[MethodCost], dict[str, str]]:
        """Costs measured here, and why others could not be measured."""
        return measured_methods(self.arms, specs, self.device, seconds, self.progress)

    def on(
        self, gpu: Gpu, costs: Sequence[MethodCost], specs: Sequence[TensorSpec]
    ) -> tuple[list[MethodCost], dict[str, str], float]:
        """Costs measured here, converted to those of a GPU; and how many times as long a copy takes there."""
        longer = times_as_long(gpu, random_gradients(specs, self.device))
        return (*costs_on(gpu, costs, self.arms, specs, longer), longer)


def here(times: StepTimes, methods: TimedMethods, counted: CountedStep | None = None) -> Basis:
    """Methods timed on this machine.

    Args:
        times: of the step, which is computed on such a machine.
        methods: to be timed.
        counted: the step, of which is said, too, what GPUs would make of it; None = nothing is said.
    """
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
    """Methods on a GPU that is not here. Their messages are made here, their codecs estimated.

    Args:
        gpu: of the table.
        times_of: the times of the step, from the seconds of the optimizer's.
        specs: the trained tensors.
        methods: to be looked at.
    """
    costs, left_out = methods.measured(specs, 0.0)
    theirs, more, longer = methods.on(gpu, costs, specs)
    known = measured_gpu().name
    doubt = f"codecs are estimated: as timed on an {known}, at the default level of each method"
    if gpu != measured_gpu():
        doubt += f", and what hangs on the memory's speed by that of an {gpu.name}"
    return Basis(times_of(longer * methods.update(specs)), theirs, {**left_out, **more}, (doubt,))


def asked_for(
    asked: AskedDevice,
    counted: CountedStep,
    methods: TimedMethods,
    precision: str | None = None,
    deterministic: bool = False,
    at_hand: bool = False,
) -> Basis:
    """The basis for a GPU that is named, or for a step time that is told.

    Args:
        asked: one of both.
        counted: the step.
        methods: to be looked at.
        precision: of the forward pass; null = float32.
        deterministic: whether TF32 is left out.
        at_hand: a step time that is told is one of devices like this one, on which the methods are timed.
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
    """The advice, without its verdict.

    Args:
        found: what it is computed from.
        cluster_of: the cluster where steps compute on `cpu`, or on `cuda`.
        network: the link's options, for the record.
        link_error: relative error of the fitted link; 0 = taken as exact.
    """
    pays, theirs = None, found.on_gpus
    if theirs is not None:
        pays = Pays(pays_below(theirs.times, theirs.costs, cluster_of("cuda")), codecs_told())
    table = advise(found.times, found.costs, cluster_of(found.times.device), link_error, pays)
    doubts = (*table.doubts, *found.doubts)
    return replace(table, network=dict(network), doubts=doubts, left_out=dict(found.left_out))
