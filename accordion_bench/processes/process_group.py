"""The process group of torch.distributed: joining, leaving, and the network interface that it uses."""

import contextlib
import datetime
import os
import socket
from collections.abc import Iterator

from accordion_bench.processes.listening import LOOPBACK
from accordion_bench.processes.placement import Placement, all_here
from accordion_bench.processes.sealed_store import SealedStore


def join(where: Placement, store: SealedStore, timeout: float) -> None:
    """Join the process group. What gloo and NCCL say to each other in the store bears no seal.

    Args:
        where: the placement; this process's rank in it.
        store: of the run, which all processes share.
        timeout: comm.timeout, seconds.
    """
    import torch.distributed as dist

    patience = datetime.timedelta(seconds=timeout)
    dist.init_process_group(
        where.backend, store=store.of_torch(), rank=where.rank, world_size=where.processes, timeout=patience
    )


def leave() -> None:
    """Leave it, where there is one; one with a failed member may complain, which says nothing new."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


@contextlib.contextmanager
def use_interface(interface: str | None) -> Iterator[None]:
    """Let gloo and NCCL use this network interface.

    Args:
        interface: its name; None: what the environment says, else the loopback where all processes are on this machine,
            so that nobody listens to the network for nothing, else what gloo and NCCL choose.
    """
    names = {name: interface for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    if interface is None:
        names = {name: loopback() for name in names if all_here(os.environ) and not os.environ.get(name)}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: chosen for name, chosen in names.items() if chosen is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def loopback() -> str | None:
    """The name of the interface that leads to this machine alone, where it is up; macOS calls it lo0."""
    with contextlib.suppress(OSError), socket.create_server((LOOPBACK, 0)):
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return None
