"""Sparse messages of a bucket on a device: encoded, sent and decoded at once; launches do not grow with the tensors.

Nothing here looks at numbers: NaN and infinity travel as they are, and show in the update.

Tensor suffixes: W local workers, A all workers, R rows, T coordinates, S tensors, K kept entries, B bytes.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Context
from accordion_bench.codecs.section_codes import Layout, SectionCodes
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.base import Exchanged, subtract_
from accordion_bench.compressors.flat_bucket import FlatBucket
from accordion_bench.compressors.oneshot import OneShot


def runs_on_device(xs_W: Sequence[Tensor]) -> bool:
    """Whether a bucket is on a device: then launches cost more than copies."""
    return any(x_W.device.type != "cpu" for x_W in xs_W)


def flattened(compressor: OneShot, ctx: Context, workers: int) -> tuple[FlatBucket, int]:
    """The tensors that are compressed, those whose messages are gathered before the others; and entries of these."""
    pairs = zip(ctx.specs, ctx.levels, strict=True)
    levels = {
        i: level for i, (spec, level) in enumerate(pairs) if level is not None and compressor.compresses(spec, level)
    }
    gathers = {i: compressor.gathers(ctx.specs[i], level, workers) for i, level in levels.items()}
    flat = FlatBucket(sorted(levels, key=lambda i: not gathers[i]), ctx)
    return flat, sum(ctx.specs[i].numel for i in levels if gathers[i])


def encode_values(values_R: Tensor, positions_R: Tensor, codes: SectionCodes) -> Tensor:
    """Values [R, K] and their ascending positions as messages [R, B] of equal size: values first."""
    bytes_R = as_bytes(values_R)
    return torch.cat([bytes_R, codes.encode(positions_R)], dim=1) if positions_R.shape[1] else bytes_R


def decode_values(message_R: Tensor, codes: SectionCodes) -> tuple[Tensor, Tensor]:
    """The inverse of `encode_values`: (values, positions)."""
    kept = sum(codes.kept)
    if not kept:
        return message_R.new_empty(len(message_R), 0).float(), message_R.new_empty(len(message_R), 0).long()
    # a copy, because a row may begin where no float32 does
    values_R = message_R[:, : 4 * kept].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return values_R, codes.decode(message_R[:, 4 * kept :])


def as_bytes(values_R: Tensor) -> Tensor:
    """Numbers as float32 [..., K], as bytes [..., 4 K]."""
    return values_R.float().contiguous().view(torch.uint8)


def codes_apart(sizes: Sequence[int], kept: Sequence[int], device: torch.device) -> SectionCodes:
    """Codes of tensors side by side in a row, each of which is a message of its own."""
    starts = [0, *itertools.accumulate(sizes)][:-1]
    return SectionCodes(Layout(starts, sizes, kept, 1), device)


def add_in_order_(total: Tensor, positions_A: Sequence[Tensor], values_A: Sequence[Tensor]) -> Tensor:
    """total [T] += the values of each worker at their positions.

    One launch for each worker, so that the order of summation is theirs. One launch for all would add in any order, and
    the processes would no longer have equal parameters.
    """
    for positions, values in zip(positions_A, values_A, strict=True):
        total.scatter_add_(0, positions, values.to(total.dtype))
    return total


def read_counts(counts_W: Tensor, gathered: int, comm: Comm) -> tuple[list[list[int]], list[list[int]]]:
    """How many entries are sent, read by the host: the one time that it waits for the device.

    Args:
        counts_W: entries of each tensor [W, S].
        gathered: so many tensors, from the first one on, are gathered.
        comm: collectives; the counts travel as `Comm.all_gather_sizes` sends sizes, 4 bytes each.

    Returns:
        of the local workers [W, S]; of all workers, of what is gathered [A, S].
    """
    own_W = counts_W.int()
    if not gathered:
        return own_W.tolist(), []
    message_A = comm.all_gather(own_W[:, :gathered].contiguous().view(torch.uint8))
    numbers = torch.cat([own_W.flatten(), message_A.contiguous().view(torch.int32).flatten()]).tolist()
    own, everyones = numbers[: own_W.numel()], numbers[own_W.numel() :]
    return _rows(own, counts_W.shape[1]), _rows(everyones, gathered)


def _rows(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]


def gather_uneven(
    heads_W: Sequence[Tensor],
    positions_W: Sequence[Tensor],
    starts: Sequence[int],
    sizes: Sequence[int],
    counts_A: Sequence[Sequence[int]],
    head_bytes: Callable[[int], int],
    comm: Comm,
) -> tuple[list[Tensor], list[Tensor]]:
    """Every worker's entries, on every worker, where everybody knows how many they are.

    Args:
        heads_W: the first bytes of each local worker's message.
        positions_W: its entries, ascending.
        starts, sizes: of the tensors.
        counts_A: entries of each tensor, of all workers.
        head_bytes: called with the entries of a worker, gives the size of its first bytes.
        comm: collectives.

    Returns:
        heads and positions of all workers.
    """

    def codes_of(counts: Sequence[Sequence[int]]) -> SectionCodes:
        times = len(counts)
        layout = Layout(list(starts) * times, list(sizes) * times, [k for own in counts for k in own], len(sizes))
        return SectionCodes(layout, device)

    device = heads_W[0].device
    own, all_ = codes_of([counts_A[a] for a in comm.local]), codes_of(counts_A)
    heads = [head_bytes(kept) for kept in all_.kept]
    codes_W = [heads_W[0].new_empty(0)] * len(heads_W)
    if own.layout.total:
        codes_W = list(own.encode(torch.cat(list(positions_W))[None])[0].split(own.nbytes))
    messages_W = [torch.cat(parts) for parts in zip(heads_W, codes_W, strict=True)]
    sizes_A = [head + nbytes for head, nbytes in zip(heads, all_.nbytes, strict=True)]
    messages_A = comm.all_gather_uneven(messages_W, sizes_A)
    heads_A = [message[:head] for message, head in zip(messages_A, heads, strict=True)]
    if not all_.layout.total:
        return heads_A, [torch.empty(0, dtype=torch.int64, device=device)] * comm.workers
    codes = torch.cat([message[head:] for message, head in zip(messages_A, heads, strict=True)])
    return heads_A, list(all_.decode(codes[None])[0].split(all_.kept))


def exchanged(
    xs_W: Sequence[Tensor],
    flat: FlatBucket,
    gathered: int,
    own_rows: Callable[[], Tensor],
    summed: Callable[[], Tensor],
    comm: Comm,
) -> Exchanged:
    """The exchange of a bucket, of which some tensors are sparse.

    Args:
        xs_W: the bucket's tensors [W, ...].
        flat: those that are sparse; the first of them are gathered, the others are sent as they would be decoded.
        gathered: entries [T] of those that are gathered, from the first one on.
        own_rows: what the local workers send, decoded: [W, T].
        summed: gathers; gives the sum [T] over all workers of what is gathered.
        comm: collectives.
    """
    own_rows = functools.cache(own_rows)  # for several who subtract
    update: list[Tensor] = [xs_W[0]] * len(xs_W) if xs_W else []
    sparse, later = set(flat.ids), []
    if gathered < flat.total:
        parts_W = own_rows().split(flat.sizes, dim=1)
        later = [
            (i, part_W) for i, part_W, start in zip(flat.ids, parts_W, flat.starts, strict=True) if start >= gathered
        ]
    whole = [(i, x_W) for i, x_W in enumerate(xs_W) if i not in sparse] + later
    means = comm.all_reduce_mean([x_W for _, x_W in whole])
    for (i, _), mean in zip(whole, means, strict=True):
        update[i] = mean.view(xs_W[i].shape[1:])
    if gathered:
        mean = summed().div_(comm.workers)
        pieces = zip(flat.ids, flat.starts, flat.sizes, flat.shapes, strict=True)
        for i, start, size, shape in [piece for piece in pieces if piece[1] < gathered]:
            update[i] = mean[start : start + size].view(shape)

    def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
        subtract_({i: target_W for i, target_W in targets_W.items() if i not in sparse}, xs_W)
        if sparse & targets_W.keys():
            flat.add_(targets_W, own_rows(), -1.0)

    return Exchanged(update, subtract_sent_)


def scattered(positions_W: Sequence[Tensor], values_W: Sequence[Tensor], total: int, dtype: torch.dtype) -> Tensor:
    """Rows [W, T] that are 0 but for the values of each worker at their positions."""
    rows_W = torch.zeros(len(positions_W), total, dtype=dtype, device=positions_W[0].device)
    for row, positions, values in zip(rows_W, positions_W, values_W, strict=True):
        row.scatter_(0, positions, values.to(dtype))
    return rows_W
