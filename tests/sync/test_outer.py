"""Outer optimizers: SlowMo and DiLoCo against each other, torch's SGD and explicit lists; learning rates of 0."""

import copy

import pytest
import torch

from accordion_bench.sync.outer import Average, OuterSGD, SlowMo
from tests.kit import local
from tests.kit.local import CONSTANT, PLAIN_SGD, deviation, trained, trainer_for

SLOWMO = ["sync=slowmo", "sync.buffers=keep"]
HEAVY_BALL = ["sync=diloco", "sync.outer_nesterov=false"]
SAME = 1e-14


def test_slowmo_without_momentum_is_local_sgd(tmp_path):
    slow = trained(tmp_path, *SLOWMO, "sync.period=5", "sync.beta=0")
    assert deviation(slow.axis.shared, trained(tmp_path, "sync=local_sgd", "sync.period=5").axis.shared) < SAME


@pytest.mark.parametrize("alpha, beta", [(1, 0.5), (0.6, 0.8)])
def test_slowmo_at_a_constant_rate_is_an_outer_heavy_ball(tmp_path, alpha, beta):
    slow = [*SLOWMO, "sync.period=4", f"sync.alpha={alpha}", f"sync.beta={beta}"]
    outer = [*HEAVY_BALL, "sync.period=4", f"sync.outer_lr={alpha}", f"sync.outer_momentum={beta}"]
    assert (
        deviation(trained(tmp_path, *slow, *CONSTANT).axis.shared, trained(tmp_path, *outer, *CONSTANT).axis.shared)
        < SAME
    )
    # under decay SlowMo's buffer is rescaled, the heavy ball's is not
    assert deviation(trained(tmp_path, *slow).axis.shared, trained(tmp_path, *outer).axis.shared) > 1e-3


@pytest.mark.parametrize("schedule", [["schedule.warmup_epochs=2"], []])
def test_slowmo_with_period_1_is_momentum_sgd(tmp_path, schedule):
    """Around plain SGD, across warm-up and drops of the learning rate."""
    slow = trained(tmp_path, *SLOWMO, "sync.period=1", "sync.beta=0.9", *PLAIN_SGD, *schedule)
    momentum = trained(tmp_path, "optimizer.momentum=0.9", "optimizer.weight_decay=0", *schedule)
    assert deviation(slow.axis.shared, momentum.axis.shared) < SAME
    heavy_ball = [*HEAVY_BALL, "sync.period=1", "sync.outer_lr=1", "sync.outer_momentum=0.9"]
    other = trained(tmp_path, *heavy_ball, *PLAIN_SGD, *schedule)
    assert deviation(other.axis.shared, momentum.axis.shared) > 1e-3  # not what a lasting buffer does


@pytest.mark.parametrize("schedule", [[], ["schedule._target_=tests.kit.local.FromZero"]])
def test_slowmo_equals_explicit_lists(tmp_path, schedule):
    """The learning rate changes inside rounds of 5 steps: a round has the one with which it started.

    While that is 0, the workers average and u stays, although they may have moved.
    """
    run = trainer_for(tmp_path, "sync=slowmo", "sync.period=5", "sync.alpha=0.9", "sync.beta=0.6", *schedule)
    z = [x.detach().clone() for x in run.axis.params]
    u = [torch.zeros_like(x) for x in z]
    gamma, rounds = [], []

    def slow(taken, lr, models, optimizers):
        if taken % 5 == 1:
            gamma.append(lr)
        if taken % 5:
            return
        average = local.mean(models)
        rounds.append(deviation(average, z))
        for i, mean in enumerate(average):
            if gamma[-1] == 0:
                z[i] = mean
            else:
                u[i] = 0.6 * u[i] + (z[i] - mean) / gamma[-1]
                z[i] = z[i] - 0.9 * gamma[-1] * u[i]
        local.assign(models, z)
        for optimizer in optimizers:
            optimizer.state.clear()

    local.twin(run, slow)
    seen = []
    local.fitted(run, lambda t: seen.append([x.clone() for x in t.axis.shared]))
    assert deviation(seen[19], z) < SAME and deviation(run.sync.outer.u, u) < 1e-12
    assert rounds[0] > 1e-4 and gamma[0] == (0 if schedule else 0.08) and len(set(gamma)) > 2


@pytest.mark.sample(3)
@pytest.mark.parametrize("nesterov, inner, workers", [
    ("true", "sgd", 4), ("false", "sgd", 4), ("true", "adamw", 4), ("true", "sgd", 1),
])  # fmt: skip
def test_diloco_equals_explicit_lists(tmp_path, nesterov, inner, workers):
    """The outer step is not scheduled, and taken with one worker, too; the inner optimizers keep their buffers."""
    optimizer = [f"optimizer={inner}", "optimizer.lr=0.01"]
    run = trainer_for(
        tmp_path, "sync=diloco", "sync.period=6", f"sync.outer_nesterov={nesterov}", *optimizer, workers=workers
    )
    z = [x.detach().clone() for x in run.axis.params]
    b = [torch.zeros_like(x) for x in z]
    moved = []

    def outer(taken, lr, models, optimizers):
        if taken % 6:
            return
        for i, mean in enumerate(local.mean(models)):
            delta = z[i] - mean
            b[i] = 0.9 * b[i] + delta
            step = delta + 0.9 * b[i] if nesterov == "true" else b[i]
            z[i] = z[i] - 0.7 * step
            moved.append(float((0.7 * step).norm() / delta.norm()))
        local.assign(models, z)

    if inner == "sgd":
        local.twin(run, outer)
    else:
        local.twin(run, outer, kind=torch.optim.AdamW, betas=(0.9, 0.999), weight_decay=0.01)
    local.fitted(run)
    assert deviation(run.axis.shared, z) < SAME
    assert moved[0] == pytest.approx(0.7 * (1.9 if nesterov == "true" else 1))


def test_constant_differences_add_up_to_the_steady_gain():
    """DiLoCo's step tends to 0.7 / (1 - 0.9) = 7 differences, SlowMo's to 1 / (1 - beta), sign: old minus new."""
    for outer, first, gain in ((OuterSGD(), 1.33, 7.0), (SlowMo(1, 0.5), 1.0, 2.0), (Average(), 1.0, 1.0)):
        z, before = [torch.zeros(3, dtype=torch.float64)], torch.zeros(3, dtype=torch.float64)
        steps = []
        for _ in range(300):
            outer.step(z, [torch.ones(3, dtype=torch.float64)], 0.1)
            steps.append(float((before - z[0])[0]))
            before = z[0].clone()
        assert steps[0] == pytest.approx(first) and steps[-1] == pytest.approx(gain)


def test_a_rate_of_0_never_divides():
    outer, z = SlowMo(0.5, 0.5), [torch.ones(2)]
    outer.step(z, [torch.full((2,), 0.25)], 0.0)
    assert torch.equal(z[0], torch.full((2,), 0.75)) and outer.u == []  # the plain average, whatever alpha is
    outer.step(z, [torch.full((2,), 0.25)], 0.5)
    u = outer.u[0].clone()
    outer.step(z, [torch.zeros(2)], 0.0)
    assert torch.equal(outer.u[0], u) and torch.equal(z[0], torch.full((2,), 0.625))


@pytest.mark.parametrize("sync", ["slowmo", "diloco"])
def test_the_tail_is_a_plain_average(tmp_path, sync):
    """The outer step belongs to whole rounds."""
    before = []

    def watch(trainer):
        before[:] = [local.mean(local.replicas(trainer)), [u.clone() for u in getattr(trainer.sync.outer, "u", [])]]

    run = trained(tmp_path, f"sync={sync}", "sync.period=5", watch=watch)
    assert deviation(run.axis.shared, before[0]) < SAME
    assert sync == "diloco" or deviation(run.sync.outer.u, before[1]) == 0


@pytest.mark.parametrize("make", [SlowMo, OuterSGD, lambda: OuterSGD(1, 0, False)])
def test_state_before_and_after_the_first_step(make):
    """A run may stop before anything was averaged."""
    for steps in (0, 1):
        outer, z = make(), [torch.ones(3)]
        for _ in range(steps):
            outer.step(z, [torch.full((3,), 0.5)], 0.1)
        state, kept, twin = copy.deepcopy(outer.buffers(z)), [x.clone() for x in z], make()
        torch._foreach_copy_([*twin.buffers(kept), torch.zeros(1)], [*state, torch.zeros(1)])  # there may be none
        for one, values in ((outer, z), (twin, kept)):
            one.step(values, [torch.full((3,), 0.25)], 0.1)
        assert torch.equal(z[0], kept[0])
