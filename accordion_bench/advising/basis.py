"""What advice is computed from: times of a step and costs of methods, of this machine or of a GPU that is not here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from accordion_bench.advising.advice import Advice, Pays, advise
from accordion_bench.advising.arms import AdvisedArm
from accordion_bench.advising.codec_times import measured_methods, random_gradients, usual_update
from accordion_bench.advising.counted_step import CountedStep, costs_on, step_on, times_as_long
from accordion_bench.advising.gpus import AskedDevice, Gpu, codecs_told, measured_gpu, operation_seconds
from accordion_bench.advising.predict import Cluster, MethodCost, pays_below
from accordion_bench.advising.rehearsal import optimizer_of
from accordion_bench.advising.step_times import MakeOptimizer, StepTimes
from accordion_bench.plan import TensorSpec

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
        """The costs here, and why others could not be measured."""
        return measured_methods(self.arms, specs, self.device, seconds, self.progress)

    def on(
        self, gpu: Gpu, costs: Sequence[MethodCost], specs: Sequence[TensorSpec]
    ) -> tuple[list[MethodCost], dict[str, str], float]:
        """Costs that were measured here as those of a GPU; and how many times as long a copy takes there."""
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
    """Methods on a GPU that is not here: their messages made here, their codecs estimated.

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
