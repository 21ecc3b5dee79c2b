"""The device that is not there: what it counts, and what it refuses."""

import pytest
import torch

from accordion_bench.conformance.pretend_device import DEVICE, pretended
from scripts.echo import echoed
from scripts.launches import gpt2, resnet50, small


def there(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape).to(DEVICE)


@pytest.mark.parametrize(
    ("work", "launches", "waits"),
    [
        (lambda x: x + 1, 1, 0),
        (lambda x: x[1:].view(-1, 2).mT.unbind(0), 0, 0),
        (lambda x: torch.empty_like(x), 0, 0),
        (lambda x: torch.zeros(3, device=DEVICE), 1, 0),
        (lambda x: torch._foreach_add([x, x], 1.0), 1, 0),
        (lambda x: float(x.sum()), 1, 1),
        (lambda x: x.tolist(), 0, 1),
        (lambda x: bool((x > 3).any()), 2, 1),
        (lambda x: x[x > 3], 2, 1),
        (lambda x: (x > 3).nonzero(), 2, 1),
        (lambda x: torch.nonzero_static(x > 3, size=4), 2, 0),
        (lambda x: x.cpu(), 0, 1),
        (lambda x: torch.empty(4, 4).copy_(x), 0, 1),
        (lambda x: torch.ones(4).to(x.device), 0, 1),
        (lambda x: torch.ones(4).to(x.device, non_blocking=True), 0, 1),  # of pageable memory
        (lambda x: torch.ones(4).pin_memory().to(x.device, non_blocking=True), 0, 0),
        (lambda x: torch.tensor([1.0, 2.0], device=x.device), 0, 1),
        (lambda x: x.equal(x), 0, 1),
    ],
)
def test_launches_and_waits(work, launches, waits):
    with pretended() as counts:
        x = there(4, 4)
        counts.reset()
        work(x)
        assert (sum(counts.launches.values()), sum(counts.waits.values())) == (launches, waits)


def test_numbers_are_real_and_views_share_memory():
    with pretended():
        x = there(2, 3)
        x[:, 1].mul_(10)
        torch.add(x, 1, out=x)
        assert x.device == DEVICE and x.cpu().tolist() == [[1, 11, 3], [4, 41, 6]]


@pytest.mark.parametrize(
    "work", [lambda x: x.numpy(), lambda x: x + torch.ones(4, 4), lambda x: torch.cat([x, torch.ones(1, 4)])]
)
def test_what_a_device_refuses_is_refused(work):
    with pretended(), pytest.raises((TypeError, RuntimeError), match="device"):
        work(there(4, 4))


def test_without_it_everything_is_as_before():
    with pretended():
        pass
    assert torch.zeros(2, device=DEVICE).is_meta and not hasattr(torch.ones(1), "_is_pinned")


def test_networks():
    for specs, tensors, entries in ((resnet50(), 161, 25_557_032), (gpt2(), 148, 124_439_808)):
        assert (len(specs), sum(spec.numel for spec in specs)) == (tensors, entries)
        assert len({s.shape for s in small(specs)}) == len({s.shape for s in specs})


def test_an_echo_is_a_group_of_equals():
    from accordion_bench.comm.collectives import Comm

    with echoed(4) as echo:
        comm, x_W = Comm(1, 4), torch.arange(3.0)[None]
        assert comm.all_reduce_mean([x_W])[0].tolist() == [0, 1, 2]
        assert comm.all_reduce_max([x_W.max()])[0] == 2
        assert comm.all_gather(x_W.view(torch.uint8)).view(torch.float32).tolist() == [[0, 1, 2]] * 4
        assert comm.all_to_all([torch.full((1, 2), i, dtype=torch.uint8) for i in range(4)])[0].tolist() == [[0, 0]] * 4
    assert [operation for operation, *_ in echo.log] == ["all_reduce", "all_reduce", "all_gather", "all_to_all"]
