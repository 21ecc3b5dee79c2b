"""How many kernels a compressor starts on a device, and how often the host waits for it, without a device."""

import copy
from collections.abc import Sequence

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.conformance.echo import echoed
from accordion_bench.conformance.pretend_device import DEVICE, Counts, pretended
from accordion_bench.conformance.subject import Maker, Setup
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng

WORKERS = 8
WARM = 2  # exchanges before the one that is counted: tables are uploaded once


def count(make: Maker, specs: Sequence[TensorSpec], workers: int = WORKERS) -> Counts:
    """What one exchange of all these tensors in one bucket asks of the device, in one of so many processes."""
    generator = keyed_rng.generator("launches")
    with pretended() as counts, echoed(workers):
        comm = Comm(1, workers, device=str(DEVICE))
        setup = Setup(make(), specs=specs, dtype=torch.float32, device=str(DEVICE), comm=comm)
        for step in range(WARM + 1):
            xs_W = [torch.randn(1, *spec.shape, generator=generator).to(DEVICE) for spec in specs]
            counts.reset()
            setup(xs_W, step)
    return copy.deepcopy(counts)
