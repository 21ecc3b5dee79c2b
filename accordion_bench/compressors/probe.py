"""Probe the bytes and the error of a level, and the buckets of a quantiser, without communication."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Context
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, State
from accordion_bench.compressors.sizes import payload_bytes, wire_bytes
from accordion_bench.plan import Measured
from accordion_bench.tensors.same_shape import in_rows


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


def moments(buckets: Sequence[Buckets]) -> Tensor:
    """Return norm, mean and standard deviation of r of every bucket with a norm above 0: [B, 3]."""
    table = bucket_table(buckets)
    norms, mean, spread, count = table[table[:, 0] > 0].unbind(1)
    return torch.stack([norms, mean, (spread / (count - 1).clamp_min(1)).sqrt()], dim=1)


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
    buckets: per local worker, norm, mean and standard deviation of the normalised coordinates of every bucket, [B, 3];
        empty for methods without a codebook.
    measured: per tensor, error, norms and bytes of the first local worker.
    """

    error: list[float]
    total_error: float
    payload_bytes: list[float]
    buckets: list[Tensor]
    measured: list[Measured]


@torch.no_grad()
def probe(compressor: Compressor, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probed:
    """Return error and bytes at the levels of `ctx`; changes no state and does not communicate.

    Args:
        compressor: in its wrappers.
        xs_W: tensors [W, ...] of the local workers, whose error is measured.
        ctx, state: as for `exchange`; the state is not changed.
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
    """Return the probe of inputs whose compression error is known.

    Args:
        compressor: whose messages are counted.
        ps_W: inputs [W, ...], per tensor.
        lost: called with each index, returns p - C(p) [W, ...].
        ctx: the levels.
        workers: of the whole run.
    """
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
    buckets = [moments(own) for own in buckets_of(compressor, ps_W, ctx) or []]
    return Probed(errors, total, [payload for payload, _ in sizes], buckets, measured)


def buckets_of(compressor: Compressor, xs_W: Sequence[Tensor], ctx: Context) -> list[list[Buckets]] | None:
    """Return the normalised buckets of each local worker's tensors, for policies that fit codebooks; None = none."""
    of = compressor.description.buckets_of
    found: list[list[Buckets]] | None = of(compressor, xs_W, ctx) if of else None
    return found


def alone(xs_W: Sequence[Tensor]) -> Comm:
    """Return a communicator of only the workers of tensors [W, ...]."""
    return Comm(xs_W[0].shape[0] if xs_W else 1, device=str(xs_W[0].device) if xs_W else "cpu")
