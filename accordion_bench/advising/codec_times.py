"""What the exchange of each method takes on these tensors and this device, measured without training anything.

Rehearsals among few and among more workers give what buckets cost among any number of them. Where there are so many
that an all-reduce is shorter, a method no longer gathers messages.
"""

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor, nn

from accordion_bench.advising.arms import AdvisedArm
from accordion_bench.advising.predict import BucketCost, Messages, MethodCost
from accordion_bench.advising.rehearsal import OfBucket, Rehearsal, Rehearsed, Units, optimizer_of
from accordion_bench.advising.step_times import MakeOptimizer, counted, lacks_memory, timed, usual
from accordion_bench.compressors.sizes import payload_bytes
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import target
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng

MOST = 4096  # workers that may be asked for
LEAST = 0.005  # share of the messages that must change
ALIKE = 0.005  # messages that differ by less do not hang on the number of workers
FEW, MORE = 2, 16  # workers, from which what grows with their number is known
REPEATS = 7  # exchanges that are counted, where there is time
QUICK = 0.5  # seconds of a first exchange, from which on it has to do for the second
USUAL = 1e-3  # of random gradients
TINY = 16  # coordinates along each dimension, of tensors that only load kernels
BUDGET = 40.0  # seconds


def crowded_from(exchange: Exchange, info: StepInfo) -> float:
    """The number of workers from which on most messages differ from those among few; infinity = none.

    Messages of A workers are `fixed + shared / A` long, until compressors find an all-reduce of what they would decode
    to be shorter; then they are as long as the tensors. Halfway between is where most coordinates have changed.

    Args:
        exchange: of any number of workers.
        info: of a step.
    """
    levels, compressor = exchange.levels(info), exchange.compressor

    def declared(workers: int) -> float:
        pairs = zip(exchange.sent, levels, strict=True)
        return sum(payload_bytes(compressor, spec, level, workers) for spec, level in pairs)

    two, three = declared(2), declared(3)
    shared = 6 * (two - three)  # of fixed + shared / A, from both
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


def bucket_costs(few: Rehearsed, more: Rehearsed) -> tuple[BucketCost, ...]:
    """The buckets of a method.

        messages    fixed + shared / A bytes
        decode      fixed + A per_worker seconds, where messages of all workers are gathered; else fixed

    A look at the gradients, without which no CPU sends any, is in `encode`, by size. What a local method does around an
    exchange (differences before it, the outer step after it) is in `decode` of the last bucket
    of each exchange, and so is the work of averaging the optimizer's buffers; what that sends is a bucket at the end.

    Args:
        few, more: of different numbers of workers, with the same buckets; or twice the same one, of which nothing can
            be told that grows with their number.
    """
    local = more.local
    look = 0.0 if local else median([step.look for one in (few, more) for step in counted(one.steps)])
    around = max(0.0, usual([step.after - step.exchanged for step in more.steps])) if local else 0.0
    numel, last = max(1, sum(spec.numel for spec in more.specs)), {part[-1] for part in more.parts if part}
    found = []
    for number, members in enumerate(more.members):
        small, large = few.buckets[number], more.buckets[number]
        messages = {kind: _messages(small, large, kind, few, more) for kind in {**small.sent, **large.sent}}
        decode = _decode(small, large, few, more, messages)
        found.append(
            BucketCost(
                members=members,
                encode=median([*counted(small.encode), *counted(large.encode)])
                + look * sum(more.specs[i].numel for i in members) / numel,
                decode=(decode[0] + (around if number in last else 0.0), decode[1]),
                messages=messages,
            )
        )
    return (*found, *_of_buffers(more))


def _of_own_step(bucket: BucketCost) -> BucketCost:
    """Of workers that wait for no one, the bucket of a worker's step, from one of a step of all A.

    One worker of A has met another one there; in a step of its own it meets two: whom it has drawn, and, on average,
    one that has drawn it.
    """
    messages = {kind: Messages(sent.fixed + sent.shared, 0.0, 2 * sent.times) for kind, sent in bucket.messages.items()}
    return replace(bucket.scaled(2), messages=messages)


def _of_buffers(rehearsed: Rehearsed) -> list[BucketCost]:
    """What an averaging of the optimizer's buffers sends, where the scheme averages them."""
    if not rehearsed.averaged:
        return []
    sent = Messages(sum(rehearsed.averaged.values()), 0.0, len(rehearsed.averaged))  # one collective for each kind
    return [BucketCost((), 0.0, (0.0, 0.0), {"all_reduce": sent})]


def _messages(small: OfBucket, large: OfBucket, kind: str, few: Rehearsed, more: Rehearsed) -> Messages:
    """Messages of one kind; where their length hangs on the data, the mean.

    Where tensors one after another begin to travel otherwise, `shared` may be below 0: messages grow with the workers.
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
    small: OfBucket, large: OfBucket, few: Rehearsed, more: Rehearsed, messages: dict[str, Messages]
) -> tuple[float, float]:
    """(Fixed seconds, seconds for each worker), neither below 0."""
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
    """Measure many methods, each in its share of the time that is left.

    Args:
        arms: the methods.
        specs: the trained tensors; no model is needed.
        device: on which codecs are to run.
        budget_seconds: in all; each method is measured at least once however long that takes.
        progress: is told the name of each method before it begins.

    Returns:
        (the costs, and by name why others could not be measured).
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
                if not lacks_memory(error):
                    raise
                left_out[arm.name] = "its exchange does not fit into the memory of this device"
    return costs, left_out


@contextlib.contextmanager
def _quick_collections() -> Iterator[None]:
    """Python's garbage collector skips all older objects: it takes milliseconds instead of a third of a second."""
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
    """Measure one method: codec by bucket, messages by kind of collective, what its steps take beside them.

    One worker with a process of its own goes through the scheme, the exchange with its buckets, and the optimizer, as
    one of few and as one of more workers; what differs grows with their number. Where messages of many workers would be
    longer than an all-reduce, it does so once more as one of as many. Medians; the first exchange counts only where
    there is time for no other. See `bucket_costs`.

    Args:
        arm: the method.
        specs: the trained tensors.
        device: on which it is to run.
        budget: seconds after which no exchange is repeated.
        gradients: one [...] per tensor; None = random ones.

    Raises:
        ConfigError: the method cannot be built, or its steps are not all alike.
    """
    device = torch.device(device)
    gradients = random_gradients(specs, device) if gradients is None else gradients
    small = _tiny(specs, target(arm.chosen.sync, "sync").in_every_step(arm.chosen.sync).get("period") or 1)
    Rehearsal(arm.chosen, small, FEW, device, None, arm.beside).step(random_gradients(small, device))  # loads kernels

    def prepared(workers: int, together: Units | None = None) -> Rehearsal:
        gc.collect()  # the last one's parts refer to each other: Python counts objects, and these are few but large
        return Rehearsal(arm.chosen, specs, workers, device, together, arm.beside)

    rehearsal = prepared(MORE)
    many = crowded_from(rehearsal.exchange, rehearsal.info)
    few = FEW if many > FEW + 1 else MORE // 2  # else most has changed at 3 workers already
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
    """Normally distributed numbers of the magnitude of gradients, the same for all methods."""
    generator = keyed_rng.generator(0, "advice")
    return [(USUAL * torch.randn(spec.shape, generator=generator)).to(device) for spec in specs]


def _tiny(specs: Sequence[TensorSpec], layers: int) -> list[TensorSpec]:
    """Small tensors with the same numbers of dimensions, tables among them, in so many layers."""
    kinds = {(spec.ndim, spec.table): tuple(min(size, TINY) for size in spec.shape) for spec in specs if spec.numel}
    return [
        TensorSpec(f"{layer}.{ndim}{'.table' if table else ''}", shape, table)
        for layer in range(layers)
        for (ndim, table), shape in kinds.items()
    ]


def _repeat(rehearsal: Rehearsal, gradients: Sequence[Tensor], seconds: float) -> Rehearsed:
    """One round, a second one where the first was quick, and others until there are enough or the time is over."""

    def take_round() -> None:
        for _ in rehearsal.sync.parts:
            rehearsal.step(gradients)

    began, enough = time.perf_counter(), REPEATS * len(rehearsal.sync.parts)
    take_round()
    limit = seconds if time.perf_counter() - began > QUICK else max(seconds, QUICK)
    while time.perf_counter() - began < limit and len(rehearsal.steps) <= enough:
        take_round()
        limit = seconds
    while len(rehearsal.steps) % rehearsal.exchange.compressor.traits.cycle:  # bytes are means
        rehearsal.step(gradients)
    return rehearsal.found()


def _extra(arm: AdvisedArm, rehearsed: Rehearsed, gradients: Sequence[Tensor]) -> float:
    """Seconds that a step takes beside exchange and usual optimizer; negative where the optimizer has less to do."""
    steps = rehearsed.steps
    if rehearsed.local:
        return usual([step.before for step in steps])
    own = usual([max(0.0, step.before - step.exchanged - step.look) + step.after for step in steps])
    if not rehearsed.moved_momentum:
        return own
    dense = usual_update(lambda params: optimizer_of(arm.chosen.optimizer, params), gradients)
    return own + usual([step.update for step in steps]) - dense


def usual_update(make: MakeOptimizer, gradients: Sequence[Tensor]) -> float:
    """Seconds of an optimizer's step of which no compressor takes a part."""
    params = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    optimizer = make(params)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    return usual(timed(optimizer.step, params[0].device, 1 + REPEATS))


def _codec(bucket: OfBucket) -> list[float]:
    """Seconds of codec of one bucket, in each exchange."""
    return [encode + decode for encode, decode in zip(counted(bucket.encode), counted(bucket.decode), strict=True)]
