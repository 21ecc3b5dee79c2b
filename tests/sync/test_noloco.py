"""NoLoCo against explicit lists; its mean's momentum SGD; who meets whom; bytes."""

from collections import Counter

import pytest
import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.plan import Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.sync.who import PairExchange
from tests.kit import local
from tests.kit.local import deviation, trained, trainer_for

NOLOCO, SAME = "sync=noloco", 1e-14
SPECS = [TensorSpec("a", (5, 3)), TensorSpec("b", ())]


def pairs(workers: int, seed: int = 3) -> PairExchange:
    return PairExchange(SPECS, Comm(workers), torch.zeros((), dtype=torch.float64), seed)


def stacked(replicas: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """One tensor [W, ...] per spec."""
    return [torch.stack(xs) for xs in zip(*replicas, strict=True)]


# ---- who meets whom


@pytest.mark.parametrize("workers", [2, 4, 10])
def test_everybody_meets_one_other(workers):
    met = pairs(workers)
    for step in range(50):
        partner = met.partners(step)
        assert all(partner[partner[worker]] == worker != partner[worker] for worker in range(workers))
    assert met.partners(7) == pairs(workers).partners(7)


def test_every_way_to_form_pairs_is_equally_likely():
    met, times = pairs(4), 3000
    counts = Counter(tuple(met.partners(step)) for step in range(times))
    assert set(counts) == {(1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0)}
    assert max(abs(count - times / 3) for count in counts.values()) < 4 * (times * 2 / 9) ** 0.5
    assert any(met.partners(step) != pairs(4, seed=4).partners(step) for step in range(20))


@pytest.mark.parametrize("workers", [1, 2, 6])
def test_partners_get_one_mean_bit_for_bit(workers):
    met = pairs(workers)
    generator = torch.Generator().manual_seed(0)
    replicas = [
        [torch.randn(spec.shape, generator=generator, dtype=torch.float64) for spec in SPECS] for _ in range(workers)
    ]
    before = [[x.clone() for x in own] for own in replicas]
    means_W, partner = met(stacked(replicas), StepInfo(Plan(), 2)), met.partners(2)
    means = [[mean_W[worker] for mean_W in means_W] for worker in range(workers)]
    for worker, mean in enumerate(means):
        expected = [(a + b) / 2 for a, b in zip(before[worker], before[partner[worker]], strict=True)]
        assert local.all_equal([mean, means[partner[worker]], expected])
    assert local.all_equal([[x for own in replicas for x in own], [x for own in before for x in own]])
    columns = met.comm.ledger.columns()
    assert columns["payload_bytes"] == 8 * 16 and columns["wire_bytes"] == 8 * 16 * (workers > 1)
    assert columns["rounds"] == (workers > 1)


def test_what_is_not_finite_is_not_sent():
    met = pairs(2)
    replicas = [[torch.zeros(spec.shape, dtype=torch.float64) for spec in SPECS] for _ in range(2)]
    replicas[1][0][2, 2] = float("inf")
    with pytest.raises(NonFinite, match="the value of a on worker 1 is not finite"):
        met(stacked(replicas), StepInfo(Plan(), 0))
    assert met.comm.ledger.counts["payload"] == 0


# ---- runs


def anchors(run) -> list[list[torch.Tensor]]:
    """z of every worker."""
    return [group.anchor for group in run.sync.tiers[-1].groups]


def velocities(run) -> list[list[torch.Tensor]]:
    """m of every worker."""
    return [group.outers[0].buffers(group.anchor) for group in run.sync.tiers[-1].groups]


def reference(run, period, lr, mu):
    """z and m of every worker, after the equation with Delta and z apart."""
    workers = run.comm.workers
    z = [[x.detach().clone() for x in run.axis.params] for _ in range(workers)]
    m = [[torch.zeros_like(x) for x in own] for own in z]

    @torch.no_grad()
    def after_step(taken, rate, models, optimizers):
        if taken % period:
            return
        partner = run.sync.exchange.partners(taken - 1)
        delta = [[x - a for x, a in zip(own, mine, strict=True)] for own, mine in zip(models, z, strict=True)]
        old = [[a.clone() for a in own] for own in z]
        for w in range(workers):
            for i in range(len(z[w])):
                mean_delta = (delta[w][i] + delta[partner[w]][i]) / 2
                mean_z = (old[w][i] + old[partner[w]][i]) / 2
                m[w][i] = mu * m[w][i] + lr * mean_delta + lr * (mean_z - old[w][i])
                z[w][i] = old[w][i] + m[w][i]
                models[w][i].copy_(z[w][i])

    return after_step, z, m


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("options", [[], ["sync.outer_lr=0.5", "sync.outer_momentum=0.6"], ["optimizer=adamw"]])
def test_equals_explicit_lists(tmp_path, options, workers):
    run = trainer_for(tmp_path, NOLOCO, "sync.period=5", "optimizer.lr=0.01", *options, workers=workers)
    after_step, z, m = reference(run, 5, run.sync.outer_lr, run.sync.outer_momentum)
    adamw = {"kind": torch.optim.AdamW, "betas": (0.9, 0.999), "weight_decay": run.config.optimizer["weight_decay"]}
    expected = local.twin(run, after_step, **(adamw if "adamw" in str(options) else {}))
    last: list = []
    local.fitted(run, lambda t: last.__setitem__(slice(None), local.replicas(t)))
    for w in range(workers):
        assert deviation(last[w], expected[w]) < 1e-12
        assert deviation(anchors(run)[w], z[w]) < 1e-12 and deviation(velocities(run)[w], m[w]) < 1e-12
    # four steps after the last meeting, the end is an exact average of what the workers are
    assert deviation(run.axis.shared, local.mean(expected)) < 1e-12 and local.all_equal(local.replicas(run))


def test_the_mean_takes_a_step_of_momentum_sgd_on_the_mean_difference(tmp_path):
    run = trainer_for(tmp_path, NOLOCO, "sync.period=3")
    mean_z = [x.detach().clone() for x in run.axis.params]
    velocity = [torch.zeros_like(x) for x in mean_z]
    meet, apart, spread = run.sync.use, [], []

    def spied():
        delta = [x - z for x, z in zip(local.mean(run.axis.replicas), local.mean(anchors(run)), strict=True)]
        meet()
        for i, d in enumerate(delta):
            velocity[i] = 0.3 * velocity[i] + 0.7 * d
            mean_z[i] = mean_z[i] + velocity[i]
        apart.append(deviation(local.mean(anchors(run)), mean_z))
        spread.append(deviation(*anchors(run)[:2]))
        assert local.all_equal([local.replicas(run)[2], anchors(run)[2]])

    run.sync.use = spied
    local.fitted(run)
    assert len(apart) == 8 and max(apart) < SAME and min(spread[1:]) > 1e-6


def test_bytes_of_a_meeting_are_those_of_one_message(tmp_path):
    found = {}
    for workers in (2, 4):
        typed = [NOLOCO, "sync.period=5", "model._target_=tests.kit.models.Plain"]
        run = trained(tmp_path / str(workers), *typed, workers=workers)
        d, columns = sum(spec.numel for spec in run.axis.specs), run.comm.ledger.columns()
        meetings = run.position.step // 5
        assert columns["payload_bytes"] == (meetings + 1) * 4 * d
        end = 2 * (workers - 1) / workers * 4 * d
        assert columns["wire_bytes"] == meetings * 4 * d + end
        assert columns["rounds"] == meetings + 2 * (workers - 1)
        found[workers] = (columns["wire_bytes"] - end) / meetings
        assert run.sync.exchange.predicted_bytes(run.position.info()) == 4 * d
    assert found[2] == found[4]


def test_the_mean_z_is_evaluated_and_counted(tmp_path):
    seen = []

    def watch(trainer):
        before = trainer.comm.ledger.counts["eval"]
        consensus = local.consensus(trainer)
        spent = trainer.comm.ledger.counts["eval"] - before
        seen.append((deviation(consensus, local.mean(anchors(trainer))), spent))

    run = trained(tmp_path, NOLOCO, "sync.period=4", "epochs=1", watch=watch)
    assert all(apart < SAME and spent == 8 * sum(s.numel for s in run.axis.specs) for apart, spent in seen)  # float64
    loose = trained(tmp_path / "loose", NOLOCO, "sync.period=6", "epochs=1", "sync.final=false")
    assert deviation(local.consensus(loose), local.mean(anchors(loose))) < SAME
    assert not local.all_equal(local.replicas(loose))


def test_buffers_are_reset_where_workers_meet(tmp_path):
    kept = {}
    for buffers in ("keep", "reset"):
        seen = kept[buffers] = []
        trained(
            tmp_path / buffers, NOLOCO, "sync.period=3", f"sync.buffers={buffers}", "epochs=1",
            watch=lambda t, seen=seen: seen.append(all(len(own.state) > 0 for own in t.inner.of_replicas)),
        )  # fmt: skip
    assert kept == {"keep": [True] * 6, "reset": [True, True, False] * 2}


@pytest.mark.parametrize("partners", [[1, 0, 3, 2], [2, 3, 0, 1]])
def test_simulated_workers_send_and_receive(partners):
    comm = Comm(4)
    rows = torch.arange(8.0).view(4, 2)
    assert torch.equal(comm.send_receive(rows, partners), rows[partners])
    assert comm.ledger.kinds["send_receive"] == (4 * 8, 1)
