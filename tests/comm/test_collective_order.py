"""Real runs over gloo: all processes make the same collectives in one order, whatever groups and threads take turns."""

import contextlib
import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.sealed_store import SealedStore
from accordion_bench.exchange import exchange
from accordion_bench.processes.interrupt import Interrupted, Stopper
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import collective_order, local
from tests.kit.collective_order import Call, Disagreement, compare
from tests.kit.processes import together

SMALL = "comm.bucket_cap_mb=0.0005"  # several buckets, which leave during the backward pass
TINY = "model._target_=tests.kit.tiny.Net"
ACCORDION = ["adaptive=accordion", "adaptive.accordion.interval=1", "adaptive.accordion.eta=0.25"]

STREAMING = ["sync=streaming_diloco", "sync.period=6", "sync.delay=2"]

# processes, options, whether it is in the default suite; all have evaluation, BatchNorm's statistics, checkpoints
RUNS = {
    "buckets": (2, [TINY, SMALL, "compressor=none"], False),
    "buckets and plans": (2, [TINY, SMALL, "compressor=powersgd", *ACCORDION], True),
    "sizes first": (2, [TINY, SMALL, "compressor=threshold"], False),
    "both ways": (2, [TINY, SMALL, "compressor=topk", "compressor.collective=two_way"], False),
    "plans of batches": (2, ["compressor=topk", "adaptive=noise_scale"], False),
    "fitted codebooks": (2, ["compressor=nuqsgd", "adaptive=alq"], False),
    "local steps": (2, ["sync=local_sgd", "compressor=topk"], False),
    "sparse averages": (2, ["sync=diloco", "sync.period=3", "sync.sparta=0.1"], False),
    "sparse averages and fragments": (2, [*STREAMING, "sync.sparta=0.1"], False),
    "pairs": (2, ["sync=noloco", "sync.period=3"], False),
    "groups": (4, ["sync=hierarchical", "sync.groups=[[1,2],[3,4]]", "compressor=topk"], False),
    "groups in groups": (4, ["sync=hierarchical", "sync.groups=[[1,2],[2,4]]"], True),
    "stopped": (2, [TINY, SMALL, "compressor=topk", "epochs=1000"], True),
}
DEFAULT = [name for name, (_, _, default) in RUNS.items() if default]
NAMES = [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]


def cfg_for(root: Path, options: list[str]) -> dict:
    return local.cfg_for(root, "epochs=2", "checkpoint.every=4", "schedule.milestones=[0.5]", *options)


def run_one(comm: Comm, cfg: dict, folder: Path, store: SealedStore | None = None, stop: int = 0) -> None:
    """A run to its end, or until rank 1 is asked to stop after so many steps."""
    stopper = Stopper(store)
    trainer = Trainer(RunConfig.from_dict({**cfg, "workers": comm.workers}), comm, RunFolder(folder), stopper)

    def watch(trainer: Trainer) -> None:
        if stop and comm.rank == 1 and trainer.position.step == stop:
            stopper.note(signal.SIGTERM, None)

    with contextlib.suppress(Interrupted):
        local.fitted(trainer, watch)
        assert not stop
    comm.barrier()


def in_each_process(rank: int, root: str, cfgs: dict[str, dict], folders: dict[str, Path]) -> None:
    torch.set_num_threads(1)
    for processes in (2, 4):
        if rank >= processes:
            continue
        store = dist.FileStore(f"{root}/store-{processes}", processes)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
        for name in [name for name in cfgs if RUNS[name][0] == processes]:
            comm, shared = Comm(4 // processes, processes, rank), SealedStore(store, processes).under(f"{name}/")
            with collective_order.recorded() as calls:
                run_one(comm, cfgs[name], folders[name], shared, 5 if name == "stopped" else 0)
            Path(root, f"{name}-{rank}.json").write_text(json.dumps(collective_order.to_json(calls)))
        dist.barrier()
        dist.destroy_process_group()


def recorded(root: Path, names: Sequence[str]) -> dict[str, list[list[Call]]]:
    """Of each run the collectives of each rank."""
    cfgs = {name: cfg_for(root, RUNS[name][1]) for name in names}
    folders = {name: RunFolder.create(str(root), name.replace(" ", "-"), cfg).path for name, cfg in cfgs.items()}
    together(4, in_each_process, str(root), cfgs, folders)

    def load(name: str, rank: int) -> list[Call]:
        return [Call.of_dict(saved) for saved in json.loads((root / f"{name}-{rank}.json").read_text())]

    return {name: [load(name, rank) for rank in range(RUNS[name][0])] for name in names}


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> dict[str, list[list[Call]]]:
    return recorded(tmp_path_factory.mktemp("few"), DEFAULT)


@pytest.fixture(scope="module")
def rest(tmp_path_factory) -> dict[str, list[list[Call]]]:
    return recorded(tmp_path_factory.mktemp("rest"), [name for name in RUNS if name not in DEFAULT])


@pytest.fixture
def logs(request, name) -> list[list[Call]]:
    return request.getfixturevalue("few" if name in DEFAULT else "rest")[name]


@pytest.mark.parametrize("name", NAMES)
def test_all_processes_make_the_same_collectives_in_one_order(name, logs):
    compare(logs)
    assert all(len(log) > 20 for log in logs)


def count(log: Sequence[Call], operation: str) -> int:
    return sum(call.operation == operation for call in log)


def test_the_runs_are_those_that_they_are_meant_to_be(few):
    """Buckets, plans, checkpoints, evaluation, groups: what is compared is there."""
    log = few["buckets and plans"][0]
    gradients = [call for call in log if call.operation == "all_reduce" and call.dtype == "torch.float32"]
    assert len(gradients) > 3 * 12  # of 12 steps
    assert count(log, "broadcast") >= 1 + 2  # of the model, of two epochs' plans
    assert sum(call.dtype == "torch.float64" for call in log) >= 2 * 2  # losses and evaluation of two epochs
    assert count(log, "all_gather_object") >= 3  # checkpoints
    log = few["groups in groups"][0]
    assert {call.group for log in few["groups in groups"] for call in log} == {(0, 1), (2, 3), (0, 1, 2, 3)}
    assert [call.detail for call in log if call.operation == "new_group"] == ["[0, 1]", "[2, 3]"]
    assert 20 < len(few["stopped"][0]) < 400  # not 6,000 steps


@pytest.mark.slow
def test_so_are_the_others(rest):
    for name in ("both ways", "sizes first"):
        assert count(rest[name][0], "all_to_all_single") >= 12
    model = [call.dtype for call in rest["buckets"][0] if call.operation == "broadcast"]
    # parameters and statistics; how many batches these have seen, which each evaluation takes from rank 0, too
    assert model[:2] == ["torch.float32", "torch.int64"] and {*model[2:]} == {"torch.int64"}
    assert count(rest["fitted codebooks"][0], "broadcast") > 1


# ---- what must not pass


@pytest.mark.parametrize("name", NAMES)
def test_an_order_that_is_wrong_in_one_process_is_found(name, logs):
    """Two unlike neighbours exchanged, one left out, one more: in the middle of one process's run."""
    log = logs[1]
    like = lambda call: replace(call, sent=(), received=())  # noqa: E731
    at = next(i for i in range(len(log) // 2, len(log)) if like(log[i]) != like(log[i + 1]))
    swapped = [*log[:at], log[at + 1], log[at], *log[at + 2 :]]
    for wrong in (swapped, [*log[:at], *log[at + 1 :]], [*log[: at + 1], *log[at:]]):
        with pytest.raises(Disagreement, match=r"collective \d+ of ranks \d and \d: "):
            compare([logs[0], wrong, *logs[2:]])


@pytest.mark.parametrize(
    "mine, other",
    [
        (Call((0, 1), "all_reduce", "torch.float32", 4), Call((0, 1), "all_reduce", "torch.float16", 4)),
        (Call((0, 1), "all_reduce", "torch.float32", 4), Call((0, 1), "all_reduce", "torch.float32", 5)),
        (
            Call((0, 1), "broadcast", "torch.float32", 4, "from 0"),
            Call((0, 1), "broadcast", "torch.float32", 4, "from 1"),
        ),
        (
            Call((0, 1), "all_to_all_single", "torch.uint8", sent=(1, 2), received=(1, 3)),
            Call((0, 1), "all_to_all_single", "torch.uint8", sent=(2, 4), received=(2, 4)),
        ),
    ],
)
def test_collectives_that_do_not_meet_are_found(mine, other):
    compare([[mine], [replace(mine, sent=(3, 4), received=(2, 4)) if mine.sent else mine]])
    with pytest.raises(Disagreement):
        compare([[mine], [other]])


def test_groups_that_take_turns_differently_are_found():
    """Each group's own order is right; NCCL would hang all the same."""
    world, group = Call((0, 1, 2, 3), "barrier"), Call((0, 1), "barrier")
    compare([[world, group], [world, group], [world], [world]])
    with pytest.raises(Disagreement, match="collective 0 of ranks 0 and 1"):
        compare([[world, group], [group, world], [world], [world]])


def test_an_exchange_that_hands_its_buckets_over_in_another_order_is_found(tmp_path, monkeypatch):
    """One rank after the other, alone, in a group that only pretends: whoever is wrong hangs nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    cfg = {**cfg_for(tmp_path, [TINY, SMALL, "compressor=none", "epochs=1"]), "workers": 2}
    folder = RunFolder.create(str(tmp_path), "fake", cfg).path
    bucketed = exchange.bucketed_in_parts

    def log(rank: int, *, wrong: bool) -> list[Call]:
        if wrong:
            monkeypatch.setattr(exchange, "bucketed_in_parts", lambda *args: bucketed(*args)[::-1])
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            with collective_order.recorded() as calls:
                trainer = Trainer(RunConfig.from_dict(cfg), Comm(1, 2, rank), RunFolder(folder))
                trainer.begin_epoch()
                for _ in range(2):
                    trainer.train_step()
            return calls
        finally:
            dist.destroy_process_group()
            monkeypatch.undo()

    first = log(0, wrong=False)
    compare([first, log(1, wrong=False)])
    with pytest.raises(Disagreement):
        compare([first, log(1, wrong=True)])
