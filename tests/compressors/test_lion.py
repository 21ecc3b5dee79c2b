"""Distributed Lion: against its equations in float64, one worker against Lion, bytes, dense tensors, refusals."""

import pytest
import torch

from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.compressors.sign import DistributedLion
from accordion_bench.optimizers.elementwise import Decay
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from tests.kit import composed, local
from tests.kit.helpers import SPECS, exchange_for, gradients
from tests.kit.local import deviation, trained

LION = ["optimizer=lion", "optimizer.lr=0.01", "optimizer.weight_decay=0.1"]


def signs(x):
    return torch.tensor([1.0 if value >= 0 else -1.0 for value in x.flatten().tolist()]).double().view(x.shape)


@pytest.mark.parametrize("vote, workers", [("majority", 3), ("majority", 1), ("mean", 4), ("mean", 70)])
def test_as_its_equations(vote, workers):
    """Odd numbers of workers, whose majorities are no tie; of 70 workers signs no longer pay as a gather."""
    exchange, plan = exchange_for("lion", workers, vote=vote)
    momenta = [[torch.zeros(spec.shape, dtype=torch.float64) for spec in SPECS] for _ in range(workers)]
    for step in range(4):
        xs_W = gradients(workers=workers, step=step).tensors
        updates = exchange([x_W.clone() for x_W in xs_W], StepInfo(plan, step))
        for i, update in enumerate(updates):
            votes = []
            for w in range(workers):
                votes.append(signs(0.9 * momenta[w][i] + 0.1 * xs_W[i][w]))
                momenta[w][i] = 0.99 * momenta[w][i] + 0.01 * xs_W[i][w]
            expected = sum(votes) / workers if vote == "mean" else signs(sum(votes))
            assert float((update - expected).abs().max()) < 1e-10
    for i, spec in enumerate(SPECS):
        for w in range(workers):
            kept = exchange.state[spec.name]["momentum_W"][w]
            torch.testing.assert_close(kept, momenta[w][i], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("vote", ["majority", "mean"])
def test_a_tie_is_a_coin_or_nothing(vote):
    one = torch.ones(1, 8, 100, dtype=torch.float64)
    exchange, plan = exchange_for("lion", 2, [TensorSpec("w", (8, 100))], vote=vote)
    (update,) = exchange([torch.cat([one, -one])], StepInfo(plan, 0))
    if vote == "mean":
        assert not update.any()
    else:
        assert update.abs().eq(1).all() and abs(float(update.mean())) < 0.15


@pytest.mark.parametrize("vote", ["majority", "mean"])
def test_one_worker_is_lion(tmp_path, vote):
    """Bit for bit, with decay of the weights and drops of the learning rate; no coordinate is ever exactly 0."""
    alone, sent = [], []
    trained(tmp_path, *LION, workers=1, watch=lambda t: alone.append([x.clone() for x in t.axis.shared]))
    options = ["compressor=lion", f"compressor.vote={vote}", *LION]
    run = trained(tmp_path, *options, workers=1, watch=lambda t: sent.append([x.clone() for x in t.axis.shared]))
    assert type(run.inner.common).__mro__[1] is Decay
    assert all(
        torch.equal(a, b) for ours, theirs in zip(sent, alone, strict=True) for a, b in zip(ours, theirs, strict=True)
    )
    assert deviation(sent[0], sent[-1]) > 0.01


def test_equal_workers_are_one_lion():
    xs = gradients(workers=1).tensors
    found = []
    for workers in (1, 5):
        exchange, plan = exchange_for("lion", workers)
        for step in range(3):
            updates = exchange([x.expand(workers, *x.shape[1:]).clone() for x in xs], StepInfo(plan, step))
        found.append(updates)
    assert all(map(torch.equal, *found))


def test_dense_steps_go_by_the_sign_of_the_mean(tmp_path):
    """As one Lion on the mean gradient, whose momentum is the mean of theirs."""
    dense, lion = [], []
    options = ["compressor=lion", "compressor.start_step=1000", *LION]
    trained(tmp_path, *options, watch=lambda t: dense.append([x.clone() for x in t.axis.shared]))
    trained(tmp_path, *LION, watch=lambda t: lion.append([x.clone() for x in t.axis.shared]))
    assert max(deviation(a, b) for a, b in zip(dense, lion, strict=True)) < 1e-14


def test_a_bit_each_way():
    spec = TensorSpec("w", (64, 72))
    majority, mean = (DistributedLion(vote) for vote in ("majority", "mean"))
    assert payload_bytes(mean, spec, 1, 4) == spec.numel // 8
    exchange, plan = exchange_for("lion", 4, [spec])
    exchange([torch.randn(4, 64, 72, dtype=torch.float64)], StepInfo(plan, 0))
    assert exchange.comm.ledger.columns()["payload_bytes"] == spec.numel // 8 * 5 // 4
    assert exchange.comm.ledger.columns()["wire_bytes"] == 2 * 3 * spec.numel // 8 // 4
    assert majority.traits.collectives == ("two_way",) and mean.traits.collectives == ("all_gather",)


@pytest.mark.parametrize("typed, told", [
    (["optimizer=lion", "compressor.vote=median"], "compressor.vote must be one of majority, mean, got median; type"),
    (["optimizer=adamw"], "optimizer must be lion, because this compressor takes the step itself .*; type optimizer=l"),
    (["optimizer=lion", "+compressor.error_feedback=true"], "compressor.error_feedback must be false, because its mom"),
    (["optimizer=lion", "+compressor.collective=all_gather"], "compressor.collective must be two_way, because .*vote"),
    (["optimizer=lion", "sync=local_sgd"], "compressor must leave momentum and step to the optimizer .*, got lion"),
    (["optimizer=lion", "optimizer.betas=[0.9,1]"], "betas must be two numbers at least 0 and below 1, got .*; type"),
])  # fmt: skip
def test_refused_in_a_sentence(typed, told):
    with pytest.raises(ConfigError, match=told):
        composed.validated(composed.cfg("compressor=lion", "workers=4", *typed))


def test_local_steps_of_lion(tmp_path):
    """Its momentum is a first moment: with periods of 1 all workers go one way."""
    run = trained(tmp_path, "sync=desloc", "sync.period=1", "sync.momentum_period=1", *LION)
    assert local.all_equal(local.replicas(run))
