"""Methods that the advice compares, and the measured times of their codecs.

Compared are all methods with a YAML file, at the levels that their class recommends. The exchange of each is timed on
given tensors and this device, without training. Rehearsals with two numbers of workers determine the cost of each
bucket for any number of workers. Above the number of workers at which an all-reduce is shorter, a method no longer
gathers messages.
"""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from accordion_bench.advising.predict import BF16, FP32, BucketCost, Messages, MethodCost
from accordion_bench.advising.rehearsal import (
    NOTHING,
    Beside,
    BucketTimes,
    Rehearsal,
    RehearsalResult,
    Units,
    optimizer_of,
)
from accordion_bench.advising.step_times import MakeOptimizer, counted, is_out_of_memory, timed, usual
from accordion_bench.attaching.checked_arguments import choose
from accordion_bench.compressors.description import declared_by
from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.methods.compatibility import MethodOptions
from accordion_bench.methods.labels import label
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, show
from accordion_bench.options.conf_dir import read_options, read_yaml, yaml_file, yaml_files
from accordion_bench.options.instantiate import Config, target
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng

FIRST: dict[tuple[str, ...], int] = {FP32: 0, BF16: 1}  # baselines
SYNCHRONOUS = "every_step"


@dataclass(frozen=True)
class AdvisedArm:
    """One method at one setting."""

    name: str  # label, as in reports
    overrides: tuple[str, ...]  # command-line overrides that select it
    chosen: MethodOptions  # options of compressor, scheme and optimizer
    beside: Beside = NOTHING  # clipping and norms of the step


def considered(optimizer: Config | None = None) -> list[AdvisedArm]:
    """Return every compressor at its default and advised levels, then every local scheme without compression.

    `optimizer` is a configuration node; None = SGD with momentum, as `optimizer=sgd`.
    """
    arms = [arm for name in yaml_files("compressor") for arm in at_levels(name, optimizer)]
    schemes = {name: target(_options("sync", name), "sync") for name in yaml_files("sync")}
    # schemes of synchronous steps save no communication
    arms += [arm_of(sync=name, optimizer=optimizer) for name, cls in schemes.items() if cls.local or not cls.waits]
    return sorted(arms, key=lambda arm: FIRST.get(arm.overrides, len(FIRST)))


def at_levels(name: str, optimizer: Config | None = None) -> list[AdvisedArm]:
    """Return one compressor at its configured level and at its advised levels."""
    node = _options("compressor", name)
    cls, levels = target(node, "compressor"), []
    if (traits := declared_by(cls)) and (knob := traits.knob):
        levels = [{knob: value} for value in cls.description.advised_levels if value != node.get(knob)]
    return [arm_of(name, options=options, optimizer=optimizer) for options in ({}, *levels)]


def arm_of(
    compressor: str = "none",
    sync: str = SYNCHRONOUS,
    options: Mapping[str, Any] | None = None,
    optimizer: Config | None = None,
) -> AdvisedArm:
    """Return one method, by names of YAML files and options of the compressor; ConfigError if one is unknown."""
    given = dict(options or {})
    once = {"period": 1} if _options("sync", sync).get("period") is not None else {}
    beside, required = _required_optimizer(compressor, sync)
    base = _brought(_options("optimizer", "sgd") if optimizer is None else optimizer, compressor, sync)
    other = _options("optimizer", beside) if beside else base
    chooses = _class_name(other) != _class_name(base)
    base = other if chooses else base
    chosen = choose({compressor: given}, None, {sync: once}, base, {}, ())
    needed = {key: value for key, value in required.items() if base.get(key, value) != value}
    typed = [f"sync={sync}"] if sync != SYNCHRONOUS else []
    typed += [f"compressor={compressor}"] if compressor != "none" or not typed else []
    typed += [f"compressor.{key}={show(value)}" for key, value in given.items()]
    typed += [f"optimizer={beside}"] if chooses else []
    typed += [f"optimizer.{key}={show(value)}" for key, value in needed.items()]
    scheme = {key: value for key, value in chosen.sync.items() if key not in ("period", "groups")}  # periods are swept
    spelled = {"compressor": chosen.compressor, "sync": scheme, "choices": {"compressor": compressor, "sync": sync}}
    return AdvisedArm(label(spelled), tuple(typed), replace(chosen, optimizer={**base, **needed}))


def _options(group: str, name: str) -> Config:
    """Return all options of a choice with their defaults; empty for an unknown name, which `choose` refuses."""
    file = yaml_file(group, name)
    return read_options(file) if file else {}


def _class_name(node: Config) -> str:
    return str(node.get("_target_")).rpartition(".")[2]


def _required_optimizer(compressor: str, sync: str) -> tuple[str, Config]:
    """Return (name, options) of the optimizer that the choices require; "" = any."""
    nodes = {"sync": _options("sync", sync), "compressor": _options("compressor", compressor)}
    wanted = [target(node, group).description.requires.get("optimizer", {}) for group, node in nodes.items() if node]
    options = {key: value for own in wanted if not isinstance(own, str) for key, value in own.items()}
    return next((name for name in wanted if isinstance(name, str)), ""), options


def _brought(optimizer: Config, compressor: str, sync: str) -> Config:
    """Return the optimizer's options with those that the YAML files of the choices set (`brings`)."""
    found = dict(optimizer)
    for group, name in (("sync", sync), ("compressor", compressor)):
        file = yaml_file(group, name)
        own = (read_yaml(file).get("brings") or {}).get("optimizer", {}) if file else {}
        found |= {key: value for key, value in own.items() if key in found}
    if found.get("momentum") == 0 and "nesterov" in found:
        found["nesterov"] = False
    return found


def chosen_arms(
    names: Sequence[str], optimizer: Config | None = None, key: str = "--methods", beside: Beside = NOTHING
) -> list[AdvisedArm]:
    """Return the baselines and every setting of the methods with these names; no names = all methods.

    Names are those in conf/compressor and conf/sync, or comma-separated lists of them. ValueRefused for an unknown one
    calls the option `key`.
    """
    arms = considered(optimizer)
    known = list(dict.fromkeys(map(name_of, arms)))
    wanted = [word for name in names for word in name.split(",") if word]
    for name in wanted:
        checks.choice(key, name, known)
    chosen = [arm for arm in arms if not wanted or arm.overrides in FIRST or name_of(arm) in wanted]
    return [replace(arm, beside=beside) for arm in chosen]


def name_of(arm: AdvisedArm) -> str:
    """Return the name of the method's scheme, or of its compressor if the steps are synchronous."""
    return arm.overrides[0].partition("=")[2]


MOST = 4096  # upper bound of the number of workers
LEAST = 0.005  # a smaller relative change of all messages is ignored
ALIKE = 0.005  # messages with a smaller relative difference do not depend on the number of workers
FEW, MORE = 2, 16  # numbers of workers of the two rehearsals
REPEATS = 7  # measured exchanges if time allows
QUICK = 0.5  # seconds; a first exchange that takes longer is not repeated beyond the budget
USUAL = 1e-3  # standard deviation of random gradients
TINY = 16  # size of each dimension of the tensors that only load kernels
BUDGET = 40.0  # seconds


def crowded_from(exchange: Exchange, info: StepInfo) -> float:
    """Return the number of workers from which most messages are replaced by an all-reduce; infinity = none.

    Messages of A workers are `fixed + shared / A` bytes long, until an all-reduce of the decoded tensors is shorter.
    From there on they are as long as the tensors. The limit is where half of the total change is reached.
    """
    levels, compressor = exchange.levels(info), exchange.compressor

    def declared(workers: int) -> float:
        pairs = zip(exchange.sent, levels, strict=True)
        return sum(payload_bytes(compressor, spec, level, workers) for spec, level in pairs)

    two, three = declared(2), declared(3)
    shared = 6 * (two - three)  # solves fixed + shared / A for A = 2 and 3
    if shared < 0:
        return 3.0

    def change(workers: int) -> float:
        return abs(declared(workers) - (two - shared / 2 + shared / workers))

    whole = change(MOST)
    if whole < LEAST * two:
        return math.inf
    below, above = 3, MOST
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if change(middle) >= whole / 2 else (middle, above)
    return float(above)


def bucket_costs(few: RehearsalResult, more: RehearsalResult) -> tuple[BucketCost, ...]:
    """Return the cost of each bucket of a method, fitted to two rehearsals.

        messages    fixed + shared / A bytes
        decode      fixed + A per_worker seconds if messages of all workers are gathered; otherwise fixed

    `encode` includes the check for non-finite gradients that a CPU makes before it sends, in proportion to the size.
    `decode` of the last bucket of each exchange includes a local method's work around the exchange: differences, the
    outer step, and averaging the optimizer's buffers. The messages of that averaging are an additional last bucket.

    The rehearsals have different numbers of workers and the same buckets. The same one twice gives costs for its number
    of workers only.
    """
    local = more.local
    look = 0.0 if local else median([step.look for one in (few, more) for step in counted(one.steps)])
    around = max(0.0, usual([step.after - step.exchanged for step in more.steps])) if local else 0.0
    numel, last = max(1, sum(spec.numel for spec in more.specs)), {part[-1] for part in more.parts if part}
    found = []
    for number, members in enumerate(more.members):
        small, large = few.buckets[number], more.buckets[number]
        messages = {kind: _messages(small, large, kind, few, more) for kind in {**small.sent, **large.sent}}
        fixed, per_worker = _decode(small, large, few, more, messages)
        encode = median([*counted(small.encode), *counted(large.encode)])
        encode += look * sum(more.specs[i].numel for i in members) / numel
        found.append(BucketCost(members, encode, (fixed + (around if number in last else 0.0), per_worker), messages))
    if more.averaged:  # one collective per buffer name
        sent = Messages(sum(more.averaged.values()), 0.0, len(more.averaged))
        found.append(BucketCost((), 0.0, (0.0, 0.0), {"all_reduce": sent}))
    return tuple(found)


def _of_own_step(bucket: BucketCost) -> BucketCost:
    """Convert a bucket from the rehearsal's one meeting to two: with the drawn worker, and with one that draws it."""
    messages = {kind: Messages(sent.fixed + sent.shared, 0.0, 2 * sent.times) for kind, sent in bucket.messages.items()}
    return replace(bucket.scaled(2), messages=messages)


def _messages(
    small: BucketTimes, large: BucketTimes, kind: str, few: RehearsalResult, more: RehearsalResult
) -> Messages:
    """Fit the messages of one kind of collective; `shared` is negative if they grow with the number of workers.

    Data-dependent lengths are averaged.
    """
    workers, others = few.workers, more.workers
    (other, before), (payload, after) = (one.sent.get(kind, (0.0, 0.0)) for one in (small, large))
    times = after or before
    if not more.fixed_size and other and payload:
        return Messages((payload + other) / 2, 0.0, times)
    if abs(other - payload) <= ALIKE * payload:
        return Messages(payload, 0.0, times)
    shared = (other - payload) / (1 / workers - 1 / others)
    fixed = payload - shared / others
    return Messages(fixed, shared, times) if fixed >= 0 else Messages(0.0, workers * other, times)


def _decode(
    small: BucketTimes, large: BucketTimes, few: RehearsalResult, more: RehearsalResult, messages: dict[str, Messages]
) -> tuple[float, float]:
    gathered = any(sent.fixed for kind, sent in messages.items() if kind.startswith("all_gather"))
    if few is more or not gathered:
        return median([*counted(small.decode), *counted(large.decode)]), 0.0
    workers, others = few.workers, more.workers
    low, high = usual(small.decode), usual(large.decode)
    each = min(max(0.0, (high - low) / (others - workers)), high / others)
    return max(0.0, high - others * each), each  # rounding


def measured_methods(
    arms: Sequence[AdvisedArm],
    specs: Sequence[TensorSpec],
    device: torch.device | str = "cpu",
    budget_seconds: float = BUDGET,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[MethodCost], dict[str, str]]:
    """Return (costs of the methods, the reason by name for each method that could not be measured).

    The total time is shared equally, but each method is measured at least once, however long that takes. `progress` is
    called with the name of each method before it is measured.
    """
    device = torch.device(device)
    gradients = random_gradients(specs, device)
    ends = time.perf_counter() + budget_seconds
    costs, left_out = [], {}
    with _quick_collections():
        for number, arm in enumerate(arms):
            gc.collect()
            progress(f"{arm.name} ({number + 1} of {len(arms)})")
            share = max(0.0, ends - time.perf_counter()) / (len(arms) - number)
            try:
                costs.append(measured_method(arm, specs, device, share, gradients))
            except ConfigError as refused:
                left_out[arm.name] = str(refused)
            except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                left_out[arm.name] = "its exchange does not fit into the memory of this device"
    return costs, left_out


@contextlib.contextmanager
def _quick_collections() -> Iterator[None]:
    """Exclude existing objects from garbage collection: it then takes milliseconds instead of a third of a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


def measured_method(
    arm: AdvisedArm,
    specs: Sequence[TensorSpec],
    device: torch.device | str = "cpu",
    budget: float = 1.0,
    gradients: Sequence[Tensor] | None = None,
) -> MethodCost:
    """Measure one method: codec times by bucket, messages by kind of collective, and the other costs of its steps.

    One worker runs the scheme, the exchange with its buckets and the optimizer, once as one of few and once as one of
    more workers. If messages of many workers would be longer than an all-reduce, a third rehearsal has that many
    workers. Times are medians; the first exchange is used only if there is no time for another. See `bucket_costs`.

    After `budget` seconds no exchange is repeated. Gradients are one [...] per tensor, random by default. ConfigError
    is raised if the method cannot be built, or its steps are not all alike.
    """
    device = torch.device(device)
    gradients = random_gradients(specs, device) if gradients is None else gradients
    small = _tiny(specs, target(arm.chosen.sync, "sync").in_every_step(arm.chosen.sync).get("period") or 1)
    Rehearsal(arm.chosen, small, FEW, device, None, arm.beside).step(random_gradients(small, device))  # loads kernels

    def prepared(workers: int, together: Units | None = None) -> Rehearsal:
        gc.collect()  # frees the last rehearsal, whose reference cycles are too few to trigger a collection
        return Rehearsal(arm.chosen, specs, workers, device, together, arm.beside)

    rehearsal = prepared(MORE)
    many = crowded_from(rehearsal.exchange, rehearsal.info)
    few = FEW if many > FEW + 1 else MORE // 2  # otherwise most messages have changed at 3 workers already
    if few == FEW and many <= MORE:
        rehearsal = prepared(int(many) - 1)
    more = _repeat(rehearsal, gradients, 0.4 * budget)
    del rehearsal
    less = _repeat(prepared(few, more.together), gradients, 0.3 * budget)
    crowded: tuple[BucketCost, ...] = ()
    if few == FEW and many < math.inf:
        together = more.together if more.partial else None
        full = _repeat(prepared(2 * int(many), together), gradients, 0.3 * budget)
        crowded = bucket_costs(full, full)
    buckets = bucket_costs(less, more)
    return MethodCost(
        name=arm.name,
        overrides=arm.overrides,
        buckets=buckets if more.waits else tuple(map(_of_own_step, buckets)),
        state=more.state,
        extra=_extra(arm, more, gradients),
        overlaps=more.overlaps,
        local=more.local or not more.waits,
        parts=more.parts if more.partial else (),
        delay=arm.chosen.sync.get("delay"),
        every_local_step=more.every_local_step or not more.waits,
        waits=more.waits,
        quorum="quorum" in arm.chosen.sync,
        repetitions=tuple(map(sum, zip(*map(_codec, less.buckets), strict=True))),
        crowded_from=many if crowded else math.inf,
        crowded=crowded,
    )


def random_gradients(specs: Sequence[TensorSpec], device: torch.device) -> list[Tensor]:
    """Return normally distributed tensors of the magnitude of gradients, the same for all methods."""
    generator = keyed_rng.generator(0, "advice")
    return [(USUAL * torch.randn(spec.shape, generator=generator)).to(device) for spec in specs]


def _tiny(specs: Sequence[TensorSpec], layers: int) -> list[TensorSpec]:
    """Return small tensors with the same numbers of dimensions, embedding tables included, in this many layers."""
    kinds = {(spec.ndim, spec.table): tuple(min(size, TINY) for size in spec.shape) for spec in specs if spec.numel}
    return [
        TensorSpec(f"{layer}.{ndim}{'.table' if table else ''}", shape, table)
        for layer in range(layers)
        for (ndim, table), shape in kinds.items()
    ]


def _repeat(rehearsal: Rehearsal, gradients: Sequence[Tensor], seconds: float) -> RehearsalResult:
    """Run one round, a second one if the first was quick, and more up to `REPEATS` while time remains."""

    def take_round() -> None:
        for _ in rehearsal.sync.parts:
            rehearsal.step(gradients)

    began, enough = time.perf_counter(), REPEATS * len(rehearsal.sync.parts)
    take_round()
    limit = seconds if time.perf_counter() - began > QUICK else max(seconds, QUICK)
    while time.perf_counter() - began < limit and len(rehearsal.steps) <= enough:
        take_round()
        limit = seconds
    while len(rehearsal.steps) % rehearsal.exchange.compressor.traits.cycle:  # bytes are means over a cycle
        rehearsal.step(gradients)
    return rehearsal.found()


def _extra(arm: AdvisedArm, rehearsed: RehearsalResult, gradients: Sequence[Tensor]) -> float:
    """Return seconds per step beyond exchange and ordinary optimizer; negative if the optimizer has less to do."""
    steps = rehearsed.steps
    if rehearsed.local:
        return usual([step.before for step in steps])
    own = usual([max(0.0, step.before - step.exchanged - step.look) + step.after for step in steps])
    if not rehearsed.moved_momentum:
        return own
    dense = optimizer_step_seconds(lambda params: optimizer_of(arm.chosen.optimizer, params), gradients)
    return own + usual([step.update for step in steps]) - dense


def optimizer_step_seconds(make: MakeOptimizer, gradients: Sequence[Tensor]) -> float:
    """Return the seconds of a full optimizer's step, of which no compressor performs a part."""
    params = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    optimizer = make(params)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    return usual(timed(optimizer.step, params[0].device, 1 + REPEATS))


def _codec(bucket: BucketTimes) -> list[float]:
    return [encode + decode for encode, decode in zip(counted(bucket.encode), counted(bucket.decode), strict=True)]
