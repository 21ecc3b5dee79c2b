"""Processes that are late by the clock: who averages with whom, parameters and bytes by explicit lists, no deadlock."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accordion_bench.options.checks import ConfigError
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import late, local
from tests.kit.local import deviation
from tests.kit.processes import free_port, together
from tests.sync.test_quorum import outer_of

PERIOD, EPOCH, THREE = 3, 8, 3  # steps of an epoch with three workers
SAME = 1e-13


def in_each(rank: int, port: int, cfg: dict, folder: Path, naps: dict, pace: float) -> None:
    store = late.connected(rank, THREE, "127.0.0.1", port)
    torch.save(late.trained(rank, cfg, folder, store, naps, pace), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def outcomes(
    tmp_path: Path, *options: str, naps: dict, pace: float = 0.0, period: int = PERIOD
) -> tuple[list[dict], Trainer]:
    """Of each process; and a trainer that has not begun, for explicit lists."""
    own = (f"sync.period={period}", "sync.quorum=2", "sync.buffers=keep", "epochs=2")
    options = (*options, *own, *local.PLAIN_SGD)
    twin = local.trainer_for(tmp_path, *options, "sync.lateness=0", workers=THREE)
    cfg = local.cfg_for(tmp_path, *options)
    together(THREE, in_each, free_port(), cfg, twin.folder.path, naps, pace)
    return [torch.load(twin.folder.path / f"{rank}.pt", weights_only=False) for rank in range(THREE)], twin


@pytest.mark.parametrize("scheme", ["slowmo", pytest.param("diloco", marks=pytest.mark.slow)])
def test_a_late_process_loses_nothing(tmp_path, scheme):
    """Process 2 sleeps through the first epoch's averagings; its steps join the first one of the second epoch."""
    found, run = outcomes(tmp_path, f"sync={scheme}", "sync.grace=1", naps={(2, 1): 3.0})
    both, all_three = [[0, True, 12], [1, True, 12]], [[0, True, 12], [1, True, 12], [2, True, 36]]
    lists = [{k: [list(a) for a in who] for k, who in each["who"].items()} for each in found]
    took = [who for _, who in sorted(lists[0].items())]
    assert took[:3] == [both, both, all_three]
    assert all(len(who) == 3 and {a[2] for a in who} == {12} for who in took[3:]) and len(took) == 5
    assert lists[0] == lists[1] and [who for who in lists[2].values() if who] == took[2:]
    assert [who for who in lists[2].values()][:2] == [[], []]  # the others had gone to wait for all

    z = [x.detach().clone() for x in run.axis.params]
    first, outer, gamma = z, outer_of(scheme), []

    def step(taken, lr, models, optimizers):
        nonlocal z
        gamma.append(lr)
        if taken in (3, 6, 9, 12, 15):
            present = [0, 1] if taken < 9 else [0, 1, 2]
            weights = {9: [1 / 5, 1 / 5, 3 / 5]}.get(taken, [1 / len(present)] * 3)
            D = [sum(weights[w] * (v - models[w][i].detach()) for w in present) for i, v in enumerate(z)]
            z = outer(z, D, gamma[-PERIOD])
            local.assign([models[w] for w in present], z)
        if taken == EPOCH:  # all wait for all, and the late one learns z
            local.assign([models[2]], [x.detach() + new - old for x, new, old in zip(models[2], z, first, strict=True)])

    expected = local.twin(run, step, momentum=0, weight_decay=0)
    for own, theirs in zip(found, expected, strict=True):
        assert deviation(own["replica"], theirs) < SAME
        assert deviation(own["shared"], local.mean(expected)) < SAME
        assert local.all_equal([own["shared"], found[0]["shared"]])

    nbytes = 8 * sum(spec.numel for spec in run.axis.specs)
    learnt = 2 * nbytes + 8 * 9  # z, momentum, and what has been counted
    for own in found:
        assert own["learnt"] == 2 * nbytes and (own["averagings"], own["took_part"]) == (5, 13)
        assert own["counts"]["payload"] == nbytes * (13 + 3) + learnt  # 3: the exact average in the end
        assert own["counts"]["wire"] == nbytes * (2 * 2 + 3 * 4 + 4) + learnt
        assert own["counts"] == found[0]["counts"]
    assert [(row["averagings"], row["took_part"]) for row in found[0]["rows"]] == [(2, 2.0), (5, 13 / 5)]


def test_a_late_process_is_in_the_next_averaging(tmp_path):
    """With topk: process 2 is late by one period, waits at the next averaging, and takes part in all from there on."""
    options = ["sync=diloco", "compressor=topk", "sync.grace=0.1"]
    found, _ = outcomes(tmp_path, *options, naps={(2, 0): 0.6}, pace=0.2, period=2)
    took = {k: [a[0] for a in who] for each in found for k, who in each["who"].items() if who}
    for each in found:
        assert all([a[0] for a in who] == took[k] for k, who in each["who"].items() if who)
    joined = next(k for k, who in sorted(took.items()) if 2 in who)
    assert took[0] == [0, 1] and 1 <= joined <= 2
    assert dict((a[0], a[1]) for a in found[2]["who"][joined])[2] is False  # it was sent what it lacked
    ahead = min(each["steps"].get(joined, 9) for each in found[:2])
    assert found[2]["steps"][joined] == 2 < ahead
    assert local.all_equal([own["shared"] for own in found])
    assert all(own["counts"] == found[0]["counts"] for own in found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("compressor", ["powersgd", "acpsgd"])
def test_whoever_is_late_whenever_all_agree(tmp_path, compressor):
    """Everybody is late at some time, also at the ends of epochs: no deadlock, one consensus, one ledger."""
    draws = torch.rand(THREE, 2 * EPOCH, generator=torch.Generator().manual_seed(0))
    naps = {(r, s): 0.3 for r in range(THREE) for s in range(2 * EPOCH) if draws[r, s] > 0.75}
    options = ["sync=diloco", f"compressor={compressor}"]
    found, _ = outcomes(tmp_path, *options, naps=naps, pace=0.01, period=1)
    took = {k: who for each in found for k, who in each["who"].items() if who}
    for each in found:
        assert all(who == took[k] for k, who in each["who"].items() if who)
        assert each["counts"] == found[0]["counts"]
        assert (each["averagings"], each["took_part"]) == (len(took), sum(map(len, took.values())))
    assert local.all_equal([own["shared"] for own in found])
    assert len({tuple(a[0] for a in who) for who in took.values()}) >= 3  # not always the same
    assert all(any(own and rank == a[0] for own in took.values() for a in own) for rank in range(THREE))


def each_part(rank: int, port: int, cfg: dict, parts: list[tuple[Path, int | None]], naps: dict) -> None:
    """Runs in these folders, one after another, until so many steps."""
    store = late.connected(rank, THREE, "127.0.0.1", port)
    for folder, stop in parts:
        found = late.trained(rank, cfg, folder, store.under(f"{folder.name}/"), naps, stop=stop)
        torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_run_that_is_resumed_in_new_processes_is_the_same(tmp_path):
    """Bit for bit, where the same processes are late: one while a checkpoint is written, another one after it."""
    scheme = ["sync=diloco", "sync.period=3", "sync.quorum=2", "sync.grace=3", "compressor=topk"]
    cfg, naps = local.cfg_for(tmp_path, *scheme, "epochs=2", "checkpoint.every=5"), {(2, 1): 8.0, (1, 8): 8.0}
    straight, stopped = (RunFolder.create(str(tmp_path), name, cfg).path for name in ("straight", "stopped"))
    together(THREE, each_part, free_port(), cfg, [(straight, None), (stopped, 7)], naps)
    together(THREE, each_part, free_port(), cfg, [(stopped, None)], naps)
    for rank in range(THREE):
        whole, rest = (torch.load(folder / f"{rank}.pt", weights_only=False) for folder in (straight, stopped))
        took, took_then = ([who for who in found["who"].values() if who] for found in (whole, rest))
        expected = [who for who in ([0, 1], [0, 1, 2], [0, 2], [0, 1, 2], [0, 1, 2]) if rank in who]
        assert [[a[0] for a in who] for who in took] == expected  # the first one was before the checkpoint
        assert took_then == (took if rank == 2 else took[1:])
        for key in ("replica", "shared"):
            assert all(map(torch.equal, rest[key], whole[key])), (rank, key)
        for key in ("counts", "averagings", "took_part"):
            assert rest[key] == whole[key], (rank, key)
    assert rest["averagings"] == 5 and rest["took_part"] == 13


def test_without_a_store_late_workers_must_be_drawn(tmp_path):
    with pytest.raises(ConfigError, match=r"sync.quorum needs a run over comm=gloo .*, got 2 elsewhere; type"):
        local.trainer_for(tmp_path, "sync=diloco", "sync.quorum=2", "comm.workers_per_process=1")
