"""Engines to compare with the reference, and tensors where they take them."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from accordion_bench.codecs import engines
from accordion_bench.codecs.engine import Engine, OnDevice
from accordion_bench.conformance.pretend_device import DEVICE, pretended
from accordion_bench.tensors import kernels
from tests.kit.gpu import gpu_for_triton


@dataclass
class There:
    """An engine, and where its tensors are."""

    engine: Engine
    device: torch.device

    def to(self, x: Any) -> Any:
        """A tensor, or several, there; None stays."""
        if isinstance(x, Tensor):
            return x.to(self.device)
        return x if x is None else [self.to(one) for one in x]


@pytest.fixture
def numba():
    """The engine of a CPU."""
    if not kernels.installed():
        pytest.skip("numba is not installed")
    yield There(engines._on_cpu(), torch.device("cpu"))


@pytest.fixture
def device():
    """Torch's own way on a device, which is pretended."""
    with pretended():
        yield There(OnDevice(), DEVICE)


@pytest.fixture(params=["numba", "device"])
def there(request):
    """One after the other."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def triton():
    """By Triton, which is slow without a GPU."""
    with gpu_for_triton() as gpu:
        yield There(engines._on_gpu(), gpu.device)
