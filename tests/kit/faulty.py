"""A network that fails in ways that `tests.kit.tiny.Net` does not know."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tests.kit import tiny


class Net(tiny.Net):
    """FAULT=KIND:RANK:COUNT[:FILE]: a fault in the COUNTth training forward of a rank, or in its backward pass.

    KIND: backward (raise in the backward pass), hang (forever), kill (the process itself). With FILE, the fault occurs
    only if the file does not exist, and creates it.
    """

    def trouble(self, y: Tensor) -> Tensor:
        y = super().trouble(y)
        kind, rank, at, *once = os.environ.get("FAULT", "none:0:0").split(":")
        if self.count != int(at) or int(rank) != (dist.get_rank() if dist.is_initialized() else 0):
            return y
        if once:
            if Path(once[0]).exists():
                return y
            Path(once[0]).touch()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            time.sleep(3600)
        return Fails.apply(y) if kind == "backward" else y


class Fails(torch.autograd.Function):
    """Identity whose backward pass raises."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        raise ValueError("boom in backward")
