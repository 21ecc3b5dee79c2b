"""dist-EF-blockSGD: its virtual iterate takes exact Nesterov steps, and the sharded server is the literal one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors import assemble
from accordion_bench.compressors.sign import Sign
from accordion_bench.compressors.two_way import cut_shards
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange
from accordion_bench.optimizers.inner import InnerOptimizers
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.sync.every_step import EveryStep
from tests.kit.coded import coded
from tests.kit.helpers import exchange_for, gradients, residuals, server_residuals

WORKERS, STEPS, MU = 7, 60, 0.9
SPECS = [TensorSpec("d", (501,)), TensorSpec("a", (10, 30)), TensorSpec("c", (2, 100)), TensorSpec("b", (2,))]  # 1003
SCHEDULES = {
    "constant": lambda t: 0.1,
    "step decay": lambda t: 0.1 if t < 30 else 0.01,
    "warm-up": lambda t: 0.1 * min((t + 1) / 20, 1),
    "warm-up from 0": lambda t: 0.1 * min(t / 20, 1),
    "cosine to 0": lambda t: 0.1 * max(0.0, 1 - t / 50),
}


class Problem:
    """Gradients that depend on x, differ between workers, and have noise; float64."""

    def __init__(self, workers=WORKERS, specs=SPECS, seed=0):
        self.specs, self.workers = specs, workers
        g = torch.Generator().manual_seed(seed)
        self.curvature = [torch.rand(workers, *s.shape, generator=g, dtype=torch.float64) + 0.1 for s in specs]
        self.optimum = [torch.randn(workers, *s.shape, generator=g, dtype=torch.float64) for s in specs]
        self.noise = torch.Generator().manual_seed(seed + 1)

    def gradients(self, xs):
        noise = [torch.randn(o.shape, generator=self.noise, dtype=torch.float64) for o in self.optimum]
        terms = zip(self.curvature, xs, self.optimum, noise, strict=True)
        return [c * (x - o) + 0.1 * n for c, x, o, n in terms]


def deviation(schedule, steps=STEPS, **options):
    """Largest deviation of y_t = x_t - (server residual + mean worker residual) from exact Nesterov steps."""
    problem = Problem()
    exchange, plan = exchange_for("distefblocksgd", WORKERS, specs=SPECS, **options)
    xs = [torch.zeros(s.shape, dtype=torch.float64) for s in SPECS]
    momenta = [torch.zeros(WORKERS, *s.shape, dtype=torch.float64) for s in SPECS]
    worst = 0.0

    def virtual(lr_before):
        mine, server = residuals(exchange), server_residuals(exchange)
        scale = 1.0 if options.get("residual_units") != "gradient" else lr_before
        kept = {}
        for unit, spec in zip(exchange.units, exchange.sent, strict=True):
            whole = server.get(spec.name, 0) + mine[spec.name].mean(0)  # one-way: no server residual
            kept |= zip(unit, whole.flatten().split([SPECS[i].numel for i in unit]), strict=True)
        return [x - scale * kept[i].view(x.shape) for i, x in enumerate(xs)]

    lr_before = schedule(0)
    for step in range(steps):
        lr, before = schedule(step), virtual(lr_before)
        grads = problem.gradients(xs)
        momenta = [MU * m + g for m, g in zip(momenta, grads, strict=True)]
        updates = exchange(grads, StepInfo(plan, step, lr))
        factor = 1.0 if options.get("residual_units") != "gradient" else lr
        xs = [x - factor * u for x, u in zip(xs, updates, strict=True)]
        exact = [y - lr * (g + MU * m).mean(0) for y, g, m in zip(before, grads, momenta, strict=True)]
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(virtual(lr), exact, strict=True)))
        lr_before = lr
    assert max(float(e.abs().max()) for e in residuals(exchange).values()) > 1e-4
    return worst


@pytest.mark.sample(7)
@pytest.mark.parametrize("zero_lr", ["skip", "flush"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_virtual_iterate_takes_exact_nesterov_steps(name, zero_lr):
    assert deviation(SCHEDULES[name], zero_lr=zero_lr) < 1e-12


@pytest.mark.sample(5)
@pytest.mark.parametrize("options", [
    {"block": "chunk", "block_size": 64}, {"align": "tensor"}, {"server": "literal"}, {"collective": "all_gather"},
    {"min_numel": 300}, {"block": "bucket", "block_size": 600}, {"start_step": 10}, {"start_step": 40},
])  # fmt: skip
def test_virtual_iterate_under_every_sharding(options):
    assert deviation(SCHEDULES["step decay"], steps=45, **options) < 1e-12


def test_gradient_units_fail_the_identity_when_the_rate_changes():
    """The negative control: without the learning-rate ratio the identity holds at a constant rate only."""
    assert deviation(SCHEDULES["constant"], steps=20, residual_units="gradient") < 1e-12
    assert deviation(SCHEDULES["step decay"], steps=33, residual_units="gradient") > 1e-2


def test_units_agree_at_a_constant_rate():
    runs = []
    for units in ("parameter", "gradient"):
        problem = Problem()
        exchange, plan = exchange_for("distefblocksgd", WORKERS, specs=SPECS, residual_units=units)
        xs = [torch.zeros(s.shape, dtype=torch.float64) for s in SPECS]
        for step in range(12):
            updates = exchange(
                problem.gradients(xs), StepInfo(plan, step, 0.125)
            )  # a power of two: the units differ exactly
            xs = [x - (1 if units == "parameter" else 0.125) * u for x, u in zip(xs, updates, strict=True)]
        runs.append(xs)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def scaled_sign(v):
    """The reference compressor: one float32 scale, sgn(0) = +1."""
    message, _ = coded(Sign("l1"), v[None])
    scale = message[0, :4].clone().view(torch.float32).double()[0]
    assert abs(scale / v.abs().mean() - 1) < 1e-6
    return torch.where(v < 0, -scale, scale)


@pytest.mark.sample(7)
@pytest.mark.parametrize("workers, specs", [
    (7, SPECS),
    (4, [TensorSpec("a", (3,)), TensorSpec("b", (5,))]),  # fewer coordinates than 8 per worker: empty shards
    (3, [TensorSpec(f"t{i}", (1, 9)) for i in range(12)]),  # more blocks than bytes
    (5, [TensorSpec("only", (7, 13))]),
])  # fmt: skip
@pytest.mark.parametrize("server, align", [("sharded", "piece"), ("sharded", "tensor"), ("literal", "piece")])
def test_collectives_equal_the_literal_server(workers, specs, server, align):
    """Bit for bit, over steps with a decay: a plain star that keeps every residual, compressing the same pieces."""
    problem, twin_problem = Problem(workers, specs), Problem(workers, specs)
    exchange, plan = exchange_for("distefblocksgd", workers, specs=specs, server=server, align=align)
    pays = exchange.compressor.inner.inner.pays
    pieces = cut_shards(specs, workers, server, align)
    flat = {s.name: (i, s) for i, s in enumerate(specs)}
    zeros = lambda: [torch.zeros(s.numel, dtype=torch.float64) for s in specs]  # noqa: E731
    m, e, server_e = [zeros() for _ in range(workers)], [zeros() for _ in range(workers)], zeros()
    xs, ys = ([torch.zeros(s.shape, dtype=torch.float64) for s in specs] for _ in range(2))
    for step in range(20):
        lr = 0.1 if step < 10 else 0.01
        updates = exchange(problem.gradients(xs), StepInfo(plan, step, lr))
        xs = [x - u for x, u in zip(xs, updates, strict=True)]
        grads = [g.flatten(1) for g in twin_problem.gradients(ys)]
        steps = zeros()
        for w in range(workers):
            for i in range(len(specs)):
                m[w][i] = MU * m[w][i] + grads[i][w]
                e[w][i] += lr * (grads[i][w] + MU * m[w][i])
        for piece in pieces:
            i, spec = flat[piece.name]
            at = slice(piece.start, piece.stop)
            if not pays(spec, 1, 4):
                continue
            total = torch.zeros(piece.stop - piece.start, dtype=torch.float64)
            for w in range(workers):
                sent = scaled_sign(e[w][i][at])
                e[w][i][at] -= sent
                total += sent
            server_e[i][at] += total / workers
            steps[i][at] = scaled_sign(server_e[i][at])
            server_e[i][at] -= steps[i][at]
        for i, spec in enumerate(specs):
            if not pays(spec, 1, 4):
                steps[i] = torch.stack([e[w][i] for w in range(workers)]).sum(0) / workers
                for w in range(workers):
                    e[w][i].zero_()
        ys = [y - s.view(y.shape) for y, s in zip(ys, steps, strict=True)]
        for x, y, spec in zip(xs, ys, specs, strict=True):
            if pays(spec, 1, 4):
                assert torch.equal(x, y), (step, spec.name)
            else:
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_one_worker_and_equal_workers_have_no_server_error():
    """C is idempotent, so what comes from the server is what was sent."""
    exchange, plan = exchange_for("distefblocksgd", 1, specs=SPECS)
    problem = Problem(1)
    xs = [torch.zeros(s.shape, dtype=torch.float64) for s in SPECS]
    largest = max(
        float(u.abs().max()) for step in range(5) for u in exchange(problem.gradients(xs), StepInfo(plan, step, 0.1))
    )
    rounding = 2.0**-23 * largest  # of a float32 scale
    assert max(float(e.abs().max()) for e in server_residuals(exchange).values()) < 5 * rounding
    equal, _ = exchange_for("distefblocksgd", 4, specs=SPECS)
    single = problem.gradients(xs)
    equal([g.expand(4, *g.shape[1:]).clone() for g in single], StepInfo(plan, 0, 0.1))
    assert max(float(e.abs().max()) for e in server_residuals(equal).values()) < rounding


def test_payload_is_the_formula():
    """Up: ceil(n_p / 8) + 4 for each piece; down: the same for the own pieces, 1/A of them on average."""
    for workers in (1, 2, 4, 7, 8):
        exchange, plan = exchange_for("distefblocksgd", workers, specs=SPECS, comm=Comm(workers), dtype=torch.float32)
        xs_W = [g.float() for g in Problem(workers).gradients([torch.zeros(s.shape) for s in SPECS])]
        exchange(xs_W, StepInfo(plan, 0, 0.1))
        pieces = [
            p for p in cut_shards(SPECS, workers) if exchange.compressor.inner.inner.pays(_spec(p.name), 1, workers)
        ]
        message = sum(-(-(p.stop - p.start) // 8) + 4 for p in pieces)
        dense = sum(4 * s.numel for s in SPECS if s.name not in {p.name for p in pieces})
        columns = exchange.comm.ledger.columns()
        payload = round(message * (1 + 1 / workers) + dense)
        assert columns["payload_bytes"] == payload == exchange.predicted_bytes(StepInfo(plan, 0))
        wire = 2 * (workers - 1) * message / workers + 2 * (workers - 1) * dense / workers
        assert columns["wire_bytes"] == round(wire)
        assert sum(p.stop - p.start for p in cut_shards(SPECS, workers)) == 1003


def _spec(name):
    return next(s for s in SPECS if s.name == name)


def test_shards_are_equal_and_of_whole_bytes():
    pieces = cut_shards(SPECS, 7)
    shard = -(-1003 // 56) * 8
    owned = [sum(p.stop - p.start for p in pieces if p.owner == w) for w in range(7)]
    assert owned == [shard] * 6 + [1003 - 6 * shard]
    assert cut_shards(list(reversed(SPECS)), 7) == pieces
    whole = cut_shards(SPECS, 7, align="tensor")
    assert sorted((p.name, p.stop - p.start) for p in whole) == sorted((s.name, s.numel) for s in SPECS)


def trained(workers, schedule, momentum, nesterov, decay, steps=60, **options):
    """Parameters after `steps` of EveryStep around a wrapped compressor, and of torch's SGD on the mean gradient."""
    optimizer = {"_target_": "torch.optim.SGD", "momentum": momentum, "nesterov": nesterov, "weight_decay": decay}
    node = {"_target_": "accordion_bench.compressors.uncoded.Dense", "worker_momentum": True, **options}
    around = assemble.wrapped_compressor(node, optimizer)
    mine, reference = ([torch.nn.Parameter(torch.ones(s.shape, dtype=torch.float64)) for s in SPECS] for _ in range(2))
    left = assemble.optimizer_node(optimizer, around.compressor)
    kept = {key: value for key, value in left.items() if key != "_target_"}
    exchange = Exchange(around.compressor, SPECS, Ladder(), Comm(workers), mine[0])
    sync = EveryStep()
    position = SimpleNamespace(step=0, info=lambda lr: StepInfo(Plan(), position.step, lr))

    def run(exchanges, xs_W, lr) -> CompletedExchange:
        return CompletedExchange(exchange, xs_W[0], [exchange(xs_W[0], position.info(lr))])

    axis: Any = SimpleNamespace(
        params=mine, gradients_W=[], replicas=[], apply=lambda us: _set_grads(mine, us), comm=exchange.comm
    )
    context: Any = SimpleNamespace(
        axis=axis,
        position=position,
        runner=SimpleNamespace(new_exchange=lambda: exchange, run=run),
        inner=InnerOptimizers(axis, *[lambda params: torch.optim.SGD(params, lr=1.0, **kept)] * 2),
        weight_decay=optimizer.get("weight_decay", 0),
        clip_mean=None,
    )
    sync.begin(context)
    sgd = torch.optim.SGD(reference, lr=1.0, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    problem, twin = Problem(workers), Problem(workers)
    for position.step in range(steps):
        lr = schedule(position.step)
        context.axis.gradients_W = problem.gradients([p.detach() for p in mine])
        sync.before_step(lr)
        context.inner.step(lr)
        sync.after_step(lr)
        _set_grads(reference, [g.mean(0) for g in twin.gradients([p.detach() for p in reference])])
        sgd.param_groups[0]["lr"] = lr
        sgd.step()
    return [p.detach() for p in mine], [p.detach() for p in reference]


def _set_grads(params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


@pytest.mark.sample(3)
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("options", [
    {"error_feedback": True, "residual_units": "parameter"}, {"error_feedback": False},
    {"weight_decay_mode": "in_gradient"}, {"error_feedback": True, "weight_decay_mode": "in_gradient"},
])  # fmt: skip
def test_identity_compressor_is_torch_sgd(workers, nesterov, options):
    """With momentum on the workers and weight decay beside the exchange, through a drop of the learning rate."""
    mine, reference = trained(workers, SCHEDULES["step decay"], MU, nesterov, 1e-2, **options)
    for a, b in zip(mine, reference, strict=True):
        assert float((a - b).abs().max()) < 1e-14


def test_decoupled_decay_has_no_momentum():
    mine, _ = trained(1, lambda t: 0.1, 0.9, False, 0.5, steps=1, weight_decay_mode="decoupled")
    problem = Problem(1)
    ones = [torch.ones(s.shape, dtype=torch.float64) for s in SPECS]
    for p, g in zip(mine, problem.gradients(ones), strict=True):
        torch.testing.assert_close(p, 1 - 0.1 * 0.5 - 0.1 * g[0], rtol=1e-14, atol=1e-14)


def test_two_learning_rates_are_two_runs():
    """A learning rate per tensor: each tensor moves as in a run of its own."""
    rates = [0.1, 0.02, 0.1, 0.02]
    exchange, plan = exchange_for("distefblocksgd", 4, specs=SPECS, align="tensor")
    halves = [exchange_for("distefblocksgd", 4, specs=SPECS, align="tensor")[0] for _ in range(2)]
    problem = Problem(4)
    for step in range(10):
        grads = problem.gradients([torch.zeros(s.shape, dtype=torch.float64) for s in SPECS])
        updates = exchange(grads, StepInfo(plan, step, rates))
        alone = [half(grads, StepInfo(plan, step, rate)) for half, rate in zip(halves, (0.1, 0.02), strict=True)]
        for i, update in enumerate(updates):
            assert torch.equal(update, alone[i % 2][i])


def test_what_owners_do_lies_between_two_collectives_on_the_clock(monkeypatch):
    """Where all workers share a process, too: the modelled link divides among them what comes before the last one."""
    exchange, plan = exchange_for("distefblocksgd", 4, dtype=torch.float32)
    marks = []
    monkeypatch.setattr(exchange.comm.clock, "collective", marks.append)
    exchange(gradients(dtype=torch.float32).tensors, StepInfo(plan, 0, 0.1))
    assert len(marks) == 2 + (exchange.comm.ledger.kinds["all_reduce"][1] > 0)
