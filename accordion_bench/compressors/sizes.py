"""Cost of a compressor's messages: payload bytes of the collectives, and bytes on the wire."""

from collections.abc import Mapping, Sequence
from typing import Any

from accordion_bench.codecs.layout import Transfer
from accordion_bench.compressors.compressor import Compressor, State
from accordion_bench.plan import TensorSpec


def carried(
    compressor: Compressor, spec: TensorSpec, level: float | None, workers: int, kept: Mapping[str, Any] | None = None
) -> Sequence[Transfer]:
    """Return the collectives that carry a tensor, compressed or dense.

    Args:
        compressor: sends the tensor.
        spec, level: of the tensor; `level` None = dense.
        workers: of the run.
        kept: its state, see `Compressor.transfers`.
    """
    if level is None or not compressor.compresses(spec, level) or not compressor.pays(spec, level, workers):
        return [Transfer("all_reduce", dense_bytes(spec))]
    return compressor.transfers(spec, level, workers, kept)


def payload_bytes(compressor: Compressor, spec: TensorSpec, level: float | None, workers: int) -> float:
    """Return the payload bytes of one worker for this tensor (mean over workers and turns); `level` None = dense."""
    return sum(transfer.payload(workers) for transfer in carried(compressor, spec, level, workers))


def next_payload_bytes(
    compressor: Compressor, spec: TensorSpec, level: float | None, workers: int, state: State
) -> float:
    """Return the payload bytes of the next exchange, whose turn is stored in `state`."""
    transfers = carried(compressor, spec, level, workers, state.get(spec.name, {}))
    return sum(transfer.payload(workers) for transfer in transfers)


def wire_bytes(compressor: Compressor, spec: TensorSpec, level: float | None, workers: int) -> float:
    """Return the bytes that one worker's link sends for this tensor (mean over workers)."""
    return wire(carried(compressor, spec, level, workers), workers) / workers


def wire(transfers: Sequence[Transfer], workers: int) -> float:
    """Return the bytes that the links of all workers send."""
    return sum(transfer.wire(workers) for transfer in transfers)


def cheaper_than_dense(transfers: Sequence[Transfer], spec: TensorSpec, workers: int) -> bool:
    """Whether these collectives cost fewer wire bytes than a dense all-reduce; one worker counts as two."""
    workers = max(workers, 2)
    return wire(transfers, workers) < wire([Transfer("all_reduce", dense_bytes(spec))], workers)


def dense_bytes(spec: TensorSpec) -> int:
    """Return the payload bytes of an fp32 all-reduce of one tensor."""
    return 4 * spec.numel
