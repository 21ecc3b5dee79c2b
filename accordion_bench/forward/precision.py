"""Mixed precision: forward and loss in 16 bits where autocast does so; parameters, gradients and exchanges in 32."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF = ("bfloat16", "float16")
INITIAL, INTERVAL = 2.0**16, 2000


def autocast(precision: str | None, device: torch.device) -> contextlib.AbstractContextManager:
    """Around forward pass and loss; null is float32."""
    if precision in (None, "float32"):
        return contextlib.nullcontext()
    return torch.autocast(device.type, PRECISIONS[str(precision)])


class LossScale:
    """Dynamic loss scale S: gradients of S x loss, divided by S; S/2 after an overflow, 2S after 2,000 steps without.

    The rule is that of `torch.amp.GradScaler`, whose methods find gradients in an optimizer, not in rows of workers.
    All workers decide together, so that S is the same on all of them.

    Attributes:
        value: S, a power of 2.
        good_steps: since S has changed.
        skipped: steps of the run that were not taken because of an overflow.
    """

    def __init__(self) -> None:
        self.value, self.good_steps, self.skipped = INITIAL, 0, 0

    def undo_(self, gradients_W: Sequence[Tensor]) -> Tensor:
        """Divide gradients by S; returns 1 where one of them is not finite, else 0."""
        torch._foreach_mul_(list(gradients_W), 1 / self.value)
        largest = torch.stack(torch._foreach_norm(list(gradients_W), float("inf")))
        return (~largest.isfinite().all()).float()

    def update(self, overflow: bool) -> None:
        """After a step that was taken, or was not because of an overflow."""
        self.good_steps = 0 if overflow else self.good_steps + 1
        self.skipped += overflow
        if overflow:
            self.value /= 2
        elif self.good_steps == INTERVAL:
            self.value, self.good_steps = 2 * self.value, 0

    def columns(self) -> dict[str, Any]:
        """Of a metrics row."""
        return {"loss_scale": self.value, "skipped_steps": self.skipped}

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        kept = {"value": self.value, "good_steps": self.good_steps, "skipped": self.skipped}
        return {"loss_scale": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        kept = state["loss_scale"]
        self.value, self.good_steps, self.skipped = kept["value"], kept["good_steps"], kept["skipped"]
