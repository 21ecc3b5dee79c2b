"""What each worker held back, shared out among another number of workers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.attaching.attachment import Attachment

State = dict[str, Any]


def shared_anew(attachment: Attachment, owns: Sequence[State]) -> State:
    """This worker's share: the mean of what all held back, so that the mean over the workers stays what it was.

    Args:
        attachment: of the worker that goes on.
        owns: what belonged to each of the workers before, in their order.
    """
    comm, first = attachment.comm, owns[0]
    exchanges = {place.name: place.exchange for place in attachment.sync.exchanges()}
    kept = {}
    for name in first["exchange_states"]:
        held = exchanges[name].state
        shares = exchanges[name].compressor.shared_anew(
            [own["exchange_states"][name] for own in owns], comm.rank, comm.workers
        )
        kept[name] = {tensor: entries for tensor, entries in shares.items() if tensor in held}
    of_all = {name for name in first["signals"] if all(name in own["signals"] for own in owns)}
    means = mean_of([{**own, "signals": {name: own["signals"][name] for name in of_all}} for own in owns])
    if comm.leader:  # what only the leader has summed
        means |= {"signals": first["signals"] | means["signals"], "recent": first["recent"]}
    else:
        means |= {"recent": []}
    return means | {"exchange_states": kept}


def mean_of(values: Sequence[Any]) -> Any:
    """The mean of tensors of floats, within containers, too; of anything else the first."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: mean_of([value[key] for value in values]) for key in first}
    if isinstance(first, Tensor) and first.is_floating_point() and all(v.shape == first.shape for v in values):
        return torch.stack([value.double() for value in values]).mean(0).to(first.dtype)
    return first
