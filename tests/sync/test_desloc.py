"""DES-LOC against Adam with explicit lists; averaging everything in each step; bytes by period."""

import copy

import pytest
import torch
import torch.nn.functional as F

from accordion_bench.options.checks import ConfigError
from accordion_bench.sync.partial import DesLoc
from tests.kit import local
from tests.kit.local import deviation, trained, trainer_for

DESLOC, SAME = ["sync=desloc", "optimizer=adamw"], 1e-12
ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "decay": 0.01}


def by_the_paper(run, K_x, K_u, K_v, rho):
    """Every worker's (x, u, v) after each step of Adam, with a bias that is corrected and a decay of its own."""
    A, b1, b2 = run.comm.workers, ADAM["b1"], ADAM["b2"]
    models = [copy.deepcopy(run.axis.model) for _ in range(A)]
    x = [list(model.parameters()) for model in models]
    u = [[torch.zeros_like(p) for p in own] for own in x]
    v = [[torch.zeros_like(p) for p in own] for own in x]
    t, history = 0, []
    for epoch in range(run.config.epochs):
        run.sampler.begin_epoch(epoch, run.position.plan.batch_size)
        run.data.begin_epoch(epoch)
        for step in range(run.position.steps_per_epoch):
            t, eta = t + 1, run.position.lr(step, epoch)
            for w in range(A):
                images, labels = run.data.train_batch(run.sampler.batch(w, step))
                gradients = torch.autograd.grad(F.cross_entropy(models[w](images), labels), x[w])
                with torch.no_grad():
                    for i, g in enumerate(gradients):
                        g = g if rho is None else torch.minimum(torch.maximum(g, g * 0 - rho), g * 0 + rho)
                        u[w][i] = b1 * u[w][i] + (1 - b1) * g
                        v[w][i] = b2 * v[w][i] + (1 - b2) * g**2
                        root = (v[w][i] / (1 - b2**t)) ** 0.5 + ADAM["eps"]
                        x[w][i] -= eta * ADAM["decay"] * x[w][i] + eta * u[w][i] / (1 - b1**t) / root
            for values, K in ((x, K_x), (u, K_u), (v, K_v)):
                if t % K == 0:
                    local.assign(values, local.mean(values))
            history.append([[p.detach().clone() for p in own] for own in (*x, *u, *v)])
    return history


def seen(trainer):
    pairs = list(zip(trainer.inner.of_replicas, trainer.axis.replicas, strict=True))
    moments = [[[o.state[p][key].clone() for p in own] for o, own in pairs] for key in ("exp_avg", "exp_avg_sq")]
    return [*local.replicas(trainer), *moments[0], *moments[1]]


@pytest.mark.parametrize("periods, rho, workers", [
    ((2, 4, 6), 0.02, 4), ((1, 1, 1), None, 4), ((3, 3, 9), None, 3), ((2, 2, 2), 0.05, 1),
])  # fmt: skip
def test_equals_the_papers_equations(tmp_path, periods, rho, workers):
    K_x, K_u, K_v = periods
    options = [f"sync.period={K_x}", f"sync.momentum_period={K_u}", f"sync.variance_period={K_v}"]
    options += ["sync.clip=null" if rho is None else f"sync.clip={rho}", "epochs=2"]
    run = trainer_for(tmp_path, *DESLOC, *options, workers=workers)
    expected, found = by_the_paper(run, K_x, K_u, K_v, rho), []
    local.fitted(run, lambda t: found.append(seen(t)))
    assert len(found) == len(expected) >= 12
    assert max(deviation(a, b) for ours, theirs in zip(found, expected, strict=True)
               for a, b in zip(ours, theirs, strict=True)) < SAME  # fmt: skip
    if rho is not None and workers > 1:
        free = by_the_paper(trainer_for(tmp_path / "free", *DESLOC, "epochs=1", workers=workers), K_x, K_u, K_v, None)
        assert deviation(free[0][0], expected[0][0]) > 1e-12  # some coordinate was clipped


def test_periods_of_one_are_averaging_everything_in_each_step(tmp_path):
    """In both the local optimizers stay equal; bit for bit, because the same is averaged in the same order."""
    ones = [f"sync.{key}=1" for key in ("period", "momentum_period", "variance_period")]
    desloc, everything = [], []
    trained(tmp_path, *DESLOC, *ones, watch=lambda t: desloc.append(seen(t)))
    other = ["sync=local_sgd", "sync.period=1", "sync.buffers=average", "optimizer=adamw"]
    trained(tmp_path, *other, watch=lambda t: everything.append(seen(t)))
    for ours, theirs in zip(desloc, everything, strict=True):
        assert all(local.all_equal(pair) for pair in zip(ours, theirs, strict=True))
        assert all(local.all_equal(ours[i : i + 4]) for i in (0, 4, 8))


@pytest.mark.parametrize("optimizer, models", [("adamw", 1 + 1 / 3 + 1 / 6), ("sgd", 1 + 1 / 3)])
def test_bytes_are_models_by_period(tmp_path, optimizer, models):
    """12 averagings of parameters, 4 of first moments, 2 of second ones."""
    typed = ["model._target_=tests.kit.models.Plain", "sync=desloc", f"optimizer={optimizer}", "sync.period=2"]
    run = trained(tmp_path, *typed)
    d, columns = sum(spec.numel for spec in run.axis.specs), run.comm.ledger.columns()
    assert columns["payload_bytes"] == round(12 * models * 4 * d)


@pytest.mark.parametrize("options, told", [
    ({"momentum_period": 5}, "momentum_period must be a multiple of period=4, got 5"),
    ({"variance_period": 6}, "variance_period must be a multiple of period=4, got 6"),
    ({"variance_period": 0}, "variance_period must be an integer of at least 1, got 0"),
    ({"clip": 0}, "clip must be a number above 0, got 0"),
    ({"clip": float("nan")}, "clip must be a (finite )?number"),
])  # fmt: skip
def test_options_that_do_not_fit(options, told):
    with pytest.raises(ConfigError, match=told):
        DesLoc(4, **options)
