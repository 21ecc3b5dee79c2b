"""Partition of tensors into units of compression, of units into buckets, and warnings about units that stay dense."""

import math
from collections.abc import Collection, Sequence

from accordion_bench.compressors.compressor import Compressor
from accordion_bench.compressors.description import WhyDense, dense_reason
from accordion_bench.options.checks import Wording, typed
from accordion_bench.options.units import counted
from accordion_bench.plan import BLOCK, WHOLE_MODEL, TensorSpec

MB = 2**20


def bucketed(
    sizes: Sequence[float],
    bucket_mb: tuple[float, float],
    gradients: Sequence[float] = (),
    gradient_mb: float = math.inf,
) -> list[list[int]]:
    """Group units into buckets: from the last unit on, until `bucket_mb` (the first bucket, the others) is reached.

    Gradients become ready in about this order. Units within a bucket have the model's order.

    Args:
        sizes, gradients: bytes of each unit's message, and, if `gradient_mb` is finite, of its gradients.
        bucket_mb: MB of messages, in the first bucket and in the others.
        gradient_mb: MB of gradients at which a bucket is also complete.
    """
    buckets: list[list[int]] = []
    filled = limit = computed = 0.0
    for u in reversed(range(len(sizes))):
        if not buckets or filled >= limit or computed >= gradient_mb * MB:
            limit = bucket_mb[bool(buckets)] * MB
            buckets.append([])
            filled = computed = 0.0
        buckets[-1].insert(0, u)
        filled += sizes[u]
        computed += gradients[u] if gradients else 0
    return buckets


def bucketed_in_parts(
    sizes: Sequence[float],
    bucket_mb: tuple[float, float],
    gradients: Sequence[float],
    gradient_mb: float,
    parts: Sequence[Sequence[int]] | None,
) -> list[list[int]]:
    """Group units as `bucketed` does, but part by part (units by index), so that no bucket contains units of two."""
    if parts is None:
        return bucketed(sizes, bucket_mb, gradients, gradient_mb)
    found = []
    for part in parts:
        own = bucketed([sizes[u] for u in part], bucket_mb, [gradients[u] for u in part], gradient_mb)
        found += [[part[u] for u in bucket] for bucket in own]
    return found


def sent_units(specs: Sequence[TensorSpec], scope: str, block_size: int | None = None) -> list[list[int]]:
    """Return the tensors, by index, of each unit of compression."""
    if scope == "tensor":
        return [[i] for i in range(len(specs))]
    limit = float("inf") if scope == WHOLE_MODEL or block_size is None else block_size
    units: list[list[int]] = []
    filled = 0.0
    for i, spec in enumerate(specs):
        if not units or filled + spec.numel > limit:
            units.append([])
            filled = 0
        units[-1].append(i)
        filled += spec.numel
    return units


def unit_spec(specs: Sequence[TensorSpec], unit: Sequence[int], scope: str) -> TensorSpec:
    """Return the spec of a unit: its tensor, or a vector as [1, N] with two dimensions, which every method accepts."""
    if scope == "tensor":
        return specs[unit[0]]
    name = WHOLE_MODEL if scope == WHOLE_MODEL else BLOCK + specs[unit[0]].name
    return TensorSpec(name, (1, sum(specs[i].numel for i in unit)))


def sent_specs(specs: Sequence[TensorSpec], scope: str, block_size: int | None = None) -> list[TensorSpec]:
    """Return the specs of all units: each tensor, each bucket, or the whole model as one vector."""
    return [unit_spec(specs, unit, scope) for unit in sent_units(specs, scope, block_size)]


def levelled(compressor: Compressor, sent: Sequence[TensorSpec], exempt: Collection[str] = ()) -> list[str]:
    """Return the names of units with a level: at least `min_ndim` dimensions, not exempt, tables if `traits.tables`."""
    traits = compressor.traits
    if not traits.knob:
        return []
    fit = [spec for spec in sent if spec.ndim >= traits.min_ndim and (traits.tables or not spec.table)]
    return [spec.name for spec in fit if spec.name not in exempt]


TOLD = 0.01  # lower bound of the share of coordinates for a warning; biases and other small tensors do not matter
REASONS = 2  # number of reasons in a warning, those of most coordinates


def why_dense(
    compressor: Compressor, sent: Sequence[TensorSpec], levels: Sequence[float | None], workers: int
) -> dict[WhyDense, list[TensorSpec]]:
    """Return, by reason, the units that are exchanged dense although they have a level; most coordinates first."""
    found: dict[WhyDense, list[TensorSpec]] = {}
    for spec, level in zip(sent, levels, strict=True):
        why = None if level is None else dense_reason(compressor, spec, level, workers)
        if why is not None:
            found.setdefault(why, []).append(spec)
    return dict(sorted(found.items(), key=lambda item: -_numel(item[1])))


def dense_warning(
    compressor: Compressor,
    sent: Sequence[TensorSpec],
    levels: Sequence[float | None],
    workers: int,
    worded: Wording = typed,
) -> str:
    """Return a warning about dense units, with alternatives as `worded`; "" below 1 % of the coordinates."""
    found, whole = why_dense(compressor, sent, levels, workers), _numel(sent)
    share = sum(map(_numel, found.values())) / max(whole, 1)
    if share < TOLD:
        return ""
    count = sum(map(len, found.values()))
    first = list(found.items())[:REASONS]
    reasons = "; ".join(f"{why.reason} ({len(specs)})" if len(found) > 1 else why.reason for why, specs in first)
    ways = [way for why, _ in first for way in why.instead]
    how_much = f"{count} of {counted(len(sent), 'tensor')}, {100 * share:.3g} % of the coordinates"
    told = f"{how_much}, are exchanged dense: {reasons}"
    return worded(told, [way for i, way in enumerate(ways) if way not in ways[:i]])


def _numel(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.numel for spec in specs)
