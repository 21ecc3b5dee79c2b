"""From a command line to advice: checked, timed, told and written.

Timed are a step of the model, unless its time was recorded elsewhere, and the exchange of every method. Accuracies come
from reports of earlier runs.
"""

import argparse
import functools
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from accordion_bench.advise.arguments import done, say
from accordion_bench.advise.asked import Asked, Subject, asked_of, device_of, subject_of
from accordion_bench.advise.late_workers import told
from accordion_bench.advising import basis
from accordion_bench.advising.advice import Advice, AdviceRow
from accordion_bench.advising.basis import Basis, TimedMethods
from accordion_bench.advising.predict import Cluster, cluster_like_here
from accordion_bench.advising.step_times import Effort, measured_step, step_times_from
from accordion_bench.advising.text import short_text, text, write
from accordion_bench.advising.verdict import verdict
from accordion_bench.attaching.own_parameters import trained_specs
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.override import group_of, key_of
from accordion_bench.processes import machine
from accordion_bench.processes.machine import as_in_a_run, computing_with
from accordion_bench.runs.environment import environment

OF_A_STEP = 15.0  # seconds, at most, for timing the step
OWN_LOOP = (
    "{} was recorded in a loop of your own; a run of this program also keeps freed memory, chooses its threads and "
    "lets cuDNN search for the fastest kernels"
)
PROBED = Path("link.json")
PROBE_SECONDS = 20.0
PIPED = 110  # letters of a line where standard output is no terminal


def with_accuracies(advice: Advice, known: Mapping[str, str], typed: Sequence[str]) -> Advice:
    """The advice with both columns filled.

    Args:
        advice: whose rows lack them.
        known: by method, from runs at hand; local methods without their period.
        typed: overrides that say what is trained; none where that is not known, as with a timeline.
    """

    def told(row: AdviceRow) -> AdviceRow:
        name = row.method.partition(", H ")[0] if row.local else row.method
        return replace(row, accuracy="" if row.method == "dense" else known.get(name, ""), command=command(row, typed))

    return replace(advice, rows=tuple(map(told, advice.rows)))


def command(row: AdviceRow, typed: Sequence[str]) -> str:
    """A run of one method; "" where what is trained is not known."""
    if not typed:
        return ""
    period = [f"sync.period={row.period}"] if row.local and not row.every_local_step else []
    kept = [word for word in row.overrides if not word.startswith("sync.period=")]
    chosen = {word.partition("=")[0] for word in kept}
    trained = [word for word in typed if chosen.isdisjoint((key_of(word), group_of(word)))]
    return " ".join(["python -m accordion_bench", *map(shlex.quote, trained), *kept, *period])


@dataclass(frozen=True)
class MeasuredBasis:
    """What advice is computed from.

    Args:
        basis: times of a step and costs of the methods.
        threads: that computed.
    """

    basis: Basis
    threads: int


def measured(asked: Asked) -> MeasuredBasis:
    """Time the step and the methods, while telling how far it is.

    Raises:
        ConfigError: the model does not fit, or the timeline is of another one.
    """
    device = torch.device("cpu") if asked.where == "cpu" else device_of(asked.config)
    chosen = asked.config.threads or torch.get_num_threads()
    made = None
    if asked.timeline is None or asked.typed_model:
        made = subject_of(asked.config, asked.assumed, asked.machines.workers_each)
        chosen = made.threads
    doing = "timing" if asked.at_hand else "counting the messages of"
    methods = TimedMethods(asked.arms, device, asked.seconds, functools.partial(_next, doing))
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
    return MeasuredBasis(found, chosen)


def _next(doing: str, method: str) -> None:
    """Another method is looked at: what the one before has freed is no part of it."""
    machine.give_back()
    say(f"{doing} {method}")


def _of_model(asked: Asked, methods: TimedMethods, made: Subject) -> Basis:
    """From a model of this program."""
    if asked.device:
        say(f"counting a step of {made.name}")
        rates = asked.config.precision, asked.config.deterministic
        return basis.asked_for(asked.device, made.counted(), methods, *rates, at_hand=asked.at_hand)
    say(f"timing a step of {made.name}")
    effort = Effort(budget=OF_A_STEP)
    times = measured_step(made.model, made.batch, made.loss, made.optimizer, asked.config.largest_batch, effort)
    times = replace(times, model=made.name or times.model)
    return basis.here(times, methods, made.counted(computed=True) if methods.device.type == "cpu" else None)


def _of_timeline(asked: Asked, methods: TimedMethods, made: Subject | None) -> Basis:
    """From a step that a user has recorded in a loop of their own."""
    assert asked.timeline is not None
    times = step_times_from(asked.timeline, None if made is None else trained_specs(made.model))
    times = replace(times, device=asked.where)
    if asked.at_hand:
        found = basis.here(times, methods)
    else:
        found = basis.on_gpu(asked.device.codecs_of, lambda _: times, times.specs, methods)
    return replace(found, doubts=(OWN_LOOP.format(asked.timeline.name), *found.doubts))


def run(args: argparse.Namespace) -> None:
    """Give advice, or probe the link.

    Raises:
        ConfigError: a value breaks a rule.
    """
    if args.probe:
        probe(args)
        return
    asked = asked_of(args)
    found = measured(asked)
    advice = advised(asked, found)
    said, shown = text(advice), short_text(advice, shutil.get_terminal_size((PIPED, 24)).columns)
    timed_with = {"device": asked.where, "on": advice.on, **environment(found.threads)}
    late = []
    if asked.wanted is not None:
        say("simulating")
        cluster = cluster_of(asked, asked.where, found.threads)
        late = asked.wanted.run(found.basis.times, found.basis.costs, cluster, advice)
        simulated = f"\n{told(late, advice, asked.wanted)}"
        said, shown = said + simulated, shown + simulated
    write(advice, asked.out, timed_with, said)
    if late:
        rows = [one.flat() for one in late]
        (asked.out / "simulated.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if asked.figures:
        from accordion_bench.report.render.figures.speed_ups import draw_advice  # a second that others need not wait

        say("drawing")
        draw_advice(advice, asked.out)
    done()
    print(f"{shown}\nwhole table{' and figures' * asked.figures}: {asked.out}")


def advised(asked: Asked, found: MeasuredBasis) -> Advice:
    """The advice from what was timed, with accuracies and its verdict."""
    options = {key: value for key, value in asked.config.network.items() if key != "_target_"}
    advice = basis.advised(found.basis, lambda kind: cluster_of(asked, kind, found.threads), options, asked.link_error)
    advice = with_accuracies(advice, asked.known, asked.trained)
    return replace(advice, verdict=verdict(advice))


def cluster_of(asked: Asked, device: str, threads: int) -> Cluster:
    """The reader's cluster, where steps compute on `cpu` or on `cuda`."""
    return cluster_like_here(asked.networks[device], asked.machines.workers, device, threads)


def probe(args: argparse.Namespace) -> None:
    """Time collectives between the processes that torchrun has started, and write what to type.

    Raises:
        ConfigError: other options stand beside, or there are no peers.
    """
    beside = {
        "overrides": "overrides",
        "timeline": "--timeline",
        "methods": "--methods",
        "runs": "--runs",
        "link": "--link",
    }
    beside["simulate"] = "--simulate"
    if taken := next((shown for name, shown in beside.items() if getattr(args, name)), None):
        raise ConfigError(f"--probe must stand without {taken}, got both; type --probe alone, then ask for advice")
    from accordion_bench.network.probe import probe_link

    probe_link(PROBE_SECONDS if args.seconds is None else args.seconds, args.out or PROBED)
