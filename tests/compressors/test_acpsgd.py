"""ACP-SGD: against an obvious twin, its identities, bytes of both turns, and rounds and time beside PowerSGD."""

from dataclasses import replace

import pytest
import torch

from accordion_bench.advising.arms import arm_of, measured_method
from accordion_bench.models.transformer import GPT
from accordion_bench.network.link_model import Network
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng
from tests.kit.helpers import SPECS, exchange_for, gradients, residuals
from tests.kit.local import trainer_for

NET = "model._target_=tests.kit.tiny.Net"


class Twin:
    """ACP-SGD with error feedback as one writes it down: one matrix, one worker, one line at a time; float64."""

    def __init__(self, rank, seed=3):
        self.rank, self.seed = rank, seed
        self.p, self.q, self.e, self.count = {}, {}, {}, {}

    def step(self, xs_W, specs, step):
        updates = []
        for spec, x_W in zip(specs, xs_W, strict=True):
            workers, (n, m), name = len(x_W), spec.matrix, spec.name
            r = min(n, m, self.rank)
            if spec.ndim < 2 or not r * (n + m) * 2 < n * m:
                updates.append(x_W.mean(0))
                continue
            Ms = [x_W[w].reshape(n, m) + self.e.get((name, w), 0) for w in range(workers)]
            if name not in self.q:
                generator = keyed_rng.generator(self.seed, "acpsgd", name, step, r)
                self.q[name] = torch.randn(m, r, generator=generator, dtype=torch.float64)
            self.count[name] = self.count.get(name, 0) + 1
            if self.count[name] % 2 == 1:
                Q, _ = torch.linalg.qr(self.q[name])
                Ps = [M @ Q for M in Ms]
                P = self.p[name] = sum(Ps) / workers
                sent = [Ps[w] @ Q.T for w in range(workers)]
            else:
                P, _ = torch.linalg.qr(self.p[name])
                Qs = [M.T @ P for M in Ms]
                Q = self.q[name] = sum(Qs) / workers
                sent = [P @ Qs[w].T for w in range(workers)]
            for w, M in enumerate(Ms):
                self.e[name, w] = M - sent[w]
            updates.append((P @ Q.T).reshape(spec.shape))
        return updates


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_equals_the_twin(rank):
    exchange, plan = exchange_for("acpsgd", rank=rank)
    twin = Twin(rank)
    for step in range(20):
        xs_W = gradients(step=step).tensors
        expected = twin.step([x.clone() for x in xs_W], SPECS, step)
        for update, other in zip(exchange(xs_W, StepInfo(plan, step, 0.1)), expected, strict=True):
            torch.testing.assert_close(update, other, rtol=1e-9, atol=1e-10)
    for (name, worker), e in twin.e.items():
        torch.testing.assert_close(residuals(exchange)[name][worker].reshape(e.shape), e, rtol=1e-9, atol=1e-10)


# ---- what loses nothing


@pytest.mark.parametrize(("shape", "exact"), [((12, 20), {2}), ((20, 12), {1}), ((12, 12), {1, 2})])
def test_the_side_of_full_rank_is_exact(shape, exact):
    """P of a wide matrix spans all its rows: the even step gives the matrix back; both do for a square one."""
    specs = [TensorSpec("m", shape)]
    exchange, plan = exchange_for("acpsgd", specs=specs, rank=12, min_compression_rate=0, error_feedback=False)
    for count in range(1, 7):
        xs_W = gradients(specs, step=count).tensors
        (update,) = exchange(xs_W, StepInfo(plan, count, 0.1))
        mean = xs_W[0].mean(0)
        assert (float((update - mean).norm() / mean.norm()) < 1e-12) == (2 - count % 2 in exact)


def test_a_lasting_gradient_of_low_rank_is_found_in_two_steps():
    """One power iteration takes two steps here: P has the span of M after the first one."""
    specs = [TensorSpec("m", (30, 40))]
    x = torch.randn(30, 2, dtype=torch.float64) @ torch.randn(2, 40, dtype=torch.float64)
    exchange, plan = exchange_for("acpsgd", specs=specs, rank=2, error_feedback=False)
    for step in range(3):
        (update,) = exchange([x.expand(4, 30, 40).clone()], StepInfo(plan, step, 0.1))
    torch.testing.assert_close(update, x, rtol=1e-9, atol=1e-9)


def test_nothing_is_lost_between_steps_of_any_rank():
    exchange, plan = exchange_for("acpsgd")
    exchange.ladder = Ladder("rank", (1, 2, 4))
    sent, given = 0, 0
    for step, level in enumerate([2, 0, 0, 1, 2, 0, 1]):
        xs_W = gradients(step=step).tensors
        given = given + xs_W[3].mean(0)
        plan = Plan(dict.fromkeys(plan.levels, level), 1)
        sent = sent + exchange(xs_W, StepInfo(plan, step, 0.1))[3]
    torch.testing.assert_close(sent + residuals(exchange)["b"].mean(0), given, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("zeros", [1, 2, 3])
def test_a_layer_without_gradient_recovers(rank, zeros):
    specs = [TensorSpec("m", (12, 20))]
    exchange, plan = exchange_for("acpsgd", specs=specs, rank=rank, error_feedback=False)
    xs_W = gradients(specs).tensors
    for step in range(zeros):
        (update,) = exchange([torch.zeros_like(x) for x in xs_W], StepInfo(plan, step, 0.1))
        assert (update == 0).all()
    for step in range(4):
        (update,) = exchange(xs_W, StepInfo(plan, zeros + step, 0.1))
    assert update.norm() > 0.3 * xs_W[0].mean(0).norm()


# ---- whose turn it is, and its bytes


def by_hand(turn: int, rank: int = 2) -> int:
    """4 r n bytes of each matrix in odd, 4 r m in even exchanges; 4 N of what travels dense."""
    total = 0
    for spec in SPECS:
        n, m = spec.matrix
        pays = spec.ndim > 1 and 2 * rank * (n + m) < n * m
        total += 4 * rank * (n if turn % 2 else m) if pays else 4 * spec.numel
    return total


def test_bytes_of_both_turns():
    exchange, plan = exchange_for("acpsgd", dtype=torch.float32)
    before = 0
    assert by_hand(1) < by_hand(2)
    for turn in range(1, 6):
        info = StepInfo(plan, turn, 0.1)
        assert exchange.predicted_bytes(info) == by_hand(turn)
        exchange(gradients(dtype=torch.float32, step=turn).tensors, info)
        counted = exchange.comm.ledger.columns()["payload_bytes"]
        assert counted - before == by_hand(turn)
        before = counted
    assert 2 * exchange.mean_bytes(info) == by_hand(1) + by_hand(2)


def test_turns_are_those_of_the_tensor_not_of_the_step():
    """Dense exchanges are none: each tensor goes on where it stood."""
    exchange, plan = exchange_for("acpsgd", start_step=2)
    turns = {"a": 0, "b": 0}
    for step, names in enumerate([["a", "b"], ["b"], ["a", "b"], ["a"], ["b"], ["a", "b"]]):
        own = replace(plan, levels=dict.fromkeys(names, 0))
        exchange(gradients(step=step).tensors, StepInfo(own, step, 0.1))
        for name in turns:
            turns[name] += step >= 2 and name in names
            kept = exchange.state[name].keys() - {"residual_W"}
            assert kept == (set() if not turns[name] else {"p"} if turns[name] % 2 else {"q"})
    assert turns == {"a": 3, "b": 3}


@pytest.mark.parametrize("typed", [["batch_size=4"], ["sync=diloco", "sync.period=2", "sync.final=false"]])
def test_the_prediction_of_a_whole_run_is_the_ledgers(tmp_path, typed):
    """Local steps, too, where an exchange is every second step."""
    trainer = trainer_for(tmp_path, "compressor=acpsgd", "compressor.min_compression_rate=0", "epochs=1", NET, *typed)
    ledger, seen, train_step = trainer.comm.ledger, [], trainer.train_step

    def watched():
        predicted, before = trainer.exchange.predicted_bytes(trainer.position.info()), ledger.counts["payload"]
        train_step()
        if ledger.counts["payload"] > before:
            seen.append((predicted * trainer.comm.workers, ledger.counts["payload"] - before))

    trainer.train_step = watched
    trainer.fit()
    assert len(seen) >= 3 and len(set(seen)) == 2
    assert all(predicted == counted for predicted, counted in seen)


def test_a_smaller_rank_keeps_the_leading_columns_and_a_larger_one_the_span():
    exchange, plan = exchange_for("acpsgd", rank=4)
    exchange(gradients().tensors, StepInfo(plan, 0, 0.1))
    p, inner, ctx = exchange.state["a"]["p"], exchange.compressor.inner, exchange.context(StepInfo(plan, 1))
    assert torch.equal(inner._kept(ctx, 1, 2, True, exchange.state, p), p[:, :2])
    wide = inner._kept(ctx, 1, 6, True, exchange.state, p)
    old, _ = torch.linalg.qr(p)
    assert wide.shape[1] == 6 and torch.linalg.matrix_rank(wide) == 6
    assert torch.linalg.matrix_norm(old - wide[:, :4] @ (wide[:, :4].T @ old)) < 1e-10


# ---- beside PowerSGD


def test_half_of_the_rounds_and_of_the_time():
    """gpt_nano at rank 4 among 8 workers: what docs/algorithms.md says."""
    specs = [TensorSpec(name, tuple(p.shape)) for name, p in GPT(256, 4, 4, 128).named_parameters()]
    found = {}
    for name in ("powersgd", "acpsgd"):
        exchange, plan = exchange_for(name, 8, specs, rank=4, dtype=torch.float32)
        for step in range(2):
            xs_W = gradients(specs, 8, dtype=torch.float32, step=step).tensors
            exchange(xs_W, StepInfo(plan, step, 0.1))
        sent = exchange.comm.ledger.columns()
        links = [Network(1e9, latency) for latency in (1e-3, 1e-2)]
        found[name] = sent["rounds"] / 2, [link.seconds(sent["wire_bytes"], sent["rounds"], 8) / 2 for link in links]
    (twice, slower), (once, faster) = found["powersgd"], found["acpsgd"]
    assert (twice, once) == (28, 14)
    for low, high in zip(faster, slower, strict=True):
        assert 0.49 < low / high < 0.56


def test_advice_takes_the_mean_of_both_turns():
    specs = [TensorSpec("wide", (64, 512)), TensorSpec("bias", (64,))]
    cost = measured_method(arm_of("acpsgd"), specs, budget=0.0)
    assert cost.payload(4) == pytest.approx(4 * (2 * (64 + 512) / 2 + 64))
    assert sum(stage.rounds for stage in cost.stages([0.0, 0.0], 4)) == 6


@pytest.mark.parametrize("options", [{"rank": 0}, {"rank": 1.5}, {"min_compression_rate": -1}])
def test_bad_options(options):
    with pytest.raises(ConfigError, match="compressor." + next(iter(options))):
        exchange_for("acpsgd", **options)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1.0, 1e15])
def test_any_scale_of_gradient_is_approximated_alike(rank, scale):
    exchange, plan = exchange_for("acpsgd", rank=rank, dtype=torch.float32)
    for step in range(4):
        xs_W = [x * scale for x in gradients(dtype=torch.float32, step=step).tensors]
        for x, update in zip(xs_W, exchange(xs_W, StepInfo(plan, step, 0.1)), strict=True):
            assert update.isfinite().all()
            assert update.abs().max() <= 20 * x.abs().max()
