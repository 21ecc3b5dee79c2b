"""Support of torch's GradScaler: all workers skip a step together, and exchange unscaled gradients."""

from typing import Any

import torch

from accordion_bench.attaching.attachment import Attachment
from accordion_bench.tensors.real_view import as_real


@torch.no_grad()
def exchange_after_unscaling(scaler: torch.amp.GradScaler, attachment: Attachment) -> None:
    """Replace `scaler.unscale_` by a function that agrees on overflows between workers, then exchanges.

    `scaler.step` calls `unscale_` unless the loop has called it. If the gradients of any worker overflow, those of all
    workers count as overflowed: nothing is exchanged, and the scalers of all workers skip the step and lower the scale.
    After `unscale_`, gradients are the exchanged ones and may be clipped. With several optimizers the first call
    unscales all.

    Args:
        scaler: the user's scaler.
        attachment: attachment of the optimizers that the scaler steps.
    """
    unscale = scaler.unscale_
    unscaled: list[Any] = []  # optimizers unscaled with the first one, whose own calls follow

    def agree_then_exchange(optimizer: Any) -> None:
        ours = attachment.inner.all
        if not attachment.attached or optimizer not in ours or not scaler.is_enabled():
            unscale(optimizer)
            return
        if optimizer in unscaled:
            unscaled.remove(optimizer)
            return
        overflow = _any_overflow(attachment)
        for each in ours:
            unscale(each)
        unscaled[:] = [each for each in ours if each is not optimizer]
        if overflow:
            attachment.skip_step()
        else:
            attachment.join()

    def undo() -> None:
        if scaler.unscale_ is agree_then_exchange:  # otherwise it was replaced again, and calls this function
            scaler.unscale_ = unscale  # type: ignore[method-assign]

    scaler.unscale_ = agree_then_exchange  # type: ignore[method-assign]
    attachment.when_detached(undo)


@torch.no_grad()
def _any_overflow(attachment: Attachment) -> bool:
    """Return whether gradients of any worker are non-finite; make those of this worker non-finite, too."""
    gradients = [as_real(param.grad) for param in attachment.axis.params if param.grad is not None]
    found = torch.zeros((), device=attachment.comm.device)
    if gradients:
        found = (~torch.stack(torch._foreach_norm(gradients, float("inf"))).isfinite().all()).float()
    overflow = bool(attachment.comm.sum_(found, "control"))
    if overflow:
        for optimizer in attachment.inner.all:  # the scaler checks each separately
            held = (param.grad for group in optimizer.param_groups for param in group["params"])
            if (gradient := next((g for g in held if g is not None), None)) is not None:
                gradient.fill_(float("inf"))
    return overflow
