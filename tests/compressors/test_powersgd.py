"""PowerSGD: against an obvious twin, its identities, its switches, and the paper's printed volumes."""

import pytest
import torch

from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.models.resnet import ResNet18
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng
from tests.kit.helpers import SPECS, exchange_for, gradients, residuals


class Twin:
    """PowerSGD with error feedback as one writes it down: one matrix, one worker, one line at a time; float64."""

    def __init__(self, rank, seed=3, residual="local"):
        self.rank, self.seed, self.residual = rank, seed, residual
        self.q, self.e = {}, {}

    def step(self, xs_W, specs, step):
        updates = []
        for spec, x_W in zip(specs, xs_W, strict=True):
            workers, (n, m) = len(x_W), spec.matrix
            r = min(n, m, self.rank)
            if spec.ndim < 2 or not r * (n + m) * 2 < n * m:
                updates.append(x_W.mean(0))
                continue
            Ms = [x_W[w].reshape(n, m) + self.e.get((spec.name, w), 0) for w in range(workers)]
            if spec.name not in self.q:
                generator = keyed_rng.generator(self.seed, "powersgd", spec.name, step, r)
                self.q[spec.name] = torch.randn(m, r, generator=generator, dtype=torch.float64)
            P = sum(M @ self.q[spec.name] for M in Ms) / workers
            P, _ = torch.linalg.qr(P)
            Qs = [M.T @ P for M in Ms]
            Q = sum(Qs) / workers
            for w, M in enumerate(Ms):
                self.e[spec.name, w] = M - P @ (Qs[w] if self.residual == "local" else Q).T
            self.q[spec.name] = Q
            updates.append((P @ Q.T).reshape(spec.shape))
        return updates


@pytest.mark.parametrize("residual", ["local", "aggregate"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_equals_the_twin(rank, residual):
    exchange, plan = exchange_for("powersgd", rank=rank, residual=residual)
    twin = Twin(rank, residual=residual)
    for step in range(20):
        xs_W = gradients(step=step).tensors
        expected = twin.step([x.clone() for x in xs_W], SPECS, step)
        for update, other in zip(exchange(xs_W, StepInfo(plan, step, 0.1)), expected, strict=True):
            torch.testing.assert_close(update, other, rtol=1e-9, atol=1e-10)
    for (name, worker), e in twin.e.items():
        ours = residuals(exchange)[name][worker].reshape(e.shape)
        torch.testing.assert_close(ours, e, rtol=1e-9, atol=1e-10)


def test_local_and_aggregate_residuals_give_equal_updates():
    """Up to rounding, which the dynamics amplify about tenfold every five steps: hence 20 steps."""
    local, plan = exchange_for("powersgd", residual="local")
    aggregate, _ = exchange_for("powersgd", residual="aggregate")
    for step in range(20):
        xs_W = gradients(step=step).tensors
        ours, theirs = local(xs_W, StepInfo(plan, step, 0.1)), aggregate(xs_W, StepInfo(plan, step, 0.1))
        for spec, a, b in zip(SPECS, ours, theirs, strict=True):
            compressed = residuals(local).get(spec.name)
            scale = b.norm() if compressed is None else b.norm() + compressed.norm()  # both enter the arithmetic
            assert (a - b).norm() <= 1e-12 * scale


def test_full_rank_equals_dense():
    exchange, plan = exchange_for("powersgd", rank=1000, min_compression_rate=0)
    dense, plan0 = exchange_for("none")
    for step in range(3):
        xs_W = gradients(step=step).tensors
        for a, b in zip(
            exchange(xs_W, StepInfo(plan, step, 0.1)), dense(xs_W, StepInfo(plan0, step, 0.1)), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("rank", [1, 2])
def test_exact_on_matrices_of_that_rank(rank, count):
    """Also for rank 1 with many matrices of one shape, whose norms must not be mixed."""
    specs = [TensorSpec(f"m{i}", (12, 20)) for i in range(count)]
    exchange, plan = exchange_for("powersgd", specs=specs, rank=rank)
    generator = torch.Generator().manual_seed(1)
    xs_W = gradients(specs).tensors
    for scale, x in enumerate(xs_W, start=1):
        left = torch.randn(12, rank, generator=generator, dtype=torch.float64) * 10.0**scale
        x.copy_((left @ torch.randn(rank, 20, generator=generator, dtype=torch.float64)).expand_as(x))
    for update, x in zip(exchange(xs_W, StepInfo(plan, 0, 0.1)), xs_W, strict=True):
        torch.testing.assert_close(update, x[0], rtol=1e-9, atol=1e-9)


def test_rank_deficient_gradients_are_not_counted_twice():
    """Rank-1 gradients at rank 2: orthonormal columns by QR; one-pass Gram-Schmidt fails here."""
    specs = [TensorSpec("m", (12, 20))]
    xs_W = gradients(specs, dtype=torch.float32).tensors
    u, v = torch.randn(12, generator=torch.Generator().manual_seed(2)), torch.randn(20)
    xs_W[0].copy_(torch.outer(u, v).expand(4, 12, 20))
    exchange, plan = exchange_for("powersgd", specs=specs, rank=2, dtype=torch.float32)
    for step in range(5):
        (update,) = exchange(xs_W, StepInfo(plan, step, 0.1))
        torch.testing.assert_close(update, xs_W[0][0], rtol=1e-4, atol=1e-4)


def test_warm_start_improves_the_second_step():
    def error_of_second_step(warm_start):
        exchange, plan = exchange_for("powersgd", rank=2, warm_start=warm_start, error_feedback=False)
        xs_W = gradients(specs=SPECS).tensors
        exchange(xs_W, StepInfo(plan, 0, 0.1))
        updates = exchange(xs_W, StepInfo(plan, 1, 0.1))
        return sum((u - x.mean(0)).square().sum() for u, x in zip(updates, xs_W, strict=True))

    assert error_of_second_step(True) < error_of_second_step(False)


def test_a_layer_without_gradient_recovers():
    """A zero gradient leaves Q = 0; without keeping the old Q no later gradient would ever get through."""
    specs = [TensorSpec("m", (12, 20))]
    for rank in (1, 2):
        exchange, plan = exchange_for("powersgd", specs=specs, rank=rank, error_feedback=False)
        xs_W = gradients(specs).tensors
        exchange(xs_W, StepInfo(plan, 0, 0.1))
        exchange([torch.zeros_like(x) for x in xs_W], StepInfo(plan, 1, 0.1))
        (update,) = exchange(xs_W, StepInfo(plan, 2, 0.1))
        assert update.norm() > 0.3 * xs_W[0].mean(0).norm()


class TestSwitch:
    def switched(self, on_switch, levels):
        exchange, plan = exchange_for("powersgd", on_switch=on_switch)
        exchange.ladder = Ladder("rank", (1, 2, 4))
        queries = []
        for step, level in enumerate(levels):
            plan = Plan(dict.fromkeys(plan.levels, level), 1)
            exchange(gradients(step=step).tensors, StepInfo(plan, step, 0.1))
            queries.append({name: entry["q"].clone() for name, entry in exchange.state.items() if "q" in entry})
        return exchange, queries

    def test_down_keeps_the_leading_columns(self):
        exchange, queries = self.switched("keep", [2, 2])
        q = queries[-1]["a"]
        ctx_state = {"a": {"q": q}}
        from accordion_bench.compressors.compressor import Context

        ctx = Context(5, [SPECS[1]], [2.0], 3)
        inner = exchange.compressor.inner
        kept = inner._query(ctx, 0, 2, ctx_state, q)
        assert torch.equal(kept, q[:, :2])

    def test_up_keeps_the_span_and_adds_columns(self):
        exchange, queries = self.switched("keep", [1, 1])
        q = queries[-1]["a"]
        from accordion_bench.compressors.compressor import Context

        wide = exchange.compressor.inner._query(Context(5, [SPECS[1]], [4.0], 3), 0, 4, {"a": {"q": q}}, q)
        assert wide.shape[1] == 4
        old, _ = torch.linalg.qr(q)
        assert torch.linalg.matrix_norm(old - wide[:, :2] @ (wide[:, :2].T @ old)) < 1e-10
        assert torch.linalg.matrix_rank(wide) == 4

    def test_redraw_forgets(self):
        kept, _ = self.switched("keep", [1, 0])
        redrawn, _ = self.switched("redraw", [1, 0])
        assert not torch.allclose(kept.state["a"]["q"], redrawn.state["a"]["q"])

    @pytest.mark.parametrize("on_switch", ["keep", "redraw"])
    def test_residual_survives_and_nothing_is_lost(self, on_switch):
        exchange, plan = exchange_for("powersgd", on_switch=on_switch)
        exchange.ladder = Ladder("rank", (1, 2, 4))
        sent, given = 0, 0
        for step, level in enumerate([2, 0, 0, 1, 2, 0]):
            xs_W = gradients(step=step).tensors
            given = given + xs_W[3].mean(0)
            plan = Plan(dict.fromkeys(plan.levels, level), 1)
            sent = sent + exchange(xs_W, StepInfo(plan, step, 0.1))[3]
        torch.testing.assert_close(sent + residuals(exchange)["b"].mean(0), given, rtol=1e-11, atol=1e-11)

    def test_to_dense_and_back_flushes_the_residual_and_keeps_q(self):
        exchange, plan = exchange_for("powersgd")
        exchange(gradients(step=0).tensors, StepInfo(plan, 0, 0.1))
        q = exchange.state["a"]["q"].clone()
        left = residuals(exchange)["a"].clone()
        xs_W = gradients(step=1).tensors
        updates = exchange(xs_W, StepInfo(Plan({}, 1), 1, 0.1))
        torch.testing.assert_close(updates[1], (xs_W[1] + left).mean(0))
        assert (residuals(exchange)["a"] == 0).all()
        assert torch.equal(exchange.state["a"]["q"], q)


@pytest.fixture(scope="module")
def specs():
    """Of CIFAR-10's ResNet-18."""
    return [TensorSpec(name, tuple(p.shape)) for name, p in ResNet18(3, 10).named_parameters()]


class TestVolume:
    """CIFAR-10 ResNet-18 as in the Accordion paper: every matrix compressed, 300 epochs of 98 steps, Table 1."""

    @pytest.mark.parametrize(("rank", "floats"), [(1, 45_935), (2, 82_260), (4, 154_910)])
    def test_per_step(self, specs, rank, floats):
        exchange, plan = exchange_for("powersgd", 1, specs, rank=rank, min_compression_rate=0, dtype=torch.float32)
        assert len(plan.levels) == 21
        assert exchange.predicted_bytes(StepInfo(plan, 0)) == 4 * floats

    @pytest.mark.parametrize(("rank", "printed"), [(1, 1350.4), (2, 2418.4)])
    def test_over_the_run_as_printed(self, specs, rank, printed):
        exchange, plan = exchange_for("powersgd", 1, specs, rank=rank, min_compression_rate=0, dtype=torch.float32)
        exchange([torch.ones(1, *spec.shape) for spec in specs], StepInfo(plan, 0, 0.1))
        million_floats = exchange.comm.ledger.columns()["payload_bytes"] / 4 * 98 * 300 / 1e6
        assert int(million_floats * 10) / 10 == printed  # the paper truncates


def test_min_compression_rate_is_strict_and_on_the_matrix_view():
    exchange, _ = exchange_for("powersgd")
    inner = exchange.compressor.inner
    conv = TensorSpec("conv", (64, 64, 3, 3))
    assert payload_bytes(inner, conv, 4, 4) == 4 * 4 * (64 + 576)
    square = TensorSpec("square", (8, 8))  # 2 (8 + 8) 2 = 64 is not below 64
    assert inner.factor_rank(square, 2) is None and inner.factor_rank(square, 1) == 1


def test_faithful_gram_schmidt():
    """eps=0 divides a zero column by its norm, as Accordion's code does; the default does not."""
    zeros = [torch.zeros_like(x) for x in gradients().tensors]
    for eps, finite in ((0, False), (1e-8, True)):
        exchange, plan = exchange_for("powersgd", orthonormalisation="gramschmidt", eps=eps)
        assert all(u.isfinite().all() for u in exchange(zeros, StepInfo(plan, 0, 0.1))) == finite
    qr, plan = exchange_for("powersgd")
    gs, _ = exchange_for("powersgd", orthonormalisation="gramschmidt")
    for step in range(5):
        xs_W = gradients(step=step).tensors
        for a, b in zip(qr(xs_W, StepInfo(plan, step, 0.1)), gs(xs_W, StepInfo(plan, step, 0.1)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 1.5}, {"min_compression_rate": -1}, {"on_switch": "drop"}])
def test_bad_options(options):
    with pytest.raises(ConfigError, match="compressor." + next(iter(options))):
        exchange_for("powersgd", **options)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("scale", [1e-30, 1e-23, 1e-15, 1.0, 1e15])
def test_any_scale_of_gradient_is_approximated_alike(rank, scale):
    """Squares of tiny fp32 entries underflow; a norm of zero must not blow the update up."""
    exchange, plan = exchange_for("powersgd", rank=rank, dtype=torch.float32)
    for step in range(3):
        xs_W = [x * scale for x in gradients(dtype=torch.float32, step=step).tensors]
        for x, update in zip(xs_W, exchange(xs_W, StepInfo(plan, step, 0.1)), strict=True):
            assert update.isfinite().all()
            assert update.abs().max() <= 20 * x.abs().max()
