"""Low rank by Triton's kernels: updates and residuals are those of the CPU."""

import pytest
import torch

from accordion_bench.conformance.subject import Setup, from_yaml, max_relative_difference
from accordion_bench.position import StepInfo
from tests.device.test_ranks import WIDE, drawn

CASES = [
    ("powersgd", 1, {"rank": 2}),
    ("powersgd", 3, {"rank": 4, "min_compression_rate": 0}),
    ("powersgd", 2, {"rank": 1, "error_feedback": False}),
    ("powersgd", 1, {"rank": 2, "orthonormalisation": "gramschmidt"}),
    ("acpsgd", 2, {"rank": 2}),
    ("dion", 2, {"rank": 4}),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "workers", "options"), CASES)
def test_exchanges_are_those_of_the_cpu(gpu, name, workers, options):
    given, found = drawn(workers), []
    for device in (torch.device("cpu"), gpu.device):
        setup = Setup(
            from_yaml(name, **options)(), workers=workers, specs=WIDE, dtype=torch.float32, device=str(device)
        )
        out = []
        for step in range(3):
            updates = setup.exchange([x.to(device) for x in given(step)], StepInfo(setup.plan, step, 1.0, 1000.0))
            out += [x.cpu().clone() for x in updates]
        kept = [
            state[key]
            for state in setup.exchange.state.values()
            for key in ("residual_W", "momentum_W")
            if key in state
        ]
        found.append(out + [x.cpu() for x in kept])
    assert max_relative_difference(found[1], found[0]) < 1e-4
    if gpu.counts is not None:
        assert gpu.counts.launches["_times_right"] > 0
