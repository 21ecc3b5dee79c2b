"""CUDA graphs themselves, where a GPU is there; everything else about replays is tested with a tape."""

import pytest
import torch

from accordion_bench.comm.graphs import graphs_of
from accordion_bench.conformance.subject import SPECS, gradients
from accordion_bench.tensors.upload import fresh, upload
from scripts.gpu import exchange
from tests.kit.helpers import yaml_names

pytestmark = pytest.mark.gpu
N = 1 << 16


@pytest.fixture
def graphs():
    found = graphs_of(torch.device("cuda"))
    with found.training(), torch.no_grad():
        yield found


def test_numbers_of_the_host_are_not_overwritten_by_what_the_graph_did_before(graphs):
    """A graph gives memory that it has freed to what comes next; cells are filled before all of it."""
    device, total = torch.device("cuda"), torch.zeros(N, device="cuda")

    def run():
        for _ in range(8):
            total.add_(torch.ones(N, device="cuda"))
        total.add_(fresh(lambda moment: torch.full((N,), float(moment)), 0, device))
        total.add_(upload(torch.full((N,), 100.0), device))

    replay, _ = graphs.capture(run, "exchange")
    for moment in (1000, 2000):
        replay(moment)
    torch.cuda.synchronize()
    assert torch.equal(total.cpu(), torch.full((N,), 2 * 108.0 + 3000.0))


def test_marks_that_nobody_keeps_live_as_long_as_their_graph(graphs):
    total = torch.zeros(N, device="cuda")

    def run():
        for _ in range(100):
            graphs.mark()
        total.add_(1)

    replay, _ = graphs.capture(run, "exchange")
    others = [torch.cuda.Event(enable_timing=True) for _ in range(200)]
    for event in others:
        event.record()
    for _ in range(20):
        replay()
    torch.cuda.synchronize()
    assert torch.equal(total.cpu(), torch.full((N,), 20.0)) and others[0].elapsed_time(others[-1]) >= 0


def test_a_graph_that_is_garbage_ends_no_capture(graphs):
    total = torch.zeros(N, device="cuda")
    circle = [graphs.capture(lambda: total.add_(1), "exchange")]
    circle.append(circle)
    del circle

    def run():
        for _ in range(100_000):
            own = []
            own.append(own)
        total.add_(2)

    replay, _ = graphs.capture(run, "exchange")
    replay()
    torch.cuda.synchronize()
    assert torch.equal(total.cpu(), torch.full((N,), 2.0))


@pytest.mark.parametrize("name", yaml_names("compressor"))
def test_replayed_exchanges_have_the_bits_of_eager_ones(name):
    given = [x_W.cuda() for x_W in gradients(workers=1, dtype=torch.float32)]
    with torch.no_grad():
        found = exchange.one(name, list(SPECS), given, 1)
    assert not found["differs"]
