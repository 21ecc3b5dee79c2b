"""DGC: against an obvious twin, as momentum SGD where nothing is left out, and what happens to every gradient."""

import io
import math

import pytest
import torch

from accordion_bench import train
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.assemble import optimizer_node
from accordion_bench.compressors.threshold import DGC, clipped
from accordion_bench.config.components import build_components
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.partition import levelled
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import checkpoint
from tests.kit import composed, tiny
from tests.kit.helpers import SGD, SPECS, compressor, exchange_for, gradients
from tests.runs import test_resume

LATE = 1000.0  # the warm-up is over


def dgc(specs=SPECS, workers=4, dtype=torch.float64, levels=None, **options):
    """(Exchange, Plan) of all tensors at the configured density, or with a ladder of several."""
    built = DGC(**options)
    ladder = Ladder("density", levels or (built.level,))
    like = torch.zeros((), dtype=dtype)
    exchange = Exchange(built, specs, ladder, Comm(workers), like, SendOptions(3))
    return exchange, Plan(dict.fromkeys(levelled(built, specs), 0), 1)


class Twin:
    """DGC as one writes it down: one worker, one tensor at a time, exactly the k largest; float64."""

    def __init__(self, density, momentum, nesterov):
        self.density, self.mu, self.nesterov = density, momentum, nesterov
        self.u, self.v = {}, {}

    def step(self, xs_W, specs):
        updates = []
        for spec, x_W in zip(specs, xs_W, strict=True):
            total = torch.zeros(spec.numel, dtype=torch.float64)
            for w, g in enumerate(x_W.reshape(len(x_W), -1)):
                u, v = (memory.get((spec.name, w), torch.zeros_like(g)) for memory in (self.u, self.v))
                u = self.mu * (u + g) if self.nesterov else self.mu * u + g
                v = v + u + g if self.nesterov else v + u
                if spec.ndim < 2:
                    sent, v = v, torch.zeros_like(v)
                else:
                    k = max(1, int(self.density * spec.numel))
                    mask = torch.zeros(spec.numel, dtype=torch.bool)
                    mask[v.abs().argsort(descending=True, stable=True)[:k]] = True
                    sent, u, v = v * mask, u * ~mask, v * ~mask
                total += sent
                self.u[spec.name, w], self.v[spec.name, w] = u, v
            updates.append((total / len(x_W)).view(spec.shape))
        return updates


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("density", [0.02, 0.3])
def test_small_tensors_equal_the_twin(density, nesterov):
    """Up to the float32 in which values travel; what it cannot hold stays in v."""
    exchange, plan = dgc(density=density, momentum=0.9, nesterov=nesterov, sample_share=1.0)
    twin = Twin(density, 0.9, nesterov)
    for step in range(6):
        xs_W = gradients(step=step).tensors
        updates = exchange(xs_W, StepInfo(plan, step, 0.1, LATE))
        for ours, theirs in zip(updates, twin.step(xs_W, SPECS), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        for spec in SPECS:
            for key, memory in (("u_W", twin.u), ("v_W", twin.v)):
                expected = torch.stack([memory[spec.name, w] for w in range(4)]).view(4, *spec.shape)
                torch.testing.assert_close(exchange.state[spec.name][key], expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("nesterov", [False, True])
def test_density_one_is_dense_sgd_with_momentum(nesterov, weight_decay):
    """x <- x - lr update, beside an optimizer that sees no gradient and decays the weights."""
    node = {**SGD, "nesterov": nesterov, "weight_decay": weight_decay}
    exchange, plan = dgc(density=1.0, momentum=0.9, nesterov=nesterov)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(spec.shape, generator=generator, dtype=torch.float64) for spec in SPECS]
    ours, theirs = ([torch.nn.Parameter(x.clone()) for x in start] for _ in range(2))
    options = {key: value for key, value in optimizer_node(node, exchange.compressor).items() if key != "_target_"}
    decay = torch.optim.SGD(ours, **options)
    dense = torch.optim.SGD(theirs, **{key: value for key, value in node.items() if key != "_target_"})
    for step in range(8):
        xs_W, lr = gradients(step=step).tensors, 0.1 / (step + 1)
        for optimizer in (decay, dense):
            optimizer.param_groups[0]["lr"] = lr
        for x, y, x_W in zip(ours, theirs, xs_W, strict=True):
            x.grad, y.grad = torch.zeros_like(x), x_W.mean(0)
        updates = exchange(xs_W, StepInfo(plan, step, lr, LATE))
        decay.step(), dense.step()
        with torch.no_grad():
            torch._foreach_sub_(ours, updates, alpha=lr)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_density_one_trains_as_no_compression_does(tmp_path):
    """Through configuration, trainer and optimizer, with weight decay and a moving learning rate."""
    parameters = []
    for name in ("none", "dgc"):
        options = ["optimizer.nesterov=true", "optimizer.weight_decay=0.01", "epochs=2", "checkpoint.every=12"]
        options += ["compressor.density=1"] if name == "dgc" else []
        train.run(tiny.cfg(tmp_path / name, f"compressor={name}", *options))
        folder = checkpoint.latest(tiny.only(tmp_path / name))
        parameters.append(torch.load(folder / "shared.pt", weights_only=True)["parameters"])
    for name, x in parameters[0].items():
        torch.testing.assert_close(parameters[1][name], x, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.9, False), (0.9, True)])
def test_every_gradient_is_accounted_for(momentum, nesterov):
    """Sent + v + mu / (1 - mu) (u + the momenta that masking has dropped) = sum of gradients / (1 - mu)."""
    exchange, plan = dgc(density=0.05, momentum=momentum, nesterov=nesterov)
    total = [torch.zeros(4, *spec.shape, dtype=torch.float64) for spec in SPECS]
    given, dropped = [t.clone() for t in total], [t.clone() for t in total]
    for step in range(7):
        xs_W = gradients(step=step).tensors
        before = [exchange.state[spec.name]["u_W"].clone() for spec in SPECS]
        ctx = exchange.context(StepInfo(plan, step, 0.1, LATE))
        out = exchange.compressor.exchange(xs_W, ctx, exchange.state, exchange.comm)
        for i, (spec, x_W) in enumerate(zip(SPECS, xs_W, strict=True)):
            minus_sent = torch.zeros_like(x_W)
            out.subtract_sent_({i: minus_sent})
            total[i] -= minus_sent
            given[i] += x_W
            unmasked = momentum * (before[i] + x_W) if nesterov else momentum * before[i] + x_W
            dropped[i] += unmasked - exchange.state[spec.name]["u_W"]
            torch.testing.assert_close(out.update[i], -minus_sent.mean(0), rtol=1e-12, atol=1e-12)
    for i, spec in enumerate(SPECS):
        state = exchange.state[spec.name]
        left = state["v_W"] + momentum / (1 - momentum) * (state["u_W"] + dropped[i])
        torch.testing.assert_close(total[i] + left, given[i] / (1 - momentum), rtol=1e-11, atol=1e-11)
        assert bool((dropped[i] != 0).any()) == (spec.ndim > 1)


def test_memories_are_empty_where_an_entry_was_sent():
    specs = [TensorSpec("m", (300, 400))]
    exchange, plan = dgc(specs, workers=2, dtype=torch.float32, density=0.01, momentum=0.9)
    for step in range(3):
        xs_W = [torch.randn(2, 300, 400, generator=torch.Generator().manual_seed(step))]
        ctx = exchange.context(StepInfo(plan, step, 0.1, LATE))
        out = exchange.compressor.exchange(xs_W, ctx, exchange.state, exchange.comm)
        sent_W = torch.zeros_like(xs_W[0])
        out.subtract_sent_({0: sent_W})
        u_W, v_W = exchange.state["m"]["u_W"], exchange.state["m"]["v_W"]
        for sent, u, v in zip(sent_W, u_W, v_W, strict=True):
            assert 0.8 * 1200 <= int((sent != 0).sum()) <= 1.3 * 1200
            assert not u[sent != 0].any() and not v[sent != 0].any()
            assert u[sent == 0].all() and v[sent == 0].all()
            assert v.abs().max() <= sent[sent != 0].abs().min()


def test_a_dense_step_sends_what_was_left():
    """From density 0.05 to 1 and back: v is flushed, u goes on."""
    exchange, strong = dgc(density=0.05, levels=(0.05, 1.0), momentum=0.9)
    weak = strong.with_levels(dict.fromkeys(strong.levels, 1))
    for step in range(3):
        exchange(gradients(step=step).tensors, StepInfo(strong, step, 0.1, LATE))
    state = exchange.state["a"]
    u_W, v_W, xs_W = state["u_W"].clone(), state["v_W"].clone(), gradients(step=3).tensors
    update = exchange(xs_W, StepInfo(weak, 3, 0.1, LATE))[1]
    torch.testing.assert_close(state["u_W"], 0.9 * u_W + xs_W[1])
    torch.testing.assert_close(update, (v_W + 0.9 * u_W + xs_W[1]).mean(0))
    assert not state["v_W"].any()
    assert (
        exchange(gradients(step=4).tensors, StepInfo(strong, 4, 0.1, LATE))[1].count_nonzero() < 4 * 0.05 * 1.3 * 1152
    )


def test_density_falls_over_the_warm_up():
    densities = [DGC(density=0.001).scheduled(0.001, epoch) for epoch in (0, 0.99, 1, 2, 3.5, 4, 50)]
    assert densities == pytest.approx([0.2512, 0.2512, 0.0631, 0.01585, 0.00398, 0.001, 0.001], rel=2e-3)
    assert DGC(density=0.001, warmup_epochs=0).scheduled(0.001, 0) == 0.001
    exchange, plan = exchange_for("dgc", specs=[TensorSpec("m", (400, 500))], dtype=torch.float32)
    counts = []
    for epoch in range(6):
        x_W = torch.randn(4, 400, 500, generator=torch.Generator().manual_seed(epoch))
        before = exchange.comm.ledger.counts["payload"]
        exchange([x_W], StepInfo(plan, epoch, 0.1, epoch))
        counts.append((exchange.comm.ledger.counts["payload"] - before) / 4)
        assert 0.5 * exchange.predicted_bytes(StepInfo(plan, epoch, epoch=epoch)) < counts[-1]
        assert counts[-1] <= exchange.predicted_bytes(StepInfo(plan, epoch, epoch=epoch))
    assert counts[0] > 3 * counts[1] > 9 * counts[2] > 27 * counts[3] and counts[3] > 3 * counts[4]


def norms(xs_W):
    return torch.stack([x.flatten(1).square().sum(1) for x in xs_W]).sum(0).sqrt()


@pytest.mark.parametrize("workers", [1, 2, 4, 16])
def test_each_worker_clips_to_its_share(workers):
    xs_W = gradients(workers=workers).tensors
    scales_W = torch.linspace(0.01, 2, workers, dtype=torch.float64)
    xs_W = [x * scales_W.view(-1, *[1] * (x.ndim - 1)) for x in xs_W]
    clip = float(norms(xs_W).median()) * math.sqrt(workers)
    after_W = clipped(xs_W, clip, workers)
    torch.testing.assert_close(norms(after_W), norms(xs_W).clamp_max(clip / math.sqrt(workers)))
    for x, y in zip(xs_W, after_W, strict=True):
        factors = norms(after_W) / norms(xs_W)
        torch.testing.assert_close(y, x * factors.view(-1, *[1] * (x.ndim - 1)))
    ours, plan = dgc(workers=workers, density=0.1, clip=clip)
    theirs, _ = dgc(workers=workers, density=0.1)
    for step in range(2):
        for a, b in zip(
            ours(xs_W, StepInfo(plan, step, 0.1, LATE)), theirs(after_W, StepInfo(plan, step, 0.1, LATE)), strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert ours.comm.ledger.counts == theirs.comm.ledger.counts  # clipping sends nothing


def test_clipping_survives_zero_and_huge_gradients():
    xs_W = [torch.zeros(2, 3, 3), torch.full((2, 4), 1e30)]
    xs_W[1][0] = 0
    after_W = clipped(xs_W, 1.0, 2)
    assert all(x.isfinite().all() for x in after_W)
    assert norms(after_W).tolist() == pytest.approx([0, math.sqrt(0.5)])
    assert clipped([], 1.0, 2) == []


def test_saved_and_loaded_it_goes_on_with_equal_bits():
    straight, plan = exchange_for("dgc", density=0.02)
    for step in range(4):
        straight(gradients(step=step).tensors, StepInfo(plan, step, 0.1, step))
    file = io.BytesIO()
    torch.save(straight.state, file)
    file.seek(0)
    resumed, _ = exchange_for("dgc", density=0.02)
    for name, entries in torch.load(file, weights_only=True).items():
        for key, value in entries.items():
            assert key.endswith("_W") and value.shape[0] == 4
            resumed.state[name][key].copy_(value)
    for step in range(4, 8):
        xs_W = gradients(step=step).tensors
        pairs = zip(
            straight(xs_W, StepInfo(plan, step, 0.1, step)), resumed(xs_W, StepInfo(plan, step, 0.1, step)), strict=True
        )
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("stop_at", [4, 15])
def test_a_run_that_was_stopped_and_resumed_is_the_straight_one(tmp_path, stop_at):
    """Through checkpoints, in and after the warm-up, with clipping, under Accordion."""
    options = ["compressor=dgc", "compressor.density=0.1", "compressor.warmup_epochs=2", "compressor.clip=0.5"]
    options += ["adaptive=accordion", "adaptive.accordion.interval=1", "adaptive.accordion.eta=0.2"]
    ends = []
    for name in ("straight", "stopped"):
        torch.manual_seed(0)  # the global generator's state is saved, too
        cfg = test_resume.start(tmp_path / name, *options)
        if name == "stopped":
            folder = test_resume.stop(cfg, stop_at, every=1)
            test_resume.resume(folder, cfg)
        else:
            train.run(cfg)
        ends.append(test_resume.state(tiny.only(tmp_path / name)))
    assert test_resume.differences(*ends) == []
    assert ends[0]["files"]["worker-2.pt"]["exchange_states"]["gradient"]["a.weight"]["v_W"].abs().sum() > 0


def test_momentum_is_the_optimizers_own():
    built = compressor("dgc").compressor
    assert isinstance(built, DGC)
    assert (built.momentum, built.nesterov, built.traits.optimizer.owns) == (0.9, True, {"momentum"})


def test_error_feedback_around_it_is_refused():
    with pytest.raises(
        ConfigError, match=r"error_feedback must be false, because it already accumulates .* in v.*error_feedback=false"
    ):
        compressor("dgc", error_feedback=True)


def test_another_optimizer_is_refused():
    with pytest.raises(ConfigError, match="optimizer must be sgd"):
        build_components(RunConfig.from_dict(composed.cfg("compressor=dgc", "optimizer=adamw")), 4)
