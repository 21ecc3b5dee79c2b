"""Groups that average often inside averages of all: who is equal when, bytes, residuals."""

import datetime
import math

import pytest
import torch
import torch.distributed as dist

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from tests.kit import local
from tests.kit.helpers import exchange_for, gradients
from tests.kit.local import deviation, trained, trainer_for

HIERARCHICAL, SAME = "sync=hierarchical", 1e-14
SIXTEEN = ["dataset.train_size=256", "batch_size=1", "epochs=1", "optimizer.lr=0.002"]  # 16 steps
SIXTEEN += ["model._target_=tests.kit.models.Plain"]


def test_bytes_are_the_formula(tmp_path):
    """sum_l 2 (n_l - 1) / n_l 4 d (1 / p_l - 1 / p_(l+1)) = 1.59375 d per worker and step."""
    run = trained(tmp_path, HIERARCHICAL, "sync.groups=[[4,4],[16,16]]", *SIXTEEN, workers=16)
    columns, d = run.comm.ledger.columns(), sum(spec.numel for spec in run.axis.specs)
    assert run.position.step == 16
    inner, outer = 2 * 3 / 4 * 4 * (1 / 4 - 1 / 16), 2 * 15 / 16 * 4 / 16
    assert inner + outer == 1.59375
    assert columns["wire_bytes"] == 1.59375 * 16 * d and columns["inner_wire_bytes"] == inner * 16 * d
    assert columns["payload_bytes"] == 4 * 4 * d and columns["rounds"] == 3 * 2 * 3 + 2 * 15
    assert columns["dense_wire_bytes"] == 16 * 2 * 15 / 16 * 4 * d
    assert all(g.exchange.comm.ledger.counts["wire"] == 0 for tier in run.sync.tiers[:-1] for g in tier.groups)


def test_only_the_largest_due_groups_act(tmp_path):
    """Workers 0 1 | 2 3 every 2 steps, all every 6; a tail in the end."""
    seen = {}

    def watch(trainer):
        a, b, c, d = local.replicas(trainer)
        seen[trainer.position.step] = (local.all_equal([a, b]), local.all_equal([c, d]), local.all_equal([a, c]))

    run = trained(tmp_path, HIERARCHICAL, "sync.groups=[[2,2],[6,4]]", "dataset.train_size=64", watch=watch)
    pairs, everybody = (True, True, False), (True, True, True)
    expected = {s: everybody if s % 6 == 0 else pairs if s % 2 == 0 else (False,) * 3 for s in range(1, 17)}
    assert seen == expected
    assert local.all_equal(local.replicas(run)) and local.all_equal([run.axis.shared, local.replicas(run)[0]])


@pytest.mark.parametrize("groups", ["[[4,4]]", "[[4,2],[4,4]]"])
def test_where_only_all_average_it_is_local_sgd_bit_for_bit(tmp_path, groups):
    flat = trained(tmp_path, "sync=local_sgd", "sync.period=4")
    tiered = trained(tmp_path, HIERARCHICAL, f"sync.groups={groups}")
    assert local.all_equal([flat.axis.shared, tiered.axis.shared])
    flat.comm.ledger.counts["control"] += 4 * 24 * tiered.comm.grouped  # summed over processes after every epoch
    assert flat.comm.ledger.counts == tiered.comm.ledger.counts


def test_equals_explicit_lists(tmp_path):
    """Three tiers after a switch; momentum stays with each worker."""
    options = ["sync.groups=[[2,2],[4,4],[8,8]]", "sync.switch_step=2", "sync.phase1=model", "dataset.train_size=192"]
    run = trainer_for(tmp_path, HIERARCHICAL, *options, workers=8)

    def average(taken, lr, models, optimizers):
        c = taken - 2
        size = 8 if c <= 0 or c % 8 == 0 else 4 if c % 4 == 0 else 2 if c % 2 == 0 else 1
        for first in range(0, 8, size):
            group = models[first : first + size]
            local.assign(group, local.mean(group))

    expected = local.twin(run, average)
    last = []
    local.fitted(run, lambda t: last.__setitem__(slice(None), local.replicas(t)))
    assert max(deviation(a, b) for a, b in zip(last, expected, strict=True)) < SAME
    assert deviation(run.axis.shared, local.mean(expected)) < SAME


def test_outer_steps_are_taken_by_all_alone(tmp_path):
    """SlowMo around an average of groups."""
    options = ["sync.groups=[[2,2],[4,4]]", "sync.outer_optimizer=slowmo", "sync.buffers=keep", *local.PLAIN_SGD]
    run = trainer_for(tmp_path, HIERARCHICAL, *options)
    z = [x.detach().clone() for x in run.axis.params]
    u, gamma = [torch.zeros_like(x) for x in z], []

    def step(taken, lr, models, optimizers):
        gamma.append(lr)
        for pair in (models[:2], models[2:]) if taken % 4 == 2 else ():
            local.assign(pair, local.mean(pair))
        if taken % 4 == 0:
            for i, mean in enumerate(local.mean(models)):
                u[i] = 0.5 * u[i] + (z[i] - mean) / gamma[-4]
                z[i] = z[i] - gamma[-4] * u[i]
            local.assign(models, z)

    local.twin(run, step, momentum=0, weight_decay=0)
    local.fitted(run)
    assert deviation(run.axis.shared, z) < 1e-13


def test_buffers_are_treated_where_all_average(tmp_path):
    kept = []

    def watch(trainer):
        kept.append(all(len(optimizer.state) > 0 for optimizer in trainer.inner.of_replicas))

    trained(tmp_path, HIERARCHICAL, "sync.groups=[[2,2],[4,4]]", "sync.buffers=reset", "epochs=2", watch=watch)
    assert kept == [True, True, True, False] * 3


def test_every_tier_keeps_residuals_of_its_own(tmp_path):
    """z_group - mean e is the exact average in every group: nothing of a group is lost or given to another."""
    options = ["sync.groups=[[2,2],[4,4]]", "compressor=topk", "compressor.density=0.2"]
    run = trainer_for(tmp_path, HIERARCHICAL, *options)
    exchanged, checked = run.runner.run, []

    def spied(exchanges, xs_W):
        sums = []
        for exchange, x_W in zip(exchanges, xs_W, strict=True):
            state = [exchange.state.get(s.name, {}).get("residual_W") for s in exchange.specs]
            sums.append([x.mean(0) + (0 if e is None else e.mean(0)) for x, e in zip(x_W, state, strict=True)])
        completed = exchanged(exchanges, xs_W)
        for exchange, update, before in zip(exchanges, completed.updates, sums, strict=True):
            state = [exchange.state.get(s.name, {}).get("residual_W") for s in exchange.specs]
            after = [u + (0 if e is None else e.mean(0)) for u, e in zip(update, state, strict=True)]
            checked.append((len(exchanges), deviation(before, after)))
        return completed

    def anchored(trainer):
        """Who has averaged goes on from there, and measures the next differences from there."""
        for tier, period in zip(trainer.sync.tiers, (2, 4), strict=True):
            for group in tier.groups if trainer.position.step % period == 0 else ():
                assert local.all_equal([list(group.anchor), *(local.replicas(trainer)[row] for row in group.rows)])

    run.runner.run = spied
    local.fitted(run, anchored)
    assert [count for count, _ in checked] == [2, 2, 1] * 6 and max(apart for _, apart in checked) < SAME
    names = [place.name for place in run.sync.exchanges()]
    assert names == ["pseudo_gradient-2", "pseudo_gradient-2", "pseudo_gradient-4"]
    residuals = [place.exchange.state["a.weight"]["residual_W"] for place in run.sync.exchanges()]
    assert [len(e_W) for e_W in residuals] == [2, 2, 4] and all(float(e_W.abs().max()) > 0 for e_W in residuals)


@pytest.mark.parametrize("name, options", [
    ("topk", {}), ("distefblocksgd", {"residual": "local"}), ("adacomp", {}), ("none", {}),
])  # fmt: skip
def test_errors_inside_a_group_name_the_worker_of_the_run(name, options):
    specs = [TensorSpec("m", (64, 64))]
    group = Comm(6).groups(2)[2]
    exchange, plan = exchange_for(name, specs=specs, comm=group, dtype=torch.float32, **options)
    xs_W = gradients(specs, workers=2, dtype=torch.float32).tensors
    residuals = exchange.state.get("m", {}).get("residual_W")
    (xs_W[0] if residuals is None else residuals)[1, 0, 0] = math.inf
    with pytest.raises(NonFinite, match="worker 5"):
        exchange(xs_W, StepInfo(plan, 0, 0.1))


def test_groups_of_processes_know_the_run(monkeypatch):
    """Their collectives give up when the run's do, and their workers have the run's numbers in messages."""
    timeouts = []

    def new_group(ranks, timeout=None):
        timeouts.append(timeout)
        return dist.ProcessGroup(ranks.index(3) if 3 in ranks else 0, len(ranks))

    monkeypatch.setattr(dist, "new_group", new_group)
    comm = Comm(2, processes=4, rank=3)
    comm.timeout = 7.0
    (group,) = comm.groups(4)
    assert timeouts == [datetime.timedelta(seconds=7)] * 2 and group.timeout == 7.0
    assert (group.first_worker, group.first_named) == (2, 6)
    comm.timeout = None
    assert comm.groups(4) and timeouts[2:] == [None] * 2


def test_groups_hold_every_worker_once():
    for size in (1, 2, 3, 6):
        groups = Comm(6).groups(size)
        assert [group.workers for group in groups] == [group.local_workers for group in groups] == [size] * (6 // size)
        x_W = [torch.arange(6.0).view(6, 1)[i * size : (i + 1) * size] for i in range(6 // size)]
        means = [group.all_reduce_mean([rows])[0].item() for group, rows in zip(groups, x_W, strict=True)]
        assert means == [rows.mean().item() for rows in x_W]
    for size in (4, 5, 12):
        with pytest.raises(ValueError, match=f"1 processes of 6 workers cannot form groups of {size}"):
            Comm(6).groups(size)
    with pytest.raises(ValueError, match="2 processes of 3 workers cannot form groups of 2"):
        Comm(3, processes=2).groups(2)
