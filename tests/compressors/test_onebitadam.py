"""1-bit Adam: its identities in float64, what telescopes, dead coordinates, bytes, weight decay, refusals."""

import pytest
import torch
from torch import nn

from accordion_bench import conformance
from accordion_bench.compressors.two_way import cut_shards
from accordion_bench.compressors.uncoded import Dense
from accordion_bench.config.components import build_components
from accordion_bench.conformance.randomness import check_contraction
from accordion_bench.optimizers.elementwise import AdamW, Decay
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.run_config import RunConfig
from tests.compressors.test_dist_ef import SPECS, Problem
from tests.kit import composed, local
from tests.kit.helpers import exchange_for, residuals, server_residuals

WORKERS, STEPS, T_W = 7, 40, 15
B1, B2, EPS = 0.9, 0.999, 1e-8
ADAM = ["compressor=onebitadam", "optimizer=adamw"]


def lr(step: int) -> float:
    return 0.05 * 0.97**step


class Twin:
    """Adam without bias correction whose variance is frozen after some steps, as one writes it down."""

    def __init__(self, shapes, frozen_after: int) -> None:
        self.frozen_after, self.taken = frozen_after, 0
        self.m = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        self.v = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]

    def step(self, means, lr):
        if self.taken < self.frozen_after:
            self.v = [B2 * v + (1 - B2) * g * g for v, g in zip(self.v, means, strict=True)]
        self.m = [B1 * m + (1 - B1) * g for m, g in zip(self.m, means, strict=True)]
        self.taken += 1
        return [lr * m / (v.sqrt() + EPS) for m, v in zip(self.m, self.v, strict=True)]


@pytest.mark.parametrize("freeze_step", [1, T_W, STEPS + 1], ids=["at once", "in mid-run", "after the run"])
def test_without_compression_it_is_adam_with_a_frozen_variance(freeze_step):
    """With C = identity; and with compression up to the freeze, which never comes where it is later than the run."""
    problem = Problem(WORKERS, SPECS)
    exchange, plan = exchange_for("onebitadam", WORKERS, specs=SPECS, freeze_step=freeze_step)
    if freeze_step <= STEPS:
        exchange.compressor.inner.inner = Dense()
    twin = Twin([spec.shape for spec in SPECS], freeze_step)
    xs = [torch.zeros(spec.shape, dtype=torch.float64) for spec in SPECS]
    for step in range(STEPS):
        grads = problem.gradients(xs)
        updates = exchange(grads, StepInfo(plan, step, lr(step)))
        expected = twin.step([g.mean(0) for g in grads], lr(step))
        for ours, theirs in zip(updates, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        xs = [x - u for x, u in zip(xs, updates, strict=True)]


def test_momentum_and_residuals_telescope():
    """m' + mean e' + e~' = b1 m + (1 - b1) mean g + mean e + e~ in every step: nothing is lost, only late."""
    problem = Problem(WORKERS, SPECS)
    exchange, plan = exchange_for("onebitadam", WORKERS, specs=SPECS, freeze_step=T_W)
    xs = [torch.zeros(spec.shape, dtype=torch.float64) for spec in SPECS]

    def kept(spec, with_momentum):
        m = exchange.state[spec.name]["momentum"]
        server = server_residuals(exchange)[spec.name]
        return with_momentum * m + residuals(exchange)[spec.name].mean(0) + server

    largest = 0.0
    for step in range(STEPS):
        grads = problem.gradients(xs)
        before = [kept(spec, B1) for spec in SPECS]
        updates = exchange(grads, StepInfo(plan, step, lr(step)))
        for spec, held, g in zip(SPECS, before, grads, strict=True):
            apart = kept(spec, 1.0) - held - (1 - B1) * g.mean(0)
            assert float(apart.abs().max()) < 1e-12, (step, spec.name)
        xs = [x - u for x, u in zip(xs, updates, strict=True)]
        largest = max(float(e.abs().max()) for e in residuals(exchange).values())
        assert (largest > 0) == (step >= T_W)


def test_the_scale_is_the_root_mean_square():
    """One worker's signs of a frozen step, before and after the owner."""
    spec = TensorSpec("a", (4, 8))
    exchange, plan = exchange_for("onebitadam", 1, specs=[spec], freeze_step=1)
    g = torch.Generator().manual_seed(0)
    first, second = (torch.randn(1, 4, 8, generator=g, dtype=torch.float64) for _ in range(2))
    exchange([first], StepInfo(plan, 0, 1.0))
    m = 0.1 * first[0]
    exchange([second], StepInfo(plan, 1, 1.0))
    sent = 0.9 * m + 0.1 * second[0]
    scale = float(sent.square().mean().sqrt())
    expected = scale * torch.where(sent < 0, -1.0, 1.0).double()
    torch.testing.assert_close(exchange.state["a"]["momentum"], expected, rtol=1e-6, atol=0)


def test_signs_of_that_scale_lose_no_more_than_declared():
    """Up to nearly twice what there was: it is no contraction."""
    make = conformance.from_yaml("efsignsgd", scale="l2")
    outcome = conformance.run(check_contraction, make, levels=[None])
    assert outcome.status == "pass", outcome.text


# ---- coordinates that never had a gradient


def rows_without_gradients(masked: bool, monkeypatch) -> tuple[float, float, float]:
    """(Largest step, largest residual, of an owner) where half of an embedding is never looked at."""
    if not masked:
        monkeypatch.setattr("accordion_bench.compressors.onebitadam.declare_dead", lambda *_: None)
    spec = TensorSpec("embedding", (20, 16))
    exchange, plan = exchange_for("onebitadam", 4, specs=[spec], freeze_step=5)
    step_taken = 0.0
    for step in range(60):
        g = torch.Generator().manual_seed(step)
        x_W = torch.randn(4, 20, 16, generator=g, dtype=torch.float64) * (1 + step)  # which the scale follows
        x_W[:, :, 8:] = 0
        (update,) = exchange([x_W], StepInfo(plan, step, 1.0))
        step_taken = max(step_taken, float(update[:, 8:].abs().max()))
    kept = [
        float(e[..., 8:].abs().max())
        for e in (residuals(exchange)["embedding"], server_residuals(exchange)["embedding"])
    ]
    return step_taken, *kept


def test_coordinates_without_gradients_stay_and_keep_nothing(monkeypatch):
    assert rows_without_gradients(True, monkeypatch) == (0.0, 0.0, 0.0)


def test_without_the_mask_their_residuals_grow(monkeypatch):
    """The negative control."""
    _, residual, owners = rows_without_gradients(False, monkeypatch)
    assert residual > 1 and owners > 1


def test_a_tensor_without_any_gradient_stays():
    specs = [TensorSpec("used", (4, 8)), TensorSpec("unused", (4, 8))]
    exchange, plan = exchange_for("onebitadam", 4, specs=specs, freeze_step=2)
    for step in range(6):
        used = torch.randn(4, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        updates = exchange([used, torch.zeros_like(used)], StepInfo(plan, step, 1.0))
    assert not updates[1].any() and updates[0].all()
    assert not residuals(exchange)["unused"].any()


# ---- bytes


@pytest.mark.parametrize("workers", [1, 4, 7])
def test_bytes(workers):
    """By hand: 4 bytes per coordinate before the freeze; then a bit each and a float per piece, up and down."""
    exchange, plan = exchange_for("onebitadam", workers, specs=SPECS, freeze_step=2, dtype=torch.float32)
    problem = Problem(workers, SPECS)
    xs = [torch.zeros(spec.shape) for spec in SPECS]
    counted = []
    for step in range(4):
        grads = [g.float() for g in problem.gradients(xs)]
        before = exchange.comm.ledger.counts["payload"]
        exchange(grads, StepInfo(plan, step, 0.1))
        counted.append(exchange.comm.ledger.counts["payload"] - before)
        assert abs(counted[-1] / workers - exchange.predicted_bytes(StepInfo(plan, step, 0.1))) < 1
    dense = 4 * sum(spec.numel for spec in SPECS)
    by_name = {spec.name: [p for p in cut_shards(SPECS, workers) if p.name == spec.name] for spec in SPECS}
    message = 0.0
    for spec in SPECS:
        signs = sum(4 + (piece.stop - piece.start + 7) // 8 for piece in by_name[spec.name])
        message += signs * (1 + 1 / workers) if signs < 4 * spec.numel else 4 * spec.numel
    assert counted == [workers * dense] * 2 + [round(workers * message)] * 2


# ---- in a run


class Nothing(torch.optim.SGD):
    """Leaves parameters to the twin."""

    def step(self, closure=None):
        return None


def test_a_run_decays_only_matrices(tmp_path):
    """With C = identity: AdamW's decay beside the frozen step, under a schedule."""
    options = ["optimizer.weight_decay=0.1", "optimizer.decay_on=matrices", "compressor.freeze_step=5"]
    run = local.trainer_for(tmp_path, *ADAM, *options)
    run.sync.exchange.compressor.inner.inner = Dense()
    assert type(run.inner.common).__name__ == "Decay"
    adam = Twin([spec.shape for spec in run.axis.specs], 5)

    def after_step(_, lr, params, optimizers):
        means = [torch.stack([x.grad for x in xs]).mean(0) for xs in zip(*params, strict=True)]
        updates = adam.step(means, lr)
        with torch.no_grad():
            for own in params:
                for x, update in zip(own, updates, strict=True):
                    x.sub_(0.1 * lr * x if x.ndim > 1 else 0).sub_(update)

    theirs = local.twin(run, after_step, Nothing)
    local.fitted(run)
    assert local.deviation(local.consensus(run), theirs[0]) < 1e-11
    assert not run.inner.common.state


def test_decay_is_adamw_on_zero_gradients():
    ours, theirs = ([nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)), nn.Parameter(torch.ones(3))] for _ in range(2))
    options = {"lr": 0.1, "weight_decay": 0.3, "decay_on": "matrices"}
    optimizers = Decay(ours, **options), AdamW(theirs, **options)
    for _ in range(3):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            for param in params:
                param.grad = torch.zeros_like(param)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not optimizers[0].state and not torch.equal(ours[0], torch.linspace(-1, 1, 12).view(3, 4))


def test_the_default_freezes_after_a_share_of_the_run(tmp_path):
    run = local.trainer_for(tmp_path, *ADAM)
    assert run.position.steps_left == 24 and run.exchange.start_step == 4  # 15 % of 24
    local.fitted(run)
    assert "inverse_root" in run.exchange.state["a.weight"]


def test_it_takes_betas_and_eps_of_the_optimizer():
    cfg = composed.cfg(*ADAM, "optimizer.betas=[0.8,0.95]")
    cfg["optimizer"]["eps"] = 1e-3
    compressor = build_components(RunConfig.from_dict(cfg), 4).wrapped.compressor
    assert (compressor.betas, compressor.eps) == ((0.8, 0.95), 1e-3)


# ---- what is refused

REFUSED = {
    "SGD": (
        ["compressor=onebitadam"],
        "optimizer must be adamw, because this compressor takes .*; type optimizer=adamw",
    ),
    "Muon": (["compressor=onebitadam", "optimizer=muon"], "optimizer must be adamw, .*Muon; type optimizer=adamw"),
    "AdamW for another": (["compressor=demo", "optimizer=adamw"], "optimizer must be sgd, .*; type optimizer=sgd"),
    "no step": ([*ADAM, "compressor.freeze_step=0"], "compressor.freeze_step must be an integer of at least 1, got 0"),
    "longer than the run": (
        [*ADAM, "compressor.freeze_step=100000"],
        r"compressor.freeze_step must be below \d+, the steps of the run, .*; type compressor.freeze_step=\d+",
    ),
    "clip after": ([*ADAM, "clip_norm=1", "clip_at=after"], "clip_at must be before where the compressor takes"),
    "local": ([*ADAM, "sync=local_sgd"], "compressor must leave momentum and step to the optimizer where workers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    overrides, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence) as refused:
        composed.validated(composed.cfg("workers=4", "device=cpu", *overrides))
    assert "\n" not in str(refused.value)


def test_error_feedback_is_its_own():
    with pytest.raises(ConfigError, match="error_feedback must be false, because it already has error feedback"):
        exchange_for("onebitadam", error_feedback=True)
