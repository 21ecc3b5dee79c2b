"""Mixed precision (autocast and loss scaling) and torch.compile of the forward pass."""

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accordion_bench.options.checks import ConfigError

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF = ("bfloat16", "float16")
INITIAL, INTERVAL = 2.0**16, 2000


def autocast(precision: str | None, device: torch.device) -> contextlib.AbstractContextManager:
    """Return the autocast context for forward pass and loss; None = float32."""
    if precision in (None, "float32"):
        return contextlib.nullcontext()
    return torch.autocast(device.type, PRECISIONS[str(precision)])


class LossScale:
    """Dynamic loss scale S: gradients of S x loss, divided by S; S/2 after an overflow, 2S after 2,000 steps without.

    The rule equals that of `torch.amp.GradScaler`, which takes gradients from an optimizer and not from rows of
    workers. All workers decide together, so that S is equal on all of them.

    Attributes:
        value: S, a power of 2.
        good_steps: number of steps since S last changed.
        skipped: number of steps of the run that were skipped because of an overflow.
    """

    def __init__(self) -> None:
        self.value, self.good_steps, self.skipped = INITIAL, 0, 0

    def undo_(self, gradients_W: Sequence[Tensor]) -> Tensor:
        """Divide gradients by S in place; return 1 if one of them is not finite, otherwise 0."""
        torch._foreach_mul_(list(gradients_W), 1 / self.value)
        largest = torch.stack(torch._foreach_norm(list(gradients_W), float("inf")))
        return (~largest.isfinite().all()).float()

    def update(self, overflow: bool) -> None:
        """Update S after a step was taken, or skipped because of an overflow."""
        self.good_steps = 0 if overflow else self.good_steps + 1
        self.skipped += overflow
        if overflow:
            self.value /= 2
        elif self.good_steps == INTERVAL:
            self.value, self.good_steps = 2 * self.value, 0

    def columns(self) -> dict[str, Any]:
        """Return the columns of a metrics row."""
        return {"loss_scale": self.value, "skipped_steps": self.skipped}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        kept = {"value": self.value, "good_steps": self.good_steps, "skipped": self.skipped}
        return {"loss_scale": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        kept = state["loss_scale"]
        self.value, self.good_steps, self.skipped = kept["value"], kept["good_steps"], kept["skipped"]


def compiled(model: nn.Module, backend: str | None) -> Any:
    """Return the callable model: compiled in the first step, and again for each batch size.

    Buffers and parameters are read from the model in every call, so that workers may replace them. The gradients of a
    graph become available together at the end of its backward pass, so that less of an exchange overlaps with it.
    """
    return model if backend is None else torch.compile(model, backend=backend)


def refuse_backend(backend: str, task: str, device: str) -> None:
    """Refuse a backend with which a model of this task cannot be compiled on `cpu` or `cuda` of this machine."""
    if task == "text":
        rule = "null for a language model, because torch.compile does not compile recurrent layers"
        raise ConfigError(f"compile must be {rule}, got {backend}; type compile=null")
    if backend != "inductor":
        return
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(f"compile=inductor needs a C++ compiler, got no {compiler} here; type compile=null")
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError("compile=inductor needs the package triton on a GPU, got none here; type compile=null")
