"""torch.compile of the forward pass in training, and what it needs."""

import importlib.util
import os
import shutil
import sys
from typing import Any

import torch
from torch import nn

from accordion_bench.options.checks import ConfigError


def compiled(model: nn.Module, backend: str | None) -> Any:
    """What is called in the place of the model: compiled in the first step, and for every size of batch anew.

    Buffers and parameters are read from the model in every call, so that workers may put their own there. The gradients
    of one graph come together, at the end of its backward pass: less of an exchange is hidden behind it.
    """
    return model if backend is None else torch.compile(model, backend=backend)


def refuse(backend: str, task: str, device: str) -> None:
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
