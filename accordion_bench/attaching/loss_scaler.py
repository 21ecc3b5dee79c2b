"""torch's GradScaler beside an exchange: all workers skip a step together, and exchange gradients without the scale."""

from typing import Any

import torch

from accordion_bench.attaching.attachment import Attachment
from accordion_bench.tensors.real_view import as_real


@torch.no_grad()
def exchange_after_unscaling(scaler: torch.amp.GradScaler, attachment: Attachment) -> None:
    """Let `scaler.unscale_`, which `scaler.step` calls unless the loop has, agree on an overflow and then exchange.

    Where any worker's gradients overflow, those of all count as overflowed: nothing is exchanged, and the scaler skips
    the step and lowers the scale on all of them. After `unscale_`, gradients are the exchanged ones and may be clipped.
    Of several optimizers the first call unscales all.

    Args:
        scaler: the user's.
        attachment: of the optimizers that the scaler steps.
    """
    unscale = scaler.unscale_
    unscaled: list[Any] = []  # with the first of several; their own calls are still to come

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
        if scaler.unscale_ is agree_then_exchange:  # else it was replaced after us, and calls us
            scaler.unscale_ = unscale  # type: ignore[method-assign]

    scaler.unscale_ = agree_then_exchange  # type: ignore[method-assign]
    attachment.when_detached(undo)


@torch.no_grad()
def _any_overflow(attachment: Attachment) -> bool:
    """Whether any worker's gradients are not finite; then this one's are not either."""
    gradients = [as_real(param.grad) for param in attachment.axis.params if param.grad is not None]
    found = torch.zeros((), device=attachment.comm.device)
    if gradients:
        found = (~torch.stack(torch._foreach_norm(gradients, float("inf"))).isfinite().all()).float()
    overflow = bool(attachment.comm.sum_(found, "control"))
    if overflow:
        for optimizer in attachment.inner.all:  # the scaler looks at each by itself
            held = (param.grad for group in optimizer.param_groups for param in group["params"])
            if (gradient := next((g for g in held if g is not None), None)) is not None:
                gradient.fill_(float("inf"))
    return overflow
