"""From rehearsals among few and among more workers to what buckets cost among any number of them."""

import statistics
from collections.abc import Sequence
from typing import TypeVar

from accordion_bench.advising.method_cost import BucketCost, Messages
from accordion_bench.advising.rehearsal import OfBucket, Rehearsed, Step

ALIKE = 0.005  # messages that differ by less do not hang on the number of workers
T = TypeVar("T", float, Step)


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
    around = max(0.0, median([step.after - step.exchanged for step in counted(more.steps)])) if local else 0.0
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
    """(What is always taken, what each worker adds), neither below 0."""
    gathered = any(sent.fixed for kind, sent in messages.items() if kind.startswith("all_gather"))
    own, all_of_them = counted(small.decode), counted(large.decode)
    if few is more or not gathered:
        return median([*own, *all_of_them]), 0.0
    workers, others = few.workers, more.workers
    low, high = median(own), median(all_of_them)
    each = min(max(0.0, (high - low) / (others - workers)), high / others)
    return max(0.0, high - others * each), each  # rounding


def counted(values: Sequence[T]) -> Sequence[T]:
    """All but the first, which allocates; that one where there is no other."""
    return values[1:] or values


def median(values: Sequence[float]) -> float:
    """What it usually takes."""
    return float(statistics.median(values))
