"""What a compressor's messages cost: bytes that are handed to collectives, and bytes on the wire."""

from collections.abc import Mapping, Sequence
from typing import Any

from accordion_bench.codecs.layout import Transfer
from accordion_bench.compressors.compressor import Compressor, State
from accordion_bench.plan import TensorSpec


def carried(
    compressor: Compressor, spec: TensorSpec, level: float | None, workers: int, kept: Mapping[str, Any] | None = None
) -> Sequence[Transfer]:
    """The collectives of any tensor.

    Args:
        compressor: that sends it.
        spec, level: of the tensor; `level` None = dense.
        workers: of the run.
        kept: its state, see `Compressor.transfers`.
    """
    if level is None or not compressor.compresses(spec, level) or not compressor.pays(spec, level, workers):
        return [Transfer("all_reduce", dense_bytes(spec))]
    return compressor.transfers(spec, level, workers, kept)


def payload_bytes(compressor: Compressor, spec: TensorSpec, level: float | None, workers: int) -> float:
    """Bytes that one worker hands to the collectives for this tensor (mean over workers); `level` None = dense.

    Where exchanges of a tensor take turns, their mean.
    """
    return sum(transfer.payload(workers) for transfer in carried(compressor, spec, level, workers))


def coming_bytes(compressor: Compressor, spec: TensorSpec, level: float | None, workers: int, state: State) -> float:
    """The same of the next exchange, whose turn it is by what `state` keeps."""
    transfers = carried(compressor, spec, level, workers, state.get(spec.name, {}))
    return sum(transfer.payload(workers) for transfer in transfers)


def wire_bytes(compressor: Compressor, spec: TensorSpec, level: float | None, workers: int) -> float:
    """Bytes that one worker's link sends for this tensor (mean over workers)."""
    return wire(carried(compressor, spec, level, workers), workers) / workers


def wire(transfers: Sequence[Transfer], workers: int) -> float:
    """Bytes that the links of all workers send."""
    return sum(transfer.wire(workers) for transfer in transfers)


def cheaper_than_dense(transfers: Sequence[Transfer], spec: TensorSpec, workers: int) -> bool:
    """Whether these collectives cost less wire than a dense all-reduce; of one worker, as of two."""
    workers = max(workers, 2)
    return wire(transfers, workers) < wire([Transfer("all_reduce", dense_bytes(spec))], workers)


def dense_bytes(spec: TensorSpec) -> int:
    """Payload of an fp32 all-reduce of one tensor."""
    return 4 * spec.numel
