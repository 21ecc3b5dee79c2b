"""0/1 Adam: a twin by hand in float64, when it refreshes and averages, bytes, dead coordinates, refusals."""

from dataclasses import replace

import pytest
import torch

from accordion_bench.compressors.assemble import CompressorSetup
from accordion_bench.compressors.description import OptimizerPart
from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.compressors.uncoded import Dense
from accordion_bench.config.components import build_components
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import RunFacts
from accordion_bench.run_config import RunConfig
from accordion_bench.sync.zerooneadam import ZeroOneAdam
from tests.compressors.test_onebitadam import Nothing
from tests.kit import composed, local
from tests.kit.helpers import residuals, server_residuals
from tests.kit.local import deviation, replicas, trainer_for

B1, B2 = 0.9, 0.999
EPS = 1e-5  # with 1e-8 a gradient of nearly nothing is mostly rounding, enlarged, another on each kind of processor
ADAM = ["sync=zerooneadam", "optimizer=adamw"]
QUICK = {"freeze_step": 9, "refreshes": 2, "doubling_steps": 4, "longest_period": 4}
REFRESHED = [1, 2, 4, 6, 8]  # steps, counted from 1: kappa 1 for two refreshes, 2 for two, then 4
AVERAGED = [10, 11, 12, 13, 15, 17, 21]  # H 1 for four local steps, 2 for four, then 4


def typed(**options) -> list[str]:
    return [*ADAM, *(f"sync.{key}={value}" for key, value in {**QUICK, **options}.items())]


@pytest.fixture
def identity(monkeypatch):
    """Messages that lose nothing."""

    def messages(self) -> CompressorSetup:
        dense = Dense()
        dense.traits = replace(dense.traits, optimizer=OptimizerPart(frozenset({"momentum", "lr"}), fits=("AdamW",)))
        return CompressorSetup(dense)

    monkeypatch.setattr(ZeroOneAdam, "messages", messages)


class ByHand:
    """What the paper and its code write: u and S are summed up, nothing is read off the parameters."""

    def __init__(self, shapes, workers: int, decay: float) -> None:
        def zeros():
            return [torch.zeros(shape, dtype=torch.float64) for shape in shapes]

        self.decay, self.v, self.m_A = decay, zeros(), [zeros() for _ in range(workers)]
        self.u_A, self.S = [zeros() for _ in range(workers)], 0.0

    @torch.no_grad()
    def __call__(self, taken, lr, params, optimizers):
        gradients_A = [[x.grad for x in own] for own in params]
        if taken <= QUICK["freeze_step"]:
            means = [torch.stack(gs).mean(0) for gs in zip(*gradients_A, strict=True)]
            gradients_A = [means] * len(params)
            if taken in REFRESHED:
                self.v = [B2 * v + (1 - B2) * g * g for v, g in zip(self.v, means, strict=True)]
        roots = [v.sqrt() + EPS for v in self.v]
        for own, gs, ms, us in zip(params, gradients_A, self.m_A, self.u_A, strict=True):
            for i, (x, g, root) in enumerate(zip(own, gs, roots, strict=True)):
                ms[i] = B1 * ms[i] + (1 - B1) * g
                update = ms[i] / root + self.decay * x
                x -= lr * update
                us[i] -= lr * update
        if taken <= QUICK["freeze_step"]:
            self.u_A = [[torch.zeros_like(u) for u in us] for us in self.u_A]
            return
        self.S += lr
        if taken in AVERAGED:
            for i, root in enumerate(roots):
                mean = torch.stack([us[i] * root for us in self.u_A]).mean(0)
                for own, ms, us in zip(params, self.m_A, self.u_A, strict=True):
                    own[i] -= us[i]
                    ms[i] = -mean / self.S
                    own[i] += mean / root
                    us[i] = torch.zeros_like(us[i])
            self.S = 0.0


def test_without_compression_it_is_the_twin(tmp_path, identity):
    """Parameters of all workers after every step, under a schedule, with decay."""
    run = trainer_for(tmp_path, *typed(), "optimizer.weight_decay=0.05")
    run.sync.eps = EPS
    by_hand = ByHand([spec.shape for spec in run.axis.specs], 4, 0.05)
    theirs: list = []

    def after_step(taken, lr, params, optimizers):
        by_hand(taken, lr, params, optimizers)
        theirs.append([[x.detach().clone() for x in own] for own in params])

    local.twin(run, after_step, Nothing)
    ours: list = []

    def watch(trainer):
        ours.append(replicas(trainer) or [[x.clone() for x in trainer.axis.shared]] * 4)

    local.fitted(run, watch)
    assert len(ours) == len(theirs) == 24
    for step, (models, twins) in enumerate(zip(ours, theirs, strict=True)):
        assert max(map(deviation, models, twins)) < 1e-11, step


def test_it_refreshes_and_averages_ever_more_seldom(tmp_path):
    """What is exchanged in each of 24 steps, and its bytes, by hand."""
    run = trainer_for(tmp_path, *typed())
    dense, payload, refreshed, averaged = 4 * run.exchange.numel, [], [], []
    before = 0

    def watch(trainer):
        nonlocal before
        payload.append((trainer.comm.ledger.counts["payload"] - before) / 4)
        before = trainer.comm.ledger.counts["payload"]
        step = trainer.position.step
        if step <= 9 and payload[-1] == 2 * dense:  # float64 travels in 8 bytes
            refreshed.append(step)
        if step > 9 and payload[-1]:
            averaged.append(step)

    local.fitted(run, watch)
    assert refreshed == REFRESHED and averaged == AVERAGED
    signs = run.sync.signs
    told = sum(payload_bytes(signs.compressor, spec, 1.0, 4) for spec in run.axis.specs)
    assert all(paid == pytest.approx(told) for step, paid in enumerate(payload, 1) if paid and step not in REFRESHED)
    makes = [(exchange.what, times) for exchange, times in run.sync.makes(RunFacts(train_size=24))]
    assert makes == [("exact gradient", 5), ("gradient", 4), ("difference", 7)]


def test_a_variance_that_is_never_frozen_nor_spared_is_adam(tmp_path):
    """kappa stays 1: the same run as 1-bit Adam before its freeze, bit for bit."""
    ours = local.trained(tmp_path / "0", *ADAM, "sync.freeze_step=23", "sync.refreshes=1000", "epochs=4")
    theirs = trainer_for(tmp_path / "1", "compressor=onebitadam", "optimizer=adamw", "compressor.freeze_step=23")
    at_23: list = []
    local.fitted(theirs, lambda t: at_23.append([x.clone() for x in t.axis.shared]))
    again = trainer_for(tmp_path / "2", *ADAM, "sync.freeze_step=23", "sync.refreshes=1000")
    seen: list = []
    local.fitted(again, lambda t: seen.append([x.clone() for x in t.axis.shared]))
    assert deviation(seen[22], at_23[22]) < 1e-12
    assert ours.sync.forked and not local.all_equal([seen[23], seen[22]])


def test_workers_agree_after_every_averaging(tmp_path):
    """Replicas, the consensus and the momenta."""

    def watch(trainer):
        if trainer.sync.forked and trainer.sync.since == 0:
            assert local.all_equal([*replicas(trainer), trainer.axis.shared])
            assert all(bool((m_W == m_W[0]).all()) for m_W in trainer.sync.momentum_W)

    run = local.trained(tmp_path, *typed(), watch=watch)
    assert run.sync.since == 0 and run.sync.current_period == 4


def test_what_an_averaging_loses_is_kept(tmp_path):
    """Sum of D + mean of residuals (+ the owners') = sum of the mean differences in units of the momentum."""
    run = trainer_for(tmp_path, *typed())
    moved: dict[str, torch.Tensor] = {}
    sent: dict[str, torch.Tensor] = {}
    original = type(run.runner).run

    def watched(self, exchanges, xs_W, rate=1.0):
        completed = original(self, exchanges, [[x.clone() for x in xs] for xs in xs_W], rate)
        if exchanges[0].what == "difference":
            for spec, x_W, update in zip(run.axis.specs, xs_W[0], completed.updates[0], strict=True):
                moved[spec.name] = moved.get(spec.name, 0) + x_W.mean(0)
                sent[spec.name] = sent.get(spec.name, 0) + update
        return completed

    run.runner.run = watched.__get__(run.runner)  # type: ignore[method-assign]
    local.fitted(run)
    kept, owners = residuals(run.sync.signs), server_residuals(run.sync.signs)
    for name, total in moved.items():
        apart = sent[name] + kept[name].mean(0) + owners[name].view(total.shape) - total
        assert float(apart.abs().max()) < 1e-12 * max(1.0, float(total.abs().max()))


class HalfUsed(local.Smooth):
    """Some inputs are always 0: their weights have no gradient."""

    def forward(self, x):
        flat = x.double().flatten(1).clone()
        flat[:, ::2] = 0
        return self.b(torch.tanh(self.a(flat)))


def test_coordinates_without_gradients_stay(tmp_path):
    run = trainer_for(tmp_path, *typed(), "optimizer.weight_decay=0", f"model._target_={__name__}.HalfUsed")
    start = run.axis.shared[0].clone()
    local.fitted(run)
    end = run.sync.consensus()[0]
    assert torch.equal(end[:, ::2], start[:, ::2]) and not torch.equal(end[:, 1::2], start[:, 1::2])
    assert not run.sync.signs.state["a.weight"]["residual_W"][:, :, ::2].any()


def test_the_default_freezes_after_a_share_of_the_run(tmp_path):
    run = trainer_for(tmp_path, *ADAM)
    assert run.sync.switch_step == 4  # 15 % of 24
    assert (run.sync.betas, run.sync.eps) == ((0.9, 0.999), 1e-8)


# ---- what is refused

REFUSED = {
    "SGD": (["sync=zerooneadam"], "optimizer must be adamw, because sync=zerooneadam takes the step itself .*; type"),
    "a compressor": ([*ADAM, "compressor=topk"], "compressor must be none with sync=zerooneadam, .*, got topk; type"),
    "longer than the run": ([*ADAM, "sync.freeze_step=100000"], r"sync.freeze_step must be below \d+, the steps of"),
    "no step": ([*ADAM, "sync.freeze_step=0"], "sync.freeze_step must be an integer of at least 1, got 0"),
    "no refresh": ([*ADAM, "sync.refreshes=0"], "sync.refreshes must be an integer of at least 1, got 0"),
    "a period policy": (
        [*ADAM, "adaptive=adacomm"],
        "adaptive=adacomm drives the period between averagings, got sync=zerooneadam, whose period grows by itself",
    ),
    "float16": ([*ADAM, "precision=float16"], "precision must be float32 or bfloat16 where workers take local steps"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    overrides, sentence = REFUSED[name]
    with pytest.raises(ConfigError, match=sentence) as refused:
        composed.validated(composed.cfg("workers=4", "device=cpu", *overrides))
    assert "\n" not in str(refused.value)


def test_it_is_one_of_the_local_schemes():
    parts = build_components(RunConfig.from_dict(composed.cfg(*ADAM)), 4)
    assert parts.sync.local and parts.sync.grows and parts.wrapped.collective == "two_way"
