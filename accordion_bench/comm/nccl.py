"""NCCL: how its groups are made."""

import datetime
from typing import Any

import torch.distributed as dist


def options(timeout: datetime.timedelta | None) -> Any:
    """Options of one group of NCCL: its kernels go first, so that an exchange beside the backward pass is not last.

    New ones for each group, because torch writes the group's name into them.

    Args:
        timeout: of the group's collectives; None = torch's own.
    """
    chosen = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        chosen._timeout = timeout  # torch warns where they say something else than the group
    return chosen
