"""The exchanges on fake CUDA tensors, which have a type, a shape and a device, and no numbers.

Torch refuses two devices in one operation here, too, and whatever a host could only know by waiting for numbers.
"""

import functools
import gc

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from accordion_bench import conformance
from accordion_bench.codecs.coding import FORMATS
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors import number_formats, sparse
from accordion_bench.conformance.subject import SPECS, Setup
from accordion_bench.tensors.kernels import on_gpu
from scripts.echo import echoed
from tests.kit.helpers import yaml_names

WAITING = {"adacomp", "dgc", "threshold"}  # without kernels the host waits for the number of their entries
DEVICE = "cuda:7"  # of its own: what is remembered by device is fake, too


@pytest.fixture(autouse=True)
def forgetful():
    """What is remembered between calls knows no fake tensors, before and after."""

    def forget() -> None:
        for found in gc.get_objects():
            if type(found) is functools._lru_cache_wrapper and str(found.__module__).startswith("accordion_bench"):
                found.cache_clear()

    forget()
    yield
    forget()


def one_of_each(counts_W: Tensor, gathered: int, comm: Comm) -> tuple[list[list[int]], list[list[int]]]:
    """As if every worker sent one entry of each tensor."""
    return [[1] * counts_W.shape[1]] * len(counts_W), [[1] * gathered] * comm.workers


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", yaml_names("compressor"))
def test_every_compressor(name, monkeypatch):
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(on_gpu, "usable", lambda xs: False)  # a kernel asks for addresses, which fake tensors lack
    # the one thing that a host may read of a bucket
    monkeypatch.setattr(sparse, "read_counts", one_of_each)
    for made in (
        *(number_formats.coding_of(name, False) for name in FORMATS),
        *map(number_formats.powers_of_two, (7, 8)),
    ):
        assert made.values  # what codes stand for: numbers, also where tensors have none
    wrapped = conformance.from_yaml(name)()
    comm = Comm(1, 8, 0, "cpu")  # whose clock asks no driver
    comm.device = torch.device(DEVICE)
    with FakeTensorMode(allow_non_fake_inputs=True), echoed(8):
        setup = Setup(wrapped, workers=1, dtype=torch.float32, device=DEVICE, comm=comm)
        for step in range(2):
            xs_W = [torch.randn(1, *spec.shape, device=DEVICE) for spec in SPECS]
            ctx = setup.context(step)
            if name in WAITING:
                with pytest.raises(DynamicOutputShapeException):
                    setup.compressor.exchange(setup.exchange.as_sent(xs_W), ctx, setup.exchange.state, comm)
                continue
            out = setup.compressor.exchange(setup.exchange.as_sent(xs_W), ctx, setup.exchange.state, comm)
            assert all(update.device == torch.device(DEVICE) for update in out.update)
