"""Dion2: against its equations in float64, one worker with the mean gradient, whose decay, bytes, refusals."""

import math

import pytest
import torch

from accordion_bench.optimizers.elementwise import AdamW
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from tests.kit import composed
from tests.kit.helpers import SPECS, exchange_for, gradients
from tests.kit.local import Smooth, deviation, trained, trainer_for

MATRICES = [spec for spec in SPECS if spec.ndim > 1 and min(spec.matrix) > 1]


def newton_schulz(X):
    """Of a matrix with no more rows than columns, as Muon's authors write it."""
    X = X / X.norm()
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


def short_first(spec, x):
    n, m = spec.matrix
    return x.reshape(n, m) if n <= m else x.reshape(n, m).T


class Twin:
    """Every worker's momentum, row by row; `K` of the last step is kept."""

    def __init__(self, density, mu=0.95):
        self.density, self.mu, self.M, self.K = density, mu, {}, {}

    def step(self, spec, gradients, eta):
        """What is subtracted from the parameter."""
        n, m = spec.matrix
        Ms = self.M.setdefault(spec.name, [torch.zeros_like(short_first(spec, g)) for g in gradients])
        for M, g in zip(Ms, gradients, strict=True):
            M += short_first(spec, g)
        s = min(n, m)
        k = math.ceil(self.density * s - 1e-9)
        norms = [sum(float(M[i].abs().sum()) for M in Ms) / len(Ms) for i in range(s)]
        K = self.K[spec.name] = sorted(sorted(range(s), key=lambda i: (-norms[i], i))[:k])
        U = newton_schulz(sum(M[K] for M in Ms) / len(Ms))
        update = torch.zeros_like(Ms[0])
        update[K] = eta * math.sqrt(n / m) * U
        for M in Ms:
            M[K] *= self.mu
        return (update if n <= m else update.T).reshape(spec.shape)


@pytest.mark.parametrize("density", [0.05, 0.25, 0.5, 1])
@pytest.mark.parametrize("workers", [1, 3])
def test_as_its_equations(density, workers):
    exchange, plan = exchange_for("dion2", workers, density=density, lr_factor=2.0)
    twin = Twin(density)
    for step in range(8):
        xs_W, eta = gradients(workers=workers, step=step).tensors, 0.1 + 0.01 * step
        updates = exchange([x_W.clone() for x_W in xs_W], StepInfo(plan, step, eta))
        for spec, x_W, update in zip(SPECS, xs_W, updates, strict=True):
            expected = twin.step(spec, x_W, 2 * eta) if spec in MATRICES else x_W.mean(0)
            torch.testing.assert_close(update, expected, rtol=1e-10, atol=1e-10)
            for w in range(workers if spec in MATRICES else 0):
                momentum = short_first(spec, exchange.state[spec.name]["momentum_W"][w])
                torch.testing.assert_close(momentum, twin.M[spec.name][w], rtol=1e-10, atol=1e-10)


def test_given_the_rows_workers_move_as_one_with_the_mean_gradient():
    """The update and mean_w M_w; with every row sent there is nothing to choose."""
    exchange, plan = exchange_for("dion2", density=1)
    alone, _ = exchange_for("dion2", 1, density=1)
    for step in range(6):
        xs_W = gradients(step=step).tensors
        ours = exchange([x_W.clone() for x_W in xs_W], StepInfo(plan, step, 0.1))
        theirs = alone([x_W.mean(0, keepdim=True) for x_W in xs_W], StepInfo(plan, step, 0.1))
        assert deviation(ours, theirs) < 1e-10
    for spec in MATRICES:
        mean = exchange.state[spec.name]["momentum_W"].mean(0)
        assert float((mean - alone.state[spec.name]["momentum_W"][0]).abs().max()) < 1e-10


def test_the_lower_of_equal_rows_is_sent_and_a_matrix_of_zeros_rests():
    specs = [TensorSpec("m", (40, 8)), TensorSpec("zero", (8, 40))]
    exchange, plan = exchange_for("dion2", 2, specs)
    ones = torch.ones(2, 40, 8, dtype=torch.float64)
    moved, rests = exchange([ones, torch.zeros(2, 8, 40, dtype=torch.float64)], StepInfo(plan, 0, 0.1))
    assert moved[:, :2].abs().min() > 0 and not moved[:, 2:].any() and not rests.any()


@pytest.mark.parametrize("scale", [1e-30, 1e15, 1e30])
def test_any_scale_gives_the_same_step(scale):
    exchange, plan = exchange_for("dion2", dtype=torch.float32)
    plain, _ = exchange_for("dion2", dtype=torch.float32)
    xs_W = gradients(dtype=torch.float32).tensors
    expected = plain(xs_W, StepInfo(plan, 0, 0.1))
    updates = exchange([x * scale for x in xs_W], StepInfo(plan, 0, 0.1))
    for spec, update, other in zip(SPECS, updates, expected, strict=True):
        if spec in MATRICES:
            torch.testing.assert_close(update, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("density", [0.01, 0.25, 1])
def test_bytes(density):
    """4 (s + k l) for each matrix, 4 n m where every row is sent."""
    exchange, plan = exchange_for("dion2", dtype=torch.float32, density=density)
    expected = 0
    for spec in SPECS:
        s, longer = min(spec.matrix), max(spec.matrix)
        k = math.ceil(density * s - 1e-9)
        expected += 4 * (s + k * longer if k < s else s * longer) if spec in MATRICES else 4 * spec.numel
    assert exchange.predicted_bytes(StepInfo(plan, 0)) == expected
    exchange(gradients(dtype=torch.float32).tensors, StepInfo(plan, 0, 0.1))
    assert exchange.comm.ledger.columns()["payload_bytes"] == expected


def test_a_policy_may_change_the_density():
    exchange, plan = exchange_for("dion2")
    exchange.ladder = Ladder("density", (0.1, 0.5, 1.0))
    for step, level in enumerate([1, 0, 2, 0]):
        updates = exchange(
            gradients(step=step).tensors, StepInfo(Plan(dict.fromkeys(plan.levels, level), 1), step, 0.1)
        )
        assert all(update.isfinite().all() and update.any() for update in updates)


# ---- decay


@pytest.mark.parametrize("name, knob", [("dion", "rank=3"), ("dion2", "density=0.5")])
@pytest.mark.parametrize("own", [True, False])
def test_matrices_decay_at_their_own_rate_or_the_optimizers(tmp_path, name, knob, own):
    """By hand: x <- (1 - f lr lambda) x - step, of the hidden matrix; the rest is AdamW's."""
    typed = [f"compressor={name}", f"compressor.{knob}", "optimizer=adamw", "optimizer.weight_decay=0.1", "epochs=1"]
    typed += ["compressor.lr_factor=5", f"compressor.own_decay={own}", "optimizer.lr=0.05"]
    run = trainer_for(tmp_path, *typed)
    model = Smooth(3, 10)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), run.axis.params, strict=True):
            mine.copy_(theirs)
    adamw = AdamW(list(model.parameters())[1:], lr=1.0, weight_decay=0.1)
    before_step = run.sync.before_step

    def by_hand(lr):
        means = [x_W.mean(0) for x_W in run.axis.gradients_W]
        completed = before_step(lr)
        for param, gradient in zip(model.parameters(), means, strict=True):
            param.grad = gradient
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        with torch.no_grad():
            model.a.weight.mul_(1 - (5 if own else 1) * lr * 0.1).sub_(run.sync._updates[0])
        return completed

    run.sync.before_step = by_hand
    run.fit()
    assert deviation(list(model.parameters()), run.axis.shared) < 1e-12


def test_its_own_decay_is_another_training(tmp_path):
    runs = [
        trained(tmp_path / own, "compressor=dion2", "optimizer=adamw", f"compressor.own_decay={own}", "epochs=1")
        for own in ("true", "false")
    ]
    assert deviation(runs[0].axis.shared, runs[1].axis.shared) > 1e-4


@pytest.mark.parametrize("typed, told", [
    (["compressor.density=0"], "compressor.density must be a number above 0 and at most 1, got 0; type .*=0.25"),
    (["compressor.density=1.5"], "compressor.density must be a number above 0 and at most 1, got 1.5; type"),
    (["compressor.own_decay=2"], "compressor.own_decay must be true or false, got 2; type"),
    (["compressor.ns_precision=half"], "compressor.ns_precision must be null or bfloat16, got half; type"),
    (["compressor.ns_steps=0"], "compressor.ns_steps must be an integer of at least 1, got 0; type"),
    (["optimizer=sgd"], "optimizer must be adamw, because .*; type optimizer=adamw"),
])  # fmt: skip
def test_refused_in_a_sentence(typed, told):
    beside = [] if typed[0].startswith("optimizer") else ["optimizer=adamw"]
    with pytest.raises(ConfigError, match=told):
        composed.validated(composed.cfg("compressor=dion2", "workers=4", *beside, *typed))
