"""Collectives on a device: what is sent, uploaded and waited for."""

from unittest import mock

import torch

from accordion_bench.comm import collectives
from accordion_bench.comm.collectives import Comm
from accordion_bench.conformance.pretend_device import DEVICE, pretended
from accordion_bench.conformance.subject import Setup, from_yaml
from tests.kit.helpers import SPECS, gradients


class Lists:
    """torch.distributed over a backend with an all-to-all of lists: rank 1 of 3."""

    theirs = {0: torch.tensor([7, 8], dtype=torch.uint8), 2: torch.tensor([], dtype=torch.uint8)}

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def get_backend(self, group) -> str:
        return "nccl"

    def all_to_all(self, received, sent, group=None) -> None:
        self.sent = sent
        for rank, place in enumerate(received):
            place.copy_(self.theirs.get(rank, sent[1]))


def test_nccl_sends_unequal_messages_without_repeating_them():
    """The same tensor to everybody, and what comes lands in one buffer; the ledger counts as ever."""
    comm, over_lists = Comm(1, 3, 1), Lists()
    comm.device = torch.device("cuda")
    message = torch.tensor([1, 2, 3], dtype=torch.uint8)
    with mock.patch.object(collectives, "dist", over_lists):
        messages = comm.all_gather_uneven([message], [2, 3, 0])
    assert [own.tolist() for own in messages] == [[7, 8], [1, 2, 3], []]
    assert {part.data_ptr() for part in over_lists.sent} == {over_lists.sent[0].data_ptr()}
    assert len({own.untyped_storage().data_ptr() for own in messages}) == 1
    same = Comm(1, 3, 1)
    same.ledger.all_gather_uneven([2, 3, 0])
    assert comm.ledger.counts == same.ledger.counts


def test_worker_momentum_takes_one_launch():
    """And the same numbers as on the CPU, where it is written tensor by tensor."""
    found = []
    for device in ("cpu", str(DEVICE)):
        with pretended() as counts:
            make = from_yaml("none", worker_momentum=True, weight_decay_mode="decoupled")
            setup = Setup(make(), specs=SPECS, dtype=torch.float32, device=device)
            for step in range(3):
                xs_W = [x.to(device) for x in gradients(step=step, dtype=torch.float32).tensors]
                counts.reset()
                update = setup.compressor.exchange(xs_W, setup.context(step), setup.exchange.state, setup.comm).update
            found.append([x.cpu() for x in update])
            launches = counts.launches
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(*found, strict=True))
    lists = {name: n for name, n in launches.items() if name.startswith("_foreach")}
    assert launches["add_momenta"] == 1 and lists == {"_foreach_add_": 3}  # of the sum over 4 workers
