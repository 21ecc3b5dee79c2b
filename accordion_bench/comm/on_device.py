"""Device-specific functions: names, CUDA streams and events, options of NCCL, copies to the CPU.

This is the only module that uses streams of torch.cuda. On a CPU, which executes in order, all stream methods are
no-ops.
"""

import contextlib
import datetime
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def processor_name() -> str:
    """Return the model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def gpu_models() -> list[str]:
    """Return the models of all GPUs visible to this process."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def nccl_options(timeout: datetime.timedelta | None) -> Any:
    """Return options of one NCCL group: a high-priority stream, for exchanges that overlap the backward pass.

    Each group needs a new object, because torch writes the group's name into it.

    Args:
        timeout: timeout of the group's collectives; None = torch's default.
    """
    chosen = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        chosen._timeout = timeout  # torch warns if it differs from that of the group
    return chosen


def nccl_sub_group_options(timeout: datetime.timedelta | None) -> dict[str, Any]:
    """Return keyword arguments of `new_group`; {} if the default group does not use NCCL.

    torch splits the new group from the default group eagerly, because that is bound to its GPU.

    Args:
        timeout: see `nccl_options`.
    """
    over_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return {"pg_options": nccl_options(timeout)} if over_nccl else {}


class Streams:
    """Stream interface of a device; this class is for CPUs, where all methods are no-ops."""

    def use_device(self) -> None:
        """Select the device for this thread; otherwise it would create a context on another one."""

    def new(self, urgent: bool = False) -> Any:
        """Create a stream, with high priority if `urgent`."""
        return None

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Context in which this thread launches work on a stream."""
        return contextlib.nullcontext()

    def record(self) -> Any:
        """Record and return an event on the current stream of this thread."""
        return None

    def wait(self, event: Any) -> None:
        """Let the current stream of this thread wait for an event; does not block the host."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep the memory of tensors from another stream until the current stream of this thread has used it."""


class CudaStreams(Streams):
    """Streams of one GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def use_device(self) -> None:
        torch.cuda.set_device(self.device)

    def new(self, urgent: bool = False) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device, priority=-1 if urgent else 0)

    def on(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record(self) -> torch.cuda.Event:
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        stream = torch.cuda.current_stream(self.device)
        for x in tensors:
            x.record_stream(stream)


def streams_of(device: torch.device) -> Streams:
    """Return the stream interface of a device."""
    return CudaStreams(device) if device.type == "cuda" else Streams()


def copy_on_cpu(x: Tensor) -> Tensor:
    """Return a copy on the CPU, without a second copy on the device."""
    return x.detach().to("cpu", copy=True)


@torch.no_grad()
def restore_(x: Tensor, saved: Tensor) -> None:
    """x <- saved, with equal shapes, because `copy_` would broadcast.

    Raises:
        ValueError: the shapes differ.
    """
    if saved.shape != x.shape:
        raise ValueError(f"a tensor has the shape {list(saved.shape)} where {list(x.shape)} belongs")
    x.copy_(saved)
