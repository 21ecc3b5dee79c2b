"""Local methods in 1 x 4, 2 x 2 and 4 x 1: the same bytes, plans and parameters; groups inside and over processes."""

import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.ledger import Ledger
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import local
from tests.kit.local import deviation
from tests.kit.processes import forked

SAME = 1e-13
RUNS = {
    "local_sgd": ["sync=local_sgd", "sync.period=5"],
    "averaged buffers": ["sync=local_sgd", "sync.period=5", "sync.buffers=average"],
    "slowmo": ["sync=slowmo", "sync.period=5"],
    "groups with randomk": ["sync=hierarchical", "sync.groups=[[2,2],[8,4]]", "compressor=randomk"],
    "groups with signs": ["sync=hierarchical", "sync.groups=[[2,2],[8,4]]", "compressor=distefblocksgd"],
    "groups with topk": ["sync=hierarchical", "sync.groups=[[2,2],[8,4]]", "compressor=topk"],
    # messages as long as the data want: groups in different processes spend differently
    "groups with adacomp": ["sync=hierarchical", "sync.groups=[[1,2],[7,4]]", "compressor=adacomp"],
    "muon": ["sync=diloco", "sync.period=5", "optimizer=muon", "optimizer.ns_precision=null"],
    "sparseloco": ["sync=diloco", "sync.period=5", "compressor=topk", "compressor.chunk=4", "compressor.value_bits=2"],
    "powersgd after the drop": ["sync=post_local_sgd", "sync.period=4", "compressor=powersgd"],
    "0/1 Adam": [
        *("sync=zerooneadam", "optimizer=adamw"),
        *("sync.freeze_step=4", "sync.refreshes=2", "sync.doubling_steps=3"),
    ],
    "overlap": ["sync=overlap_local_sgd", "sync.period=3"],
    "streaming": ["sync=streaming_diloco", "sync.period=6", "sync.delay=2", "compressor=topk"],
    "sparta": ["sync=sparta", "sync.sparta=0.1"],
    "diloco with sparta": ["sync=diloco", "sync.period=5", "sync.sparta=0.1"],
    "streaming with sparta": [
        *("sync=streaming_diloco", "sync.period=6", "sync.delay=2", "sync.sparta=0.1", "sync.mixing=0"),
    ],
    "noloco": ["sync=noloco", "sync.period=5"],
    "gossip": ["sync=gossip", "sync.period=2"],
    "gossip in a ring, used late": ["sync=gossip", "sync.graph=ring", "sync.delay=1"],
    "desloc": [
        *("sync=desloc", "sync.period=5", "sync.momentum_period=5", "sync.variance_period=10", "sync.clip=0.05"),
        "optimizer=adamw",
    ],
    "late workers": ["sync=diloco", "sync.period=5", "sync.quorum=2", "sync.lateness=0.5"],
    "late workers with topk": ["sync=slowmo", "sync.period=5", "sync.quorum=2", "sync.lateness=0.5", "compressor=topk"],
    "batches that differ": ["sync=diloco", "sync.period=5", "batch_size=[7,2,3,1]"],
    "groups with batches that differ": ["sync=hierarchical", "sync.groups=[[2,2],[6,4]]", "batch_size=[7,2,3,1]"],
    "late workers with batches that differ": [
        *("sync=diloco", "sync.period=5", "sync.quorum=2", "sync.lateness=0.5", "batch_size=[7,2,3,1]"),
    ],
    "late workers with powersgd": [
        *("sync=local_sgd", "sync.period=5", "sync.quorum=1", "sync.lateness=0.5", "compressor=powersgd")
    ],
}  # fmt: skip


FOUR = (
    "local_sgd",
    "muon",
    "streaming",
    "sparseloco",
    "groups with randomk",
    "0/1 Adam",
    "groups with signs",
    "sparta",
    "noloco",
    "gossip",
    "gossip in a ring, used late",
    "desloc",
    "late workers",
    "late workers with topk",
    "groups with adacomp",
    "groups with batches that differ",
)  # also in four processes
MOVED = (
    "noloco",
    "gossip in a ring, used late",
    "desloc",
    "overlap",
    "late workers with topk",
    "streaming",
    "groups with signs",
    "groups with topk",
    "groups with adacomp",
    "late workers with batches that differ",
)  # in mid-round


def outcome(cfg: dict, comm: Comm, folder: Path, moved: bool = False) -> tuple:
    """What must not depend on the placement: bytes, plan, consensus, the local workers' replicas before the end.

    A run that has moved goes on from a checkpoint, which one process has left.
    """
    run = Trainer(RunConfig.from_dict({**cfg, "workers": 4}), comm, RunFolder(folder))
    if moved:
        run.load(folder / "checkpoint" / "step-00000005")
    replicas: list = []
    local.fitted(run, lambda t: replicas.__setitem__(slice(None), local.replicas(t)))
    return run.comm.ledger.counts, run.position.plan, [x.clone() for x in run.axis.shared], replicas


def _in_each_process(rank: int, root: str, folders: dict[str, Path], cfgs: dict[str, dict]) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    for processes in (4, 2):
        if rank < processes:
            store = dist.FileStore(f"{root}/store-{processes}", processes)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
            found = {}
            for name in RUNS if processes == 2 else FOUR:
                comm = Comm(4 // processes, processes, rank)
                found[name] = outcome(cfgs[name], comm, folders[name], name in MOVED)
            torch.save(found, f"{root}/{processes}-{rank}.pt")
            dist.barrier()
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def placed(tmp_path_factory):
    """Processes -> one dictionary of outcomes per rank."""
    root = tmp_path_factory.mktemp("placed")
    cfgs = {name: local.cfg_for(root, "epochs=2", *options) for name, options in RUNS.items()}
    folders = {name: RunFolder.create(str(root), name.replace(" ", "-"), cfg).path for name, cfg in cfgs.items()}
    for name in MOVED:
        stopped = Trainer(RunConfig.from_dict({**cfgs[name], "workers": 4}), Comm(4), RunFolder(folders[name]))
        stopped.begin_epoch()
        for _ in range(5):
            stopped.train_step()
        stopped.save()
    alone = {name: Path(shutil.copytree(folder, f"{folder}-alone")) for name, folder in folders.items()}
    with forked():
        context = multiprocessing.get_context("spawn")
        arguments = (str(root), folders, cfgs)
        children = [context.Process(target=_in_each_process, args=(rank, *arguments), daemon=True) for rank in range(4)]
    for child in children:
        child.start()
    together = {name: outcome(cfg, Comm(4), alone[name]) for name, cfg in cfgs.items()}
    for child in children:
        child.join(timeout=120)
    assert [child.exitcode for child in children] == [0] * 4
    load = lambda n: [torch.load(root / f"{n}-{rank}.pt", weights_only=False) for rank in range(n)]  # noqa: E731
    return {1: [together], 2: load(2), 4: load(4)}


def test_a_process_has_a_view_until_all_have_settled():
    """Two processes of two workers, one group each, with messages of 847 and 879 bytes: 2 x 847 is a guess."""
    ledgers = []
    for nbytes in (847, 879):
        ledger, group = Ledger(4), Ledger(2)
        group.all_gather_uneven([nbytes - 400, 400])
        ledger.absorb([group])
        assert ledger.columns()["payload_bytes"] == round(2 * nbytes / 4) and not any(group.counts.values())
        ledgers.append(ledger)
    together = [sum(spent) // 2 for spent in zip(*(ledger.views.values() for ledger in ledgers), strict=True)]
    for ledger in ledgers:
        ledger.settled(together)
        assert ledger.counts["payload"] == ledger.counts["wire"] == ledger.counts["inner_wire"] == 847 + 879
        assert ledger.columns()["rounds"] == 1


@pytest.mark.sample(5)
@pytest.mark.parametrize("name, processes", [*((name, 2) for name in RUNS), *((name, 4) for name in FOUR)])
def test_placement_does_not_matter(placed, name, processes):
    counts, plan, consensus, replicas = placed[1][0][name]
    outcomes = [outcomes[name] for outcomes in placed[processes]]
    assert all(other[0] == counts and other[1] == plan for other in outcomes)
    assert all(local.all_equal([outcomes[0][2], other[2]]) for other in outcomes)  # bit for bit between processes
    assert deviation(outcomes[0][2], consensus) < SAME
    everybody = [own for other in outcomes for own in other[3]]
    assert len(everybody) == 4
    assert max(deviation(a, b) for a, b in zip(everybody, replicas, strict=True)) < SAME
    assert not local.all_equal(replicas)  # the run ends in mid-round


@pytest.mark.parametrize("processes", [2, 4])
def test_pairs_are_the_same_bit_for_bit_wherever_they_live(placed, processes):
    """A mean of two is one number, whoever adds which to which."""
    together = placed[1][0]["noloco"][3]
    everybody = [own for outcomes in placed[processes] for own in outcomes["noloco"][3]]
    assert all(local.all_equal(pair) for pair in zip(everybody, together, strict=True))
