"""The process group of torch.distributed: joining, leaving, and the network interface that it uses."""

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

from accordion_bench.processes.placement import Placement


def join(where: Placement, store: Any, timeout: float) -> None:
    """Join the process group.

    Args:
        where: the placement; this process's rank in it.
        store: torch.distributed store that all processes share.
        timeout: comm.timeout, seconds.
    """
    import torch.distributed as dist

    patience = datetime.timedelta(seconds=timeout)
    dist.init_process_group(where.backend, store=store, rank=where.rank, world_size=where.processes, timeout=patience)


def leave() -> None:
    """Leave it, where there is one; one with a failed member may complain, which says nothing new."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


@contextlib.contextmanager
def use_interface(interface: str | None) -> Iterator[None]:
    """Let gloo and NCCL use this network interface; None: what they choose, or what the environment says."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(interface)))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
