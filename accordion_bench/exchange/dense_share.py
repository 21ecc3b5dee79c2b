"""Warnings about tensors that are exchanged dense although they have a level: how many, why, and alternatives."""

from collections.abc import Sequence

from accordion_bench.compressors.compressor import Compressor
from accordion_bench.compressors.description import WhyDense, dense_reason
from accordion_bench.options.checks import Wording, typed
from accordion_bench.options.units import counted
from accordion_bench.plan import TensorSpec

TOLD = 0.01  # lower bound of the share of coordinates for a warning; biases and other small tensors do not matter
REASONS = 2  # number of reasons in a warning, those of most coordinates


def why_dense(
    compressor: Compressor, sent: Sequence[TensorSpec], levels: Sequence[float | None], workers: int
) -> dict[WhyDense, list[TensorSpec]]:
    """Return, by reason, the units that are exchanged dense although they have a level; most coordinates first.

    Args:
        compressor: in its wrappers.
        sent: the units of exchange: tensors, buckets, or the model.
        levels: of each unit; None = dense as configured.
        workers: that take part.
    """
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
    reasons = "; ".join(
        f"{why.reason} ({len(specs)})" if len(found) > 1 else why.reason for why, specs in _first(found)
    )
    ways = [way for why, _ in _first(found) for way in why.instead]
    how_much = f"{count} of {counted(len(sent), 'tensor')}, {100 * share:.3g} % of the coordinates"
    told = f"{how_much}, are exchanged dense: {reasons}"
    return worded(told, [way for i, way in enumerate(ways) if way not in ways[:i]])


def _first(found: dict[WhyDense, list[TensorSpec]]) -> list[tuple[WhyDense, list[TensorSpec]]]:
    return list(found.items())[:REASONS]


def _numel(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.numel for spec in specs)
