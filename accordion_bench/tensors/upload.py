"""From the host to a device."""

from torch import Tensor, device


def upload(x: Tensor, to: device) -> Tensor:
    """A tensor of the CPU on a device; on the CPU itself, uncopied. Nobody waits: it goes through pinned memory."""
    return x if to.type == "cpu" else x.pin_memory().to(to, non_blocking=True)


def table(x: Tensor, to: device) -> Tensor:
    """The same for a tensor that is kept: the host waits, once, since any stream may read it from now on."""
    return x.to(to)
