"""What belongs to a device: its name, streams, NCCL's messages, copies on the CPU.

Streams: queues of a GPU, what of one must wait for what of another, and whose memory is still in use.

The only room that touches torch.cuda's streams. A CPU runs everything in order: there all of this does nothing.
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
    """The model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def gpu_models() -> list[str]:
    """The models of all GPUs that this process sees."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def nccl_options(timeout: datetime.timedelta | None) -> Any:
    """Options of one group of NCCL: its kernels go first, so that an exchange beside the backward pass is not last.

    New ones for each group, because torch writes the group's name into them.

    Args:
        timeout: of the group's collectives; None = torch's own.
    """
    chosen = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        chosen._timeout = timeout  # torch warns where they say something else than the group
    return chosen


def nccl_sub_group_options(timeout: datetime.timedelta | None) -> dict[str, Any]:
    """What `new_group` is told beside; nothing where the default group is not NCCL's.

    torch splits it off the default group at once, since that is bound to its GPU.

    Args:
        timeout: as for `nccl_options`.
    """
    over_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return {"pg_options": nccl_options(timeout)} if over_nccl else {}


class Streams:
    """The streams of a device; of a CPU, which has none."""

    def use_device(self) -> None:
        """This thread works on the device; else it would open another one's context."""

    def new(self, urgent: bool = False) -> Any:
        """One more stream; of what waits on the device, urgent work goes first."""
        return None

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """What this thread tells the device in here goes to this stream."""
        return contextlib.nullcontext()

    def record(self) -> Any:
        """An event: when the device has done what this thread's stream was told so far."""
        return None

    def wait(self, event: Any) -> None:
        """What this thread's stream is told from here on begins after an event; the host does not wait."""

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """This thread's stream uses tensors of another one's memory, which is not given away before that is done."""


class CudaStreams(Streams):
    """The streams of one GPU.

    Args:
        device: which.
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
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else Streams()


def copy_on_cpu(x: Tensor) -> Tensor:
    """A copy that does not change; of a device's tensor without a second one on the device."""
    return x.detach().to("cpu", copy=True)


@torch.no_grad()
def restore_(x: Tensor, saved: Tensor) -> None:
    """x <- a saved copy of it. Of another shape it is none: `copy_` would spread one number over all of x.

    Raises:
        ValueError: it has another shape.
    """
    if saved.shape != x.shape:
        raise ValueError(f"a tensor has the shape {list(saved.shape)} where {list(x.shape)} belongs")
    x.copy_(saved)
