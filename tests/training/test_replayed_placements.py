"""Four replayed workers in one process are the same run as two eager processes of two, and four of one."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from accordion_bench.comm.collectives import Comm
from accordion_bench.conformance.placement import TapeGraphs
from tests.kit.processes import together
from tests.kit.taped import step, trainer_for

STEPS = 14  # into the third epoch; the passes of the fifth and later ones are replayed
DROPS = ["model._target_=tests.training.test_replayed.Drops", "~model.depth", "optimizer.lr=0.003"]
GATHERED = {  # all of their tensors: none is so small that it travels dense
    "efsignsgd": ["compressor=efsignsgd"],
    "signsgd, micro-batches": ["compressor=signsgd", "micro_batch_size=2"],
    "efsignsgd, clipped": ["compressor=efsignsgd", "clip_norm=1"],
}
REDUCED = {
    "none": ["compressor=none"],
    "powersgd": ["compressor=powersgd", "compressor.min_compression_rate=0"],
    "local": ["sync=local_sgd", "sync.period=3"],
}


def state(trainer) -> dict:
    """What the workers of a process have, and what all of them have in common."""
    return {
        "shared": [x.clone() for x in trainer.sync.consensus()],
        "buffers": {name: x_W.clone() for name, x_W in trainer.axis.buffers_W.items()},
        "loss": trainer.axis.loss_W.clone(),
        "ledger": trainer.comm.ledger.columns(),
    }


def in_each_process(rank: int, folder) -> None:
    torch.set_num_threads(1)
    for processes in (4, 2):
        if rank >= processes:
            return
        store = dist.FileStore(f"{folder}/store-{processes}", processes)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
        found = {}
        for name, overrides in (GATHERED | REDUCED).items():
            tape, own = TapeGraphs(), folder / f"{processes}-{name}"
            own.mkdir(exist_ok=True)
            trainer = trainer_for(own, tape, *DROPS, *overrides, comm=Comm(4 // processes, processes, rank))
            with contextlib.closing(trainer.progress):
                for _ in range(STEPS):
                    step(trainer)
            assert not tape.captured and {*trainer.step.replayed.eager.values()} == {
                "several processes exchange buckets during the backward pass"
            }
            found[name] = state(trainer)
            trainer.comm.settle()
            if trainer.comm.transport is not None:
                trainer.comm.transport.close()
        torch.save(found, folder / f"{processes}-{rank}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """By placement, what each process has found."""
    folder = tmp_path_factory.mktemp("placements")
    together(4, in_each_process, folder)
    files = {f"{n}x{4 // n}": [folder / f"{n}-{rank}.pt" for rank in range(n)] for n in (2, 4)}
    return {name: [torch.load(file, weights_only=True) for file in own] for name, own in files.items()}


@pytest.mark.parametrize("placement", ["2x2", "4x1"])
@pytest.mark.parametrize("name", [*GATHERED, *REDUCED])
def test_one_replayed_process_equals_several(tmp_path, elsewhere, name, placement):
    """To the bit where messages are gathered; where they are added up, up to the order of additions."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tape = TapeGraphs()
        trainer = trainer_for(tmp_path, tape, *DROPS, *(GATHERED | REDUCED)[name], workers=4)
        with contextlib.closing(trainer.progress):
            for _ in range(STEPS):
                step(trainer)
        ours = state(trainer)
    finally:
        torch.set_num_threads(threads)
    assert tape.replayed["workers"] >= 4 * 5 and tape.replayed["update"] >= 2
    # a CPU's kernels of gathered methods are no operations of torch; those of a device: `test_replayed.py`
    assert set(trainer.step.replayed.eager) == ({"exchange"} if name in GATHERED else set())
    ranks = [found[name] for found in elsewhere[placement]]
    joined = {key: torch.cat([rank["buffers"][key] for rank in ranks]) for key in ours["buffers"]}
    pairs = [
        *((x, y) for rank in ranks for x, y in zip(rank["shared"], ours["shared"], strict=True)),
        *((joined[key], value_W) for key, value_W in ours["buffers"].items()),
        (torch.cat([rank["loss"] for rank in ranks]), ours["loss"]),
    ]
    for x, y in pairs:
        assert torch.equal(x, y) if name in GATHERED else (x - y).double().norm() <= 2e-6 * y.double().norm()
    assert all(rank["ledger"] == ours["ledger"] for rank in ranks)
