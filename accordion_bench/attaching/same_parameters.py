"""Whether all workers have the same parameters: whatever pulls them apart, they are told before long."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.options.checks import ConfigError
from accordion_bench.tensors.real_view import as_real

log = logging.getLogger("accordion_bench")
ROUNDING = 1e-4  # of the norm: processors of several kinds may round an optimizer's step differently


def is_due(step: int) -> bool:
    """Whether parameters are compared after so many steps: 1, 10, 100, and every thousandth."""
    return step in (1, 10, 100) or step % 1000 == 0


@torch.no_grad()
def refuse_drift(comm: Comm, values: Sequence[Tensor], step: int, tell: bool = True) -> bool:
    """Compare parameters; 8 control bytes where they are equal. All processes call it.

    Args:
        comm: of all workers.
        values: the parameters of this one.
        step: how many have been taken, for the sentence.
        tell: the leader warns of rounding.

    Returns:
        whether they differ, by no more than rounding.

    Raises:
        ConfigError: they differ by more.
    """
    if comm.same(checksum(values)):
        return False
    first = [value.clone(memory_format=torch.contiguous_format) for value in values]
    comm.broadcast_(first, "control")
    away = torch.stack([(a.double() - b.double()).square().sum() for a, b in zip(values, first, strict=True)]).sum()
    size = torch.stack([b.double().square().sum() for b in first]).sum()
    apart = [float(d) for d in comm.everyones(float((away / size).sqrt()))]
    rank = max(range(len(apart)), key=lambda r: apart[r] if apart[r] == apart[r] else float("inf"))
    if not apart[rank] <= ROUNDING:
        raise ConfigError(
            f"parameters must be the same on all ranks, got ones that differ by {apart[rank]:.2g} of their norm on "
            f"ranks 0 and {rank} after step {step}; change or load them alike on all, or before ab.attach"
        )
    if comm.leader and tell:
        log.warning(
            "the parameters of rank %d differ from rank 0's by %.1e of their norm after step %d, as rounding of "
            "different processors would have it; gradients are still exchanged",
            *(rank, apart[rank], step),
        )
    return True


def checksum(values: Sequence[Tensor]) -> int:
    """Of the bits of some tensors."""
    sums = []
    for value in values:
        bits = as_real(value.detach()).contiguous().view(-1).view(torch.uint8)
        wide = bits.view(torch.int32) if bits.numel() % 4 == 0 else bits
        sums.append(wide.sum(dtype=torch.int64))
    return int(torch.stack(sums).sum())
