"""torch's GradScaler beside an exchange: all workers skip a step together, and exchange gradients without the scale."""

from typing import Any

import torch

from accordion_bench.attaching.attachment import Attachment


@torch.no_grad()
def exchange_after_unscaling(scaler: torch.amp.GradScaler, attachment: Attachment) -> None:
    """Let `scaler.unscale_`, which `scaler.step` calls unless somebody has, agree on an overflow and then exchange.

    Where any worker's gradients overflow, those of all count as overflowed: nothing is exchanged, and the scaler skips
    the step and lowers the scale on all of them. After `unscale_`, gradients are the exchanged ones and may be clipped.

    Args:
        scaler: the user's.
        attachment: of the optimizer that the scaler steps.
    """
    unscale = scaler.unscale_

    def agree_then_exchange(optimizer: Any) -> None:
        if not attachment.attached or optimizer is not attachment.optimizer or not scaler.is_enabled():
            unscale(optimizer)
            return
        overflow = _any_overflow(attachment)
        unscale(optimizer)
        if overflow:
            attachment.give_up_step()
        else:
            attachment.join()

    def undo() -> None:
        if scaler.unscale_ is agree_then_exchange:  # else somebody has come after us, and calls us
            scaler.unscale_ = unscale  # type: ignore[method-assign]

    scaler.unscale_ = agree_then_exchange  # type: ignore[method-assign]
    attachment.when_detached(undo)


@torch.no_grad()
def _any_overflow(attachment: Attachment) -> bool:
    """Whether any worker's gradients are not finite; then this one's are not either."""
    gradients = [param.grad for param in attachment.axis.params if param.grad is not None]
    found = torch.zeros((), device=attachment.comm.device)
    if gradients:
        found = (~torch.stack(torch._foreach_norm(gradients, float("inf"))).isfinite().all()).float()
    overflow = bool(attachment.comm.sum_(found, "control"))
    if overflow and gradients:
        gradients[0].fill_(float("inf"))
    return overflow
