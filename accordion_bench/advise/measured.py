"""What is timed here: a step of the model, unless somebody knows its time, and the exchange of every method."""

import functools
from dataclasses import dataclass, replace

import torch

from accordion_bench.advise import subject
from accordion_bench.advise.asked import Asked
from accordion_bench.advise.progress import say
from accordion_bench.advise.subject import Subject
from accordion_bench.advising import basis
from accordion_bench.advising.basis import Basis, Methods
from accordion_bench.advising.timeline_file import step_times_from
from accordion_bench.advising.trial import Effort, measured_step
from accordion_bench.attaching.own_parameters import trained_specs
from accordion_bench.processes import memory
from accordion_bench.processes.computing import as_in_a_run, computing_with

OF_A_STEP = 15.0  # seconds, at most, for timing the step
OWN_LOOP = (
    "{} was recorded in a loop of your own; a run of this program also keeps freed memory, chooses its threads and "
    "lets cuDNN search for the fastest kernels"
)


@dataclass(frozen=True)
class Measured:
    """What advice is computed from.

    Args:
        basis: times of a step and costs of the methods.
        threads: that computed.
    """

    basis: Basis
    threads: int


def measured(asked: Asked) -> Measured:
    """Time the step and the methods, while telling how far it is.

    Raises:
        ConfigError: the model does not fit, or the timeline is of another one.
    """
    device = torch.device("cpu") if asked.where == "cpu" else subject.device_of(asked.config)
    chosen = asked.config.threads or torch.get_num_threads()
    made = None
    if asked.timeline is None or asked.typed_model:
        made = subject.subject_of(asked.config, asked.assumed, asked.machines.workers_each)
        chosen = made.threads
    doing = "timing" if asked.at_hand else "counting the messages of"
    methods = Methods(asked.arms, device, asked.seconds, functools.partial(_next, doing))
    if asked.timeline is not None:
        with computing_with(chosen):
            found = _of_timeline(asked, methods, made)
    else:
        assert made is not None
        with as_in_a_run(device.type, chosen, asked.config.deterministic):
            found = _of_model(asked, methods, made)
    if asked.assumed:
        assumed = f"dataset={asked.assumed} is assumed for this model; type dataset=NAME for another"
        found = replace(found, doubts=(assumed, *found.doubts))
    return Measured(found, chosen)


def _next(doing: str, method: str) -> None:
    """Another method is looked at: what the one before has freed is no part of it."""
    memory.give_back()
    say(f"{doing} {method}")


def _of_model(asked: Asked, methods: Methods, made: Subject) -> Basis:
    """From a model of this program."""
    if asked.device:
        say(f"counting a step of {made.name}")
        rates = asked.config.precision, asked.config.deterministic
        return basis.asked_for(asked.device, made.counted(), methods, *rates, at_hand=asked.at_hand)
    say(f"timing a step of {made.name}")
    effort = Effort(budget=OF_A_STEP)
    times = measured_step(made.model, made.batch, made.loss, made.optimizer, asked.config.batch_size, effort)
    times = replace(times, model=made.name or times.model)
    return basis.here(times, methods, made.counted(computed=True) if methods.device.type == "cpu" else None)


def _of_timeline(asked: Asked, methods: Methods, made: Subject | None) -> Basis:
    """From a step that somebody has recorded in a loop of their own."""
    assert asked.timeline is not None
    times = step_times_from(asked.timeline, None if made is None else trained_specs(made.model))
    times = replace(times, device=asked.where)
    if asked.at_hand:
        found = basis.here(times, methods)
    else:
        found = basis.on_gpu(asked.device.codecs_of, lambda _: times, times.specs, methods)
    return replace(found, doubts=(OWN_LOOP.format(asked.timeline.name), *found.doubts))
