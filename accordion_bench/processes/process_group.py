"""Process group of torch.distributed: initialisation, destruction, error state and network interface."""

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

# The default, 3, ends the process by SIGABRT before any process can report an error. 2 aborts only what hangs, and the
# next collective raises. TORCH_NCCL_BLOCKING_WAIT would raise sooner, but slows down each step.
HANDLING, NO_ABORT = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"), "2"
TIMED_OUT = "NCCL operation timed out"
LOST = "NCCL communicator failed: a remote process has exited, or the link to it is cut"


def join(where: Placement, store: SealedStore, timeout: float) -> None:
    """Initialise the process group. The store entries of gloo and NCCL are not sealed.

    Args:
        where: placement, with this process's rank.
        store: store of the run, shared by all processes.
        timeout: comm.timeout, seconds.

    Raises:
        ConfigError: with NCCL, another process of the run uses the same GPU.
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
    """Return the error found by NCCL's watchdog, as a message that `watchdog` recognises; "" = none.

    After an error the group's collectives end with undefined results, until one of them raises.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() != "nccl":
        return ""
    with contextlib.suppress(RuntimeError, ValueError, AttributeError):  # being destroyed, or unsupported
        found = dist.group.WORLD._get_backend(torch.device("cuda")).get_error().name  # type: ignore[union-attr]
        return {"SUCCESS": "", "TIMEOUT": TIMED_OUT}.get(found, LOST)
    return ""


def leave(failed: bool = False) -> None:
    """Destroy the process group, if any. Errors due to a failed member are suppressed.

    Args:
        failed: whether this process failed. NCCL's group is then aborted, because destroying it would wait for pending
            collectives that never end.
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
    """Context with the variables of `settings`: network interface, and error handling of NCCL.

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
    """Return the environment variables to set for gloo and NCCL.

    Args:
        interface: name of the network interface. None = as set in the environment; otherwise the loopback if all
            processes are on this machine, which opens no port to the network; otherwise the choice of gloo and NCCL.
        environ: environment of this process.

    Raises:
        ConfigError: the loopback is required but down.
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
