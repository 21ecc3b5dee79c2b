"""Kernels in Triton, on the GPU that is there; without one by Triton's interpreter, on a pretended device."""

import pytest

from tests.kit.gpu import gpu_for_triton


@pytest.fixture
def gpu():
    """See `gpu_for_triton`."""
    with gpu_for_triton() as found:
        yield found
