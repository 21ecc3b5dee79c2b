"""Inspection of an exchange without running it: error and bytes of its messages, and the size of its state."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import NonFiniteRow
from accordion_bench.compressors.compressor import NonFinite, State
from accordion_bench.compressors.probe import Buckets, Probed, buckets_of, probe, probe_input
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.plan import Measured
from accordion_bench.position import StepInfo


@torch.no_grad()
def probe_exchange(exchange: Exchange, xs_W: Sequence[Tensor], info: StepInfo, first: bool = False) -> Probed:
    """Return error and bytes per exchanged unit under the plan, of all local workers or only of the first."""
    state = exchange.state
    if first:
        xs_W, state = [x_W[:1] for x_W in xs_W], state_of_first(exchange)
    return probe(exchange.compressor, exchange.as_sent(xs_W), exchange.context(info), state, exchange.comm.workers)


@torch.no_grad()
def compressor_input(exchange: Exchange, xs_W: Sequence[Tensor], info: StepInfo) -> list[Tensor]:
    """Return the compressor's input on the first local worker, with residual and momentum, [1, ...] per unit."""
    own, ctx = exchange.as_sent([x_W[:1] for x_W in xs_W]), exchange.context(info)
    found = exchange.compressor.compressor_input(own, ctx, state_of_first(exchange), exchange.comm.workers)
    # the next step overwrites the gradients, so that views of them are copied
    return [p.clone() if p.data_ptr() == x.data_ptr() else p for p, x in zip(found, own, strict=True)]


def state_of_first(exchange: Exchange) -> State:
    """Return the state of the first local worker only, without copies."""
    return {
        name: {key: value[:1] if key.endswith("_W") else value for key, value in entries.items()}
        for name, entries in exchange.state.items()
    }


@torch.no_grad()
def measure_level(
    exchange: Exchange, xs_W: Sequence[Tensor], level: int, info: StepInfo, is_input: bool = False
) -> dict[str, Measured]:
    """Return bytes and error of one level of the ladder on the first local worker, per unit that has levels.

    The tensors are those of an exchange, or if `is_input`, results of `compressor_input`.
    """
    plan = info.plan
    ctx = exchange.context(replace(info, plan=plan.with_levels(dict.fromkeys(plan.levels, level))))
    own, look = (list(xs_W), probe_input) if is_input else (exchange.as_sent([x_W[:1] for x_W in xs_W]), probe)
    found = look(exchange.compressor, own, ctx, state_of_first(exchange), exchange.comm.workers)
    named = zip(exchange.sent, found.measured, strict=True)
    return {spec.name: measure for spec, measure in named if spec.name in plan.levels}


def cut_into_buckets(exchange: Exchange, xs_W: Sequence[Tensor], info: StepInfo) -> list[list[Buckets]]:
    """Return the quantiser's buckets of each local worker's tensors; NonFinite if a tensor or a bucket's norm is."""
    exchange.refuse_non_finite(xs_W)
    try:
        buckets_W = buckets_of(exchange.compressor, exchange.as_sent(xs_W), exchange.context(replace(info, lr=1.0)))
    except NonFiniteRow:
        raise NonFinite("the norm of a bucket of gradients exceeds float32") from None
    assert buckets_W is not None
    return buckets_W


def state_bytes(exchange: Exchange, share: float = 1.0) -> float:
    """Return the bytes of a compressor's state in a process with the given share of the exchange's workers."""
    rows = [(key.endswith("_W"), value) for own in exchange.state.values() for key, value in own.items()]
    return sum((share if of_workers else 1) * size_of(tensors_in(value)) for of_workers, value in rows)


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(x.numel() * x.element_size() for x in tensors)


def tensors_in(node: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested containers."""
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, dict | list | tuple):
        for value in node.values() if isinstance(node, dict) else node:
            yield from tensors_in(value)
