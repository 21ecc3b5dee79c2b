"""The process group of torch.distributed: joining, leaving, and the network interface that it uses."""

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping
from typing import Any

from accordion_bench.comm import on_device
from accordion_bench.comm.sealed_store import SealedStore
from accordion_bench.processes import machine
from accordion_bench.processes.listening import loopback
from accordion_bench.processes.placement import Placement, all_here

# 3, the default, ends the process by SIGABRT before any process can say why; 2 ends only what hangs, and the next
# collective raises. Waiting for each collective (TORCH_NCCL_BLOCKING_WAIT) would raise sooner, at a step's cost.
HANDLING, NO_ABORT = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "2"
TIMED_OUT = "NCCL operation timed out"
LOST = "NCCL communicator failed: a remote process has exited, or the link to it is cut"


def join(where: Placement, store: SealedStore, timeout: float) -> None:
    """Join the process group. What gloo and NCCL say to each other in the store bears no seal.

    Args:
        where: the placement; this process's rank in it.
        store: of the run, which all processes share.
        timeout: comm.timeout, seconds.

    Raises:
        ConfigError: over NCCL, another process of the run has the GPU of this one.
    """
    import torch.distributed as dist

    patience = datetime.timedelta(seconds=timeout)
    options: dict[str, Any] = {}
    if where.backend == "nccl":
        device = machine.own_gpu(where.local_rank, machine.gpu_count())
        machine.take_gpu(device)
        machine.refuse_shared_gpu(
            store, where.rank, machine.gpu_identity(machine.gpu_uuid(device), device.index, os.environ)
        )
        options = {"device_id": device, "pg_options": on_device.nccl_options(patience)}
    dist.init_process_group(
        where.backend, store=store.of_torch(), rank=where.rank, world_size=where.processes, timeout=patience, **options
    )


def trouble() -> str:
    """What NCCL's own watchdog has found wrong with the process group, in words that `watchdog` knows; "" = nothing.

    After it the group's collectives end with anything in their tensors, until one of them raises.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() != "nccl":
        return ""
    with contextlib.suppress(RuntimeError, ValueError, AttributeError):  # it is being left, or cannot say
        found = dist.group.WORLD._get_backend(torch.device("cuda")).get_error().name  # type: ignore[union-attr]
        return {"SUCCESS": "", "TIMEOUT": TIMED_OUT}.get(found, LOST)
    return ""


def leave(failed: bool = False) -> None:
    """Leave it, where there is one; one with a failed member may complain, which says nothing new.

    Args:
        failed: whether this process has; NCCL's own way out waits for what is under way, which the others never end.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            if failed and dist.get_backend() == "nccl":
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()


@contextlib.contextmanager
def use_settings(interface: str | None) -> Iterator[None]:
    """Let gloo and NCCL use this network interface, and NCCL tell what goes wrong; both read it from the environment.

    Args:
        interface: as for `settings`.
    """
    chosen = settings(interface, os.environ)
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def settings(interface: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """What gloo and NCCL are to read in the environment, beside what the user has exported.

    Args:
        interface: its name; None: what the environment says, else the loopback where all processes are on this machine,
            so that no port is open to the network without need, else what gloo and NCCL choose.
        environ: of this process.

    Raises:
        ConfigError: they are to speak over the loopback, which is down.
    """
    chosen = {}
    for name, exact in (("GLOO_SOCKET_IFNAME", ""), ("NCCL_SOCKET_IFNAME", "=")):  # eth1 also means eth10 to NCCL
        own = interface
        if interface is None and not environ.get(name) and all_here(environ):
            own = loopback()
        if own is not None:
            chosen[name] = exact + own
    if not any(environ.get(name) for name in HANDLING):
        chosen[HANDLING[0]] = NO_ABORT
    return chosen
