"""Bytes of a level's messages, and probes of its error and of the buckets of a quantiser, without communication."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Context
from accordion_bench.codecs.layout import Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Kept, State, cached_by_arguments
from accordion_bench.plan import Measured, TensorSpec
from accordion_bench.tensors.same_shape import in_rows


def carried(
    compressor: Compressor, spec: TensorSpec, level: float | None, workers: int, kept: Kept = None
) -> Sequence[Transfer]:
    """Return the collectives that carry a tensor, compressed or dense; `level` None = dense."""
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


@cached_by_arguments
def cheaper_than_dense(compressor: Compressor, spec: TensorSpec, level: float, workers: int) -> bool:
    """Whether a tensor's messages cost fewer wire bytes than a dense all-reduce; one worker counts as two."""
    workers = max(workers, 2)
    dense = Transfer("all_reduce", dense_bytes(spec))
    return wire(compressor.transfers(spec, level, workers), workers) < wire([dense], workers)


def dense_bytes(spec: TensorSpec) -> int:
    """Return the payload bytes of an fp32 all-reduce of one tensor."""
    return 4 * spec.numel


# ---- probes


class Buckets(NamedTuple):
    """Buckets of one worker: norms [B], normalised coordinates r [B, D], and which of these exist [B, D]."""

    norms: Tensor
    r: Tensor
    exists: Tensor


def bucket_table(buckets: Sequence[Buckets]) -> Tensor:
    """Return norm, mean of r, sum of squared deviations of r, and number of coordinates of every bucket: [B, 4]."""
    rows = []
    for norms, r, exists in buckets:
        count = exists.sum(1).double()
        mean = r.double().sum(1) / count
        spread = ((r.double() - mean[:, None]) * exists).square().sum(1)
        rows.append(torch.stack([norms.double(), mean, spread, count], dim=1))
    return torch.cat(rows) if rows else torch.zeros(0, 4, dtype=torch.float64)


def lengths(buckets: Sequence[Buckets]) -> set[int]:
    """Return the set of bucket sizes that occur, in coordinates."""
    counts = [bucket.exists.sum(1) for bucket in buckets]
    return set(torch.cat(counts).tolist()) if counts else set()


class Probed(NamedTuple):
    """Bytes and error of a level, measured without communication.

    error: per tensor, ||p - C(p)||^2 / ||p||^2, mean over the local workers; 0 for a zero tensor. p is the input of the
        compression: the gradient, with residual and momentum if there are any.
    total_error: the same over all tensors together.
    payload_bytes: per tensor, of one worker; an upper bound if `fixed_size` is false.
    measured: per tensor, error, norms and bytes of the first local worker.
    """

    error: list[float]
    total_error: float
    payload_bytes: list[float]
    measured: list[Measured]


@torch.no_grad()
def probe(compressor: Compressor, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probed:
    """Return error and bytes at the levels of `ctx`; changes no state and does not communicate.

    Args:
        compressor, xs_W, ctx, state: in its wrappers; as for `exchange`.
        workers: of the whole run, for the bytes.
    """
    if compressor.description.probe:
        own: Probed = compressor.description.probe(compressor, xs_W, ctx, state, workers)
        return own
    ps_W = compressor.compressor_input(xs_W, ctx, state, workers)
    return probe_input(compressor, ps_W, ctx, state, workers)


@torch.no_grad()
def probe_input(compressor: Compressor, ps_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probed:
    """Return the probe of the result of `compressor_input`, or of a mean of several such results."""
    if compressor.description.probe_input:
        own: Probed = compressor.description.probe_input(compressor, ps_W, ctx, state, workers)
        return own
    return probe_exchanged(compressor, ps_W, ctx, state, workers)


def probe_exchanged(compressor: Compressor, ps_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probed:
    """Return the probe of an exchange of the local workers only, on a copy of the state."""
    out = compressor.exchange(ps_W, ctx, copy.deepcopy(state), alone(ps_W))

    def lost(i: int) -> Tensor:
        lost_W = ps_W[i].clone()
        out.subtract_sent_({i: lost_W})
        return lost_W

    return probe_of(compressor, ps_W, lost, ctx, workers)


def probe_of(
    compressor: Compressor, ps_W: Sequence[Tensor], lost: Callable[[int], Tensor], ctx: Context, workers: int
) -> Probed:
    """Return the probe of inputs [W, ...] whose compression error p - C(p) `lost` returns by index."""
    pairs = zip(ctx.specs, ctx.levels, strict=True)
    sizes = [[f(compressor, s, level, workers) for f in (payload_bytes, wire_bytes)] for s, level in pairs]
    found = []
    for i, p_W in enumerate(ps_W):
        lost_W = lost(i)
        part, whole = (in_rows(x_W).double().square().sum(1) for x_W in (lost_W, p_W))
        sent_norm = (p_W[0] - lost_W[0]).double().norm()
        error = torch.where(whole > 0, part / whole.clamp_min(1e-300), 0).mean()
        found.append(torch.stack([part[0], whole[0].sqrt(), sent_norm, error, part.sum(), whole.sum()]))
    numbers = torch.stack(found).tolist() if found else []  # of all tensors in one copy to the host
    measured = [Measured(row[0], row[1], row[2], wire) for row, (_, wire) in zip(numbers, sizes, strict=True)]
    errors = [row[3] for row in numbers]
    all_lost, everything = (sum(row[column] for row in numbers) for column in (4, 5))
    total = all_lost / everything if everything else 0.0
    return Probed(errors, total, [payload for payload, _ in sizes], measured)


def buckets_of(compressor: Compressor, xs_W: Sequence[Tensor], ctx: Context) -> list[list[Buckets]] | None:
    """Return the normalised buckets of each local worker's tensors, for policies that fit codebooks; None = none."""
    of = compressor.description.buckets_of
    found: list[list[Buckets]] | None = of(compressor, xs_W, ctx) if of else None
    return found


def alone(xs_W: Sequence[Tensor]) -> Comm:
    """Return a communicator of only the workers of tensors [W, ...]."""
    return Comm(xs_W[0].shape[0] if xs_W else 1, device=str(xs_W[0].device) if xs_W else "cpu")
