"""Dion: against an obvious twin, one worker with the mean gradient, whose step is whose, edge cases, bytes."""

import math

import pytest
import torch

from accordion_bench.compressors.dion import unit_rows
from accordion_bench.models.transformer import GPT
from accordion_bench.optimizers.inner import tables_of
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng
from tests.kit import composed, tiny
from tests.kit.helpers import SPECS, exchange_for, gradients
from tests.kit.local import Smooth, deviation, trained, trainer_for

MATRICES = [spec for spec in SPECS if spec.ndim > 1 and min(spec.matrix) > 1]


class Twin:
    """Dion of one worker as one writes it down: one matrix, one line at a time; float64."""

    def __init__(self, rank, mu=0.95, seed=3):
        self.rank, self.mu, self.seed = rank, mu, seed
        self.M, self.Q = {}, {}

    def step(self, spec, gradient, step, eta):
        """What is subtracted from the parameter."""
        n, m = spec.matrix
        G = gradient.reshape(n, m) if n >= m else gradient.reshape(n, m).T
        if spec.name not in self.Q:
            r = min(n, m, self.rank)
            generator = keyed_rng.generator(self.seed, "dion", spec.name, step, r)
            self.Q[spec.name] = torch.randn(min(n, m), r, generator=generator, dtype=torch.float64)
            self.M[spec.name] = torch.zeros_like(G)
        M = self.M[spec.name] + G
        P, _ = torch.linalg.qr(M @ self.Q[spec.name])
        R = M.T @ P
        self.M[spec.name] = M - (1 - self.mu) * P @ R.T
        self.Q[spec.name] = R / R.norm(dim=0)
        update = eta * math.sqrt(n / m) * P @ self.Q[spec.name].T
        return (update if n >= m else update.T).reshape(spec.shape)


@pytest.mark.parametrize("rank", [1, 2, 5, 100])
@pytest.mark.parametrize("workers", [1, 4])
def test_workers_take_the_step_of_one_with_the_mean_gradient(rank, workers):
    """The update at any rank, and mean_w M_w; at rank 5 some momenta travel whole, at 100 all do."""
    exchange, plan = exchange_for("dion", workers, rank=rank, lr_factor=2.0)
    twin = Twin(rank)
    for step in range(12):
        xs_W = gradients(workers=workers, step=step).tensors
        updates = exchange(xs_W, StepInfo(plan, step, 0.1 + 0.01 * step))
        for spec, x_W, update in zip(SPECS, xs_W, updates, strict=True):
            expected = x_W.mean(0)
            if spec in MATRICES:
                expected = twin.step(spec, expected, step, 2 * (0.1 + 0.01 * step))
                mean = exchange.state[spec.name]["momentum_W"].mean(0).reshape(spec.matrix)
                wanted = twin.M[spec.name] if spec.matrix[0] >= spec.matrix[1] else twin.M[spec.name].T
                torch.testing.assert_close(mean, wanted, rtol=1e-8, atol=1e-9)
            torch.testing.assert_close(update, expected, rtol=1e-8, atol=1e-9)


def test_momenta_stay_with_their_workers():
    exchange, plan = exchange_for("dion", rank=2)
    for step in range(3):
        exchange(gradients(step=step).tensors, StepInfo(plan, step, 0.1))
    for spec in MATRICES:
        M_W = exchange.state[spec.name]["momentum_W"]
        assert not torch.equal(M_W[0], M_W[1]) and M_W.shape == (4, *spec.shape)


def test_a_full_rank_step_moves_all_directions_alike():
    """P and Q of a square matrix in its full rank converge to its singular vectors."""
    specs = [TensorSpec("m", (12, 12))]
    exchange, plan = exchange_for("dion", 1, specs, rank=12, lr_factor=1.0)
    x = torch.diag(2.0 ** -torch.arange(12, dtype=torch.float64)) @ torch.linalg.qr(torch.randn(12, 12).double()).Q
    for step in range(60):
        (update,) = exchange([x[None].clone()], StepInfo(plan, step, 0.1))
    torch.testing.assert_close(torch.linalg.svdvals(update), torch.full((12,), 0.1).double(), rtol=1e-3, atol=0)


# ---- bytes


@pytest.mark.parametrize("rank", [1, 4, 16, 1000])
def test_bytes(rank):
    """4 r (n + m) for each matrix, but no more than 4 n m."""
    exchange, plan = exchange_for("dion", dtype=torch.float32, rank=rank)
    expected = 0
    for spec in SPECS:
        n, m = spec.matrix
        expected += 4 * min(n * m, min(n, m, rank) * (n + m)) if spec in MATRICES else 4 * spec.numel
    assert exchange.predicted_bytes(StepInfo(plan, 0)) == expected
    exchange(gradients(dtype=torch.float32).tensors, StepInfo(plan, 0, 0.1))
    assert exchange.comm.ledger.columns()["payload_bytes"] == expected


# ---- edges


@pytest.mark.parametrize("rank", [1, 3])
def test_a_matrix_without_momentum_rests_and_moves_with_its_first_gradient(rank):
    specs = [TensorSpec("m", (12, 20)), TensorSpec("n", (12, 20))]
    exchange, plan = exchange_for("dion", specs=specs, rank=rank)
    twin, plan2 = exchange_for("dion", specs=specs, rank=rank)
    xs_W = gradients(specs).tensors
    for step in range(2):
        half = [xs_W[0], torch.zeros_like(xs_W[1])]
        moved, rests = exchange([x.clone() for x in half], StepInfo(plan, step, 0.1))
        assert (rests == 0).all() and moved.norm() > 0
        assert torch.equal(twin([xs_W[0], xs_W[0]], StepInfo(plan2, step, 0.1))[0], moved)
    _, update = exchange(xs_W, StepInfo(plan, 2, 0.1))
    assert update.norm() > 0 and torch.cosine_similarity(update.flatten(), xs_W[1].mean(0).flatten(), dim=0) > 0


@pytest.mark.parametrize("rank", [1, 2, 8])
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1.0, 1e15, 1e30])
def test_any_scale_gives_the_same_step(rank, scale):
    exchange, plan = exchange_for("dion", rank=rank, dtype=torch.float32)
    plain, _ = exchange_for("dion", rank=rank, dtype=torch.float32)
    for step in range(3):
        xs_W = gradients(dtype=torch.float32, step=step).tensors
        expected = plain(xs_W, StepInfo(plan, step, 0.1))
        updates = exchange([x * scale for x in xs_W], StepInfo(plan, step, 0.1))
        for spec, update, other in zip(SPECS, updates, expected, strict=True):
            if spec in MATRICES:
                torch.testing.assert_close(update, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("seed", range(20))
def test_directions_that_are_rounding_are_not_blown_up(seed):
    """A gradient of rank 1 at rank 4: three columns of R are nothing but rounding, more of it the more Q misses it."""
    specs = [TensorSpec("m", (64, 96))]
    exchange, plan = exchange_for("dion", specs=specs, rank=4, lr_factor=1.0, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    u, v = torch.randn(64, generator=generator), torch.randn(96, generator=generator)
    for step in range(5):
        (update,) = exchange([torch.outer(u, v).expand(4, 64, 96).clone()], StepInfo(plan, step, 1.0))
        values = torch.linalg.svdvals(update)
        assert values[0] == pytest.approx(math.sqrt(64 / 96), rel=1e-4) and values[1] < 1e-3


def test_unit_rows():
    rows = torch.tensor([[[3.0, 4.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[1e-3, 0.0], [1e5, 0.0]]])
    expected = torch.tensor([[[0.6, 0.8], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 0.0]]])
    torch.testing.assert_close(unit_rows(rows), expected)
    torch.testing.assert_close(unit_rows(1e-38 * rows[:1]), expected[:1])
    torch.testing.assert_close(unit_rows(1e33 * rows[:1]), expected[:1])


def test_a_policy_may_change_the_rank():
    exchange, plan = exchange_for("dion", rank=2)
    exchange.ladder = Ladder("rank", (1, 2, 4, 16))
    for step, level in enumerate([1, 0, 2, 3, 1, 3]):
        xs_W = gradients(step=step).tensors
        updates = exchange(xs_W, StepInfo(Plan(dict.fromkeys(plan.levels, level), 1), step, 0.1))
        for x_W, update in zip(xs_W, updates, strict=True):
            assert update.isfinite().all()
            assert torch.cosine_similarity(update.flatten(), x_W.mean(0).flatten(), dim=0) > 0.1


# ---- whose step is whose


def split_run(tmp_path, *typed, workers=4, watch=None):
    return trained(tmp_path, "compressor=dion", "optimizer=adamw", "epochs=1", *typed, workers=workers, watch=watch)


def test_matrices_are_dions_and_the_rest_is_adamws(tmp_path):
    """By hand, with AdamW's decay on the matrices, too; the output layer is no matrix."""
    options = ["compressor.rank=3", "compressor.lr_factor=5", "optimizer.weight_decay=0.1", "seed=3"]
    trainer = trainer_for(tmp_path, "compressor=dion", "optimizer=adamw", "epochs=1", *options)
    axis = trainer.axis
    assert [(spec.name, spec.table) for spec in axis.specs] == [
        ("a.weight", False), ("a.bias", False), ("b.weight", True), ("b.bias", False),
    ]  # fmt: skip
    twin, model = Twin(3), Smooth(3, 10)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), axis.params, strict=True):
            mine.copy_(theirs)
    rest = [param for name, param in model.named_parameters() if name != "a.weight"]
    adamw = torch.optim.AdamW(rest, lr=1.0, weight_decay=0.1)
    before_step = trainer.sync.before_step

    def by_hand(lr):
        means = [x_W.mean(0) for x_W in axis.gradients_W]
        completed = before_step(lr)
        for param, gradient in zip(model.parameters(), means, strict=True):
            param.grad = gradient
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        with torch.no_grad():
            taken = twin.step(axis.specs[0], means[0], trainer.position.step, 5 * lr)
            model.a.weight.mul_(1 - 0.1 * lr).sub_(taken)
        return completed

    trainer.sync.before_step = by_hand
    trainer.fit()
    assert trainer.position.step == 6
    assert deviation(list(model.parameters()), axis.shared) < 1e-10


def test_before_start_step_all_is_adamws(tmp_path):
    seen = []

    def watch(trainer):
        seen.append(trainer.sync._taken)

    split_run(tmp_path, "compressor.start_step=2", watch=watch)
    assert seen[:2] == [[False] * 4] * 2 and seen[2:] == [[True, False, False, False]] * 4


def test_tables_of_a_transformer_are_not_taken():
    model = GPT(256, 2, 2, 32)
    tables = tables_of(model)
    assert tables == {"embedding.weight", "position_embedding.weight"}
    specs = [TensorSpec(name, tuple(p.shape), name in tables) for name, p in model.named_parameters()]
    exchange, plan = exchange_for("dion", specs=specs, dtype=torch.float32)
    assert not plan.levels.keys() & tables
    taken = exchange.steps_taken(StepInfo(plan, 0))
    names = [spec.name for spec, it_is in zip(specs, taken, strict=True) if it_is]
    assert len(names) == 8 and all("blocks" in name and name.endswith("weight") for name in names)
    assert set(exchange.state) == set(names)


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_another_optimizer_is_refused(tmp_path, optimizer):
    with pytest.raises(ConfigError, match=r"optimizer must be adamw, .* type optimizer=adamw"):
        composed.validated(tiny.cfg(tmp_path, "compressor=dion", f"optimizer={optimizer}"))


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["sync=diloco"], "compressor must leave momentum and step to the optimizer where workers take local steps"),
        (["clip_norm=1", "clip_at=after"], "clip_at must be before where the compressor takes the step itself"),
    ],
)
def test_what_does_not_go_beside_it_is_refused(tmp_path, typed, told):
    with pytest.raises(ConfigError, match=told):
        composed.validated(tiny.cfg(tmp_path, "compressor=dion", "optimizer=adamw", *typed))


BAD = [{"rank": 0}, {"rank": 1.5}, {"momentum": 1}, {"momentum": -0.1}, {"lr_factor": 0}, {"error_feedback": True}]


@pytest.mark.parametrize("options", BAD)
def test_bad_options(options):
    with pytest.raises(ConfigError, match="compressor." + next(iter(options))):
        exchange_for("dion", **options)
