"""One worker of many beside all of them in one process: the same bytes, and of equal workers the same update."""

import pytest
import torch

from accordion_bench.advising.arms import arm_of
from accordion_bench.advising.rehearsal import RehearsalComm
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.assemble import wrapped_compressor
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.methods.compatibility import ladder_of
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo

SPECS = [TensorSpec("a", (16, 3, 3, 3)), TensorSpec("b", (16,)), TensorSpec("c", (40, 30)), TensorSpec("d", ())]
WITHOUT_DRAWS = ("none", "bf16", "fp16", "fp8", "fp4", "efsignsgd", "onebit", "powersgd", "topk", "demo")


def exchanged(name: str, comm: Comm, times: int = 2) -> tuple[list[torch.Tensor], dict[str, int]]:
    """The last update of equal workers, and the ledger."""
    wrapped = wrapped_compressor(arm_of(name).chosen.compressor, arm_of(name).chosen.optimizer)
    exchange = Exchange(wrapped.compressor, SPECS, ladder_of(wrapped.compressor, {}), comm, torch.zeros(1))
    info = StepInfo(exchange.weakest(), epoch=99, lr=0.1)
    draws = torch.Generator().manual_seed(0)
    gradients = [torch.randn(1, *spec.shape, generator=draws) for spec in SPECS]
    for _ in range(times):
        updates = exchange([g.repeat(comm.local_workers, *[1] * (g.ndim - 1)) for g in gradients], info)
    return updates, comm.ledger.counts


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("name", sorted(yaml_files("compressor")))
def test_the_bytes_are_those_of_all_workers(name, workers):
    update, own = exchanged(name, RehearsalComm(workers), 1)
    together, from_all = exchanged(name, Comm(workers), 1)
    exact = wrapped_compressor(arm_of(name).chosen.compressor).compressor.traits.fixed_size
    for account in ("payload", "wire", "rounds"):
        assert own[account] == (from_all[account] if exact else pytest.approx(from_all[account], rel=0.02))
    assert [u.shape for u in update] == [u.shape for u in together]


@pytest.mark.parametrize("name", WITHOUT_DRAWS)
def test_of_equal_workers_the_update_is_that_of_one_of_them(name):
    alone, _ = exchanged(name, RehearsalComm(4))
    together, _ = exchanged(name, Comm(4))
    for own, other in zip(alone, together, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [2, 5])
def test_what_arrives_is_as_if_all_had_sent_the_same(workers):
    comm = RehearsalComm(workers)
    (mean,) = comm.all_reduce_mean([torch.full((1, 3), 7.0)])
    assert torch.equal(mean, torch.full((3,), 7.0))
    message = torch.arange(6, dtype=torch.uint8)[None]
    assert torch.equal(comm.all_gather(message), message.repeat(workers, 1))
    parts = comm.all_gather_uneven([message[0]], [6, 4, *[6] * (workers - 2)])
    assert [part.tolist() for part in parts] == [list(range(6)), [0] * 4, *[list(range(6))] * (workers - 2)]
    (received,) = comm.all_to_all([message] * workers)
    assert torch.equal(received, message.repeat(workers, 1))
    assert torch.equal(comm.send_receive(message, [*range(1, workers), 0]), message)
