"""How many kernels are started: a few for all tensors of a bucket, however many these are, and nobody waits."""

import math
from types import SimpleNamespace

import pytest
import torch

from accordion_bench.conformance import pretend_device
from accordion_bench.conformance.pretend_device import Pretend
from accordion_bench.conformance.subject import from_yaml
from accordion_bench.exchange import finite
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import kernels
from accordion_bench.tensors.kernels import on_gpu
from scripts import launches
from tests.kit.gpu import THERE

# docs/performance.md has them, too
MOST = {
    # one each way, and two of the look; with a scale for each block made on the way
    **dict.fromkeys(["signsgd", "natural", "qsgd", "qsgdinf", "nuqsgd", "fp4", "fp8", "int8"], 4),
    "trn": 5,
    "efsignsgd": 6,
    # a scale that is shared; columns; both ways
    "terngrad": 7,
    "onebit": 9,
    "distefblocksgd": 12,
    "signum": 17,
    # selected, written, added up sender by sender
    "topk": 40,
    "topk of tiles": 16,
    # low rank
    "powersgd": 16,
    "acpsgd": 11,
}
OPTIONS = {"topk of tiles": ("topk", {"chunk": 64})}  # of rows that are not named as files of conf/compressor
WORKERS = 4  # of more, messages of 8 bits and beyond cost more than a dense all-reduce


def network(times):
    """With tensors of one piece and of several; all large enough to be sent as codes."""
    shapes = [(64, 64, 3, 3), (64,), (600, 600)]
    return [TensorSpec(f"{i}", shape) for i, shape in enumerate(shapes * times)]


@pytest.mark.skipif(THERE, reason="counted on a pretended device")
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MOST)
def test_an_exchange_starts_so_many(monkeypatch, name):
    pytest.importorskip("triton")
    from accordion_bench.tensors.kernels.on_gpu import launch

    def count(kernel, grid, device, args, constants):
        Pretend.counts.launches[kernel.__name__] += 1

    monkeypatch.setattr(on_gpu, "usable", lambda xs: bool(xs) and all(isinstance(x, Pretend) for x in xs))
    monkeypatch.setattr(pretend_device, "kernels_for", lambda xs: None)  # else they stand in
    monkeypatch.setattr(launch, "start", count)  # they compute nothing, so that any numbers are where they would write
    monkeypatch.setattr(finite, "math", SimpleNamespace(isfinite=lambda value: True, inf=math.inf))
    of, options = OPTIONS.get(name, (name, {}))
    few, many = (launches.count_launches(from_yaml(of, **options), network(times), WORKERS) for times in (3, 5))
    assert many.launches == few.launches
    assert sum(few.launches.values()) == MOST[name], few.launches
    assert sum(few.waits.values()) <= 1  # the look whether all is finite


def test_no_kernel_takes_tensors_of_two_types_or_of_half_precision():
    x = torch.zeros(1, 3)
    for xs in ([x, x.double()], [x.half()], []):
        assert not kernels.usable(xs) and not on_gpu.usable(xs)
    assert not on_gpu.usable([x])
