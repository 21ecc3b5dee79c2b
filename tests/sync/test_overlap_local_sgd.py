"""Overlap Local-SGD and CoCoD-SGD against explicit lists."""

import pytest
import torch

from tests.kit import local
from tests.kit.local import deviation, trained, trainer_for

OVERLAP, SAME = "sync=overlap_local_sgd", 1e-14


def reference(run, period, delay, alpha, beta):
    """A z that is used `delay` steps after its launch; v per worker; gamma as at the start of the round."""
    start = [x.detach().clone() for x in run.axis.params]
    at = {"z": start, "next": start, "gamma": 0.0, "pulled": []}
    v = [[torch.zeros_like(x) for x in start] for _ in range(run.comm.workers)]

    @torch.no_grad()
    def after_step(taken, lr, models, optimizers):
        position = (taken - 1) % period + 1
        if position == 1:
            at["gamma"] = lr
        if position == delay:
            at["z"] = at["next"]
            for own in models:
                for x, z in zip(own, at["z"], strict=True):
                    x.copy_((1 - alpha) * x + alpha * z)
        if position == period:
            gamma, targets = at["gamma"], []
            for own, mine in zip(models, v, strict=True):
                for i, (x, z) in enumerate(zip(own, at["z"], strict=True)):
                    if gamma:
                        mine[i] = beta * mine[i] + (z - x) / gamma
                sent = [gamma * m if gamma else z - x for m, z, x in zip(mine, at["z"], own, strict=True)]
                targets.append([z - s for z, s in zip(at["z"], sent, strict=True)])
            at["next"] = local.mean(targets)

    return after_step, at, v


@pytest.mark.sample(5)
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("period, delay, alpha, beta, schedule", [
    (2, None, 0.6, 0.7, []),
    (5, None, 0.6, 0.7, []),
    (5, 2, 0.6, 0.7, []),
    (5, 1, 1.0, 0.5, []),
    (5, None, 0.3, 0.0, []),
    (5, None, 0.6, 0.7, ["schedule._target_=tests.kit.local.FromZero"]),
])  # fmt: skip
def test_pull_back_equals_explicit_lists(tmp_path, period, delay, alpha, beta, schedule, workers):
    options = [f"sync.period={period}", f"sync.merge_alpha={alpha}", f"sync.beta={beta}", *schedule]
    options += [f"sync.delay={delay}"] if delay else []
    run = trainer_for(tmp_path, OVERLAP, *options, workers=workers)
    after_step, at, v = reference(run, period, delay or period, alpha, beta)
    models = local.twin(run, after_step)
    last = []
    local.fitted(run, lambda t: last.__setitem__(slice(None), [local.replicas(t), [z.clone() for z in t.axis.shared]]))
    for ours, plain in zip(last[0], models, strict=True):
        assert deviation(ours, plain) < 1e-13
    assert deviation(last[1], at["z"]) < 1e-13
    for row, mine in enumerate(v if beta else []):
        assert deviation([x_W[row] for x_W in run.sync.momentum_W], mine) < 1e-11
    # in the end there is one exact average, of what the workers are
    assert deviation(run.axis.shared, local.mean(models)) < 1e-13 and local.all_equal(local.replicas(run))


def test_without_momentum_the_next_consensus_is_the_mean_of_the_pulled_back(tmp_path):
    apart, moved = [], []

    def watch(trainer):
        if trainer.position.step % 3 == 0:
            coming = [z - d for z, d in zip(trainer.axis.shared, trainer.sync.in_flight.updates, strict=True)]
            apart.append(deviation(coming, local.mean(local.replicas(trainer))))
            moved.append(deviation(coming, trainer.axis.shared))

    trained(tmp_path, OVERLAP, "sync.period=3", "sync.beta=0", watch=watch)
    assert len(apart) == 8 and max(apart) < SAME and min(moved) > 1e-5


def test_the_first_round_is_pulled_to_the_start(tmp_path):
    """The consensus of the first round is the common start."""
    run = trainer_for(tmp_path, OVERLAP, "sync.period=3", "sync.merge_alpha=0.25", "epochs=1")
    start, seen = [x.detach().clone() for x in run.axis.params], []
    pull = run.axis.pull

    def spied(anchor, alpha, tensors):
        before = local.replicas(run)
        assert deviation(list(anchor), start) == 0 or seen
        pull(anchor, alpha, tensors)
        for own, now in zip(before, local.replicas(run), strict=True):
            expected = [0.75 * x + 0.25 * z for x, z in zip(own, anchor, strict=True)]
            seen.append(deviation(now, expected))

    run.axis.pull = spied
    local.fitted(run)
    assert len(seen) == 8 and max(seen) < SAME


@pytest.mark.parametrize("delay", ["null", "1", "2"])
def test_cocod_keeps_the_mean_of_the_workers(tmp_path, delay):
    """x <- x + mean x_old - x_old; every worker goes on with its own steps since the launch."""
    run = trainer_for(tmp_path, OVERLAP, "sync.period=3", f"sync.delay={delay}", "sync.merge=cocod", "sync.beta=0")
    use, apart, launched = run.sync.use, [], []

    def spied():
        before = local.replicas(run)
        use()
        after = local.replicas(run)
        apart.append(deviation(local.mean(before), local.mean(after)))
        if launched:
            expected = [
                [x + m - old for x, m, old in zip(own, local.mean(launched), mine, strict=True)]
                for own, mine in zip(before, launched, strict=True)
            ]
            assert max(deviation(a, b) for a, b in zip(after, expected, strict=True)) < SAME

    run.sync.use = spied
    local.fitted(
        run, lambda t: launched.__setitem__(slice(None), local.replicas(t)) if t.position.step % 3 == 0 else None
    )
    assert len(apart) == 8 and max(apart) < SAME


def test_nobody_learns_of_the_others_before_the_delay(tmp_path):
    """With one worker's data changed, the others' parameters change only when the average is used."""

    def seen(poisoned):
        run = trainer_for(tmp_path, OVERLAP, "sync.period=4", "sync.delay=2", "epochs=2")
        backward = run.axis.backward

        def changed(row, *rest):
            loss = backward(row, *rest)
            if poisoned and row == 3:
                for g_W in run.axis.gradients_W:
                    g_W[3].mul_(2)
            return loss

        run.axis.backward = changed
        found = []
        local.fitted(run, lambda t: found.append(local.replicas(t)[0]))
        return found

    apart = [deviation(a, b) for a, b in zip(seen(False), seen(True), strict=True)]
    assert apart[:5] == [0] * 5 and apart[5] > 1e-4  # launched after step 4, used after step 6


@pytest.mark.parametrize("merge", [["sync.beta=0.7"], ["sync.merge=cocod", "sync.beta=0"]])
def test_bytes_are_those_of_local_sgd(tmp_path, merge):
    """One average per round, and the exact one at the end."""
    run = trained(tmp_path, "model._target_=tests.kit.models.Plain", OVERLAP, "sync.period=4", *merge)
    d = sum(spec.numel for spec in run.axis.specs)
    assert run.comm.ledger.columns()["payload_bytes"] == (6 + 1) * 4 * d


def test_buffers_follow_their_policy_when_an_average_is_used(tmp_path):
    found = {}
    for buffers in ("keep", "reset", "average"):

        def watch(trainer, buffers=buffers):
            if trainer.position.step == 2:
                found[buffers] = [trainer.inner.of_replicas[w].state[trainer.axis.replicas[w][0]] for w in range(4)]
                found[buffers] = [dict(state) for state in found[buffers]]

        trained(tmp_path, OVERLAP, f"sync.buffers={buffers}", "epochs=1", watch=watch)
    buffer = {key: [state.get("momentum_buffer") for state in states] for key, states in found.items()}
    assert buffer["reset"] == [None] * 4
    assert torch.equal(buffer["average"][0], buffer["average"][3])
    assert not torch.equal(buffer["keep"][0], buffer["keep"][3])
