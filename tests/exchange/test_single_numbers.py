"""A parameter without a dimension, a learned temperature say, is exchanged and looked at as a vector of one number."""

import pytest
import torch

from accordion_bench.exchange.dry_exchange import probe_exchange
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from tests.kit.helpers import exchange_for


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("none", {}),
        ("topk", {"scope": "model"}),
        ("efsignsgd", {"block": "bucket", "block_size": 100}),
        ("dgc", {"clip": 1.0}),
        ("qsgd", {"collective": "two_way"}),
    ],
)
def test_in_every_scope_clipped_and_probed(name, options):
    found = []
    for shape in [(), (1,)]:
        specs = [TensorSpec("matrix", (3, 5)), TensorSpec("temperature", shape)]
        exchange, plan = exchange_for(name, workers=2, specs=specs, **options)
        numbers_W = torch.linspace(-1, 2, 32, dtype=torch.float64).view(2, 16)
        xs_W, info = [numbers_W[:, :15].reshape(2, 3, 5), numbers_W[:, 15].reshape(2, *shape)], StepInfo(plan, 0, 0.1)
        probe, update = probe_exchange(exchange, xs_W, info), exchange(xs_W, info)[1]
        assert update.shape == shape
        found.append((float(update), probe.error, probe.measured))
    assert found[0] == found[1]
