"""How the forward pass is executed: in which precision, and compiled by which backend."""

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


def compiled(model: nn.Module, backend: str | None) -> Any:
    """What is called in the place of the model: compiled in the first step, and for every size of batch anew.

    Buffers and parameters are read from the model in every call, so that workers may put their own there. The gradients
    of one graph come together, at the end of its backward pass: less of an exchange is hidden behind it.
    """
    return model if backend is None else torch.compile(model, backend=backend)


def refuse_backend(backend: str, task: str, device: str) -> None:
    """Refuse what cannot be compiled here.

    Args:
        backend: the option `compile`.
        task: `images` or `text`.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: with what to type instead.
    """
    if task == "text":
        rule = "null for a language model, because torch.compile leaves recurrent layers as they are"
        raise ConfigError(f"compile must be {rule}, got {backend}; type compile=null")
    if backend != "inductor":
        return
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if device == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(f"compile=inductor needs a C++ compiler, got no {compiler} here; type compile=null")
    if device == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError("compile=inductor needs the package triton on a GPU, got none here; type compile=null")
