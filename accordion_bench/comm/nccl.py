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


def of_sub_group(timeout: datetime.timedelta | None) -> dict[str, Any]:
    """What `new_group` is told beside; nothing where the default group is not NCCL's.

    torch splits it off the default group at once, since that is bound to its GPU.

    Args:
        timeout: as for `options`.
    """
    over_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return {"pg_options": options(timeout)} if over_nccl else {}
