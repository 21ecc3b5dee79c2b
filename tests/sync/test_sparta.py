"""SPARTA: identities with averages of everything, explicit lists, the draw, bytes; alone and beside averagings."""

import pytest
import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.plan import TensorSpec
from accordion_bench.sync.what import SparseAverage
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.keyed_rng import draw_distinct
from tests.kit import local
from tests.kit.local import deviation, trained, trainer_for

SPARTA, SAME = "sync=sparta", 1e-14
SPECS = [TensorSpec("a", (7, 5)), TensorSpec("b", (3,)), TensorSpec("none", (0, 4)), TensorSpec("c", ())]
N = 39


def average(share: float, workers: int = 3, specs=SPECS, seed: int = 5) -> SparseAverage:
    return SparseAverage(share, specs, Comm(workers), torch.zeros((), dtype=torch.float64), seed)


def some_replicas(workers: int = 3, specs=SPECS) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(spec.shape, generator=generator, dtype=torch.float64) for spec in specs] for _ in range(workers)
    ]


def flat(models: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.cat([x.detach().flatten() for x in own]) for own in models])


# ---- one average


@pytest.mark.parametrize("share, kept", [(0.001, 1), (0.1, 3), (0.5, 19), (1.0, 39)])
def test_drawn_coordinates_become_the_mean_and_no_others(share, kept):
    sparse, replicas = average(share), some_replicas()
    before = flat(replicas)
    sparse.average_(replicas, 4)
    after = flat(replicas)
    drawn = draw_distinct(N, kept, keyed_rng.generator(5, "sparse average", 4))
    expected = before.clone()
    expected[:, drawn] = before[:, drawn].mean(0)
    assert sparse.kept == len(drawn) == kept
    assert float((after - expected).abs().max()) < 1e-15
    rest = torch.ones(N, dtype=torch.bool).index_fill_(0, drawn, False)
    assert torch.equal(after[:, rest], before[:, rest])
    assert all(torch.equal(row, after[0, drawn]) for row in after[:, drawn])


def test_the_draw_is_keyed_and_touches_all_alike():
    sparse = average(0.25)

    def drawn(step, sparse=sparse):
        starts = [0, 35, 38, 38]
        return torch.cat([starts[i] + places for i, places in sparse.drawn(step)])

    assert torch.equal(drawn(3), drawn(3)) and not torch.equal(drawn(3), drawn(4))
    assert not torch.equal(drawn(3), drawn(3, average(0.25, seed=6)))
    counts = torch.zeros(N)
    for step in range(2000):
        counts[drawn(step)] += 1
    share = 9 / N
    deviation_of_one = (2000 * share * (1 - share)) ** 0.5
    assert counts.sum() == 9 * 2000 and float((counts - 2000 * share).abs().max()) < 4.5 * deviation_of_one


def test_memory_in_another_order_and_half_precision():
    specs = [TensorSpec("image", (4, 3, 5, 5)), TensorSpec("bias", (4,))]
    plain = some_replicas(2, specs)
    turned = [[own[0].clone(memory_format=torch.channels_last), own[1].clone()] for own in plain]
    for replicas in (plain, turned):
        average(0.3, 2, specs).average_(replicas, 0)
    assert torch.equal(flat(plain), flat(turned)) and not turned[0][0].is_contiguous()
    half = [[x.to(torch.bfloat16) for x in own] for own in some_replicas(2, specs)]
    sparse = SparseAverage(1.0, specs, Comm(2), half[0][0])
    sparse.average_(half, 0)
    assert torch.equal(flat(half)[0], flat(half)[1]) and half[0][0].dtype == torch.bfloat16
    assert sparse.comm.ledger.columns()["payload_bytes"] == 4 * sparse.numel


def test_what_is_not_finite_is_not_sent():
    sparse, replicas = average(1.0), some_replicas()
    replicas[2][1][0] = float("nan")
    with pytest.raises(NonFinite, match="a parameter on worker 2 is not finite"):
        sparse.average_(replicas, 0)
    assert sparse.comm.ledger.counts["payload"] == 0


# ---- runs


def test_with_all_coordinates_it_is_parameter_averaging_in_each_step(tmp_path):
    every = trainer_for(tmp_path, SPARTA, "sync.sparta=1")
    expected = local.twin(every, lambda taken, lr, models, _: local.assign(models, local.mean(models)))
    seen: list = []
    local.fitted(every, lambda t: seen.append(local.replicas(t)))
    assert all(local.all_equal(models) for models in seen)
    assert deviation(seen[-1][0], expected[0]) < SAME
    averaged: list = []
    trained(tmp_path, "sync=local_sgd", "sync.period=1", watch=lambda t: averaged.append(local.replicas(t)[0]))
    assert max(deviation(ours[0], theirs) for ours, theirs in zip(seen, averaged, strict=True)) < SAME


@pytest.mark.parametrize("options", [["optimizer=sgd"], ["optimizer=adamw", "optimizer.lr=0.01"]])
def test_equals_explicit_lists(tmp_path, options):
    run = trainer_for(tmp_path, SPARTA, "sync.sparta=0.2", *options)

    def some(taken, lr, models, optimizers):
        local.average_drawn(run, models, 0.2, taken - 1)

    adamw = {"kind": torch.optim.AdamW, "betas": (0.9, 0.999), "weight_decay": run.config.optimizer["weight_decay"]}
    expected = local.twin(run, some, **(adamw if "adamw" in options[0] else {}))
    last: list = []
    local.fitted(run, lambda t: last.__setitem__(slice(None), local.replicas(t)))
    assert max(deviation(a, b) for a, b in zip(last, expected, strict=True)) < 1e-12
    assert not local.all_equal(last)
    # the end is exact, and what is evaluated
    assert deviation(run.axis.shared, local.mean(expected)) < 1e-12 and local.all_equal(local.replicas(run))


def test_bytes_are_four_for_each_drawn_coordinate(tmp_path):
    run = trained(tmp_path, SPARTA, "sync.sparta=0.03", "model._target_=tests.kit.models.Plain")
    columns, d = run.comm.ledger.columns(), sum(spec.numel for spec in run.axis.specs)
    k = int(0.03 * d)
    assert run.position.step == 24
    assert columns["payload_bytes"] == 24 * 4 * k + 4 * d
    assert columns["wire_bytes"] == 2 * 3 / 4 * (24 * 4 * k + 4 * d) and columns["rounds"] == 25 * 2 * 3
    assert columns["paper_floats"] == 24 * k + d and columns["dense_bytes"] == 24 * 4 * d
    info = run.position.info()
    assert run.sync.exchange.predicted_bytes(info) == run.sync.exchange.mean_bytes(info) == 4 * k


def test_entropy_counts_what_has_no_codes(tmp_path):
    """Sparse averages, averaged buffers and the exact average at the end."""
    coded = ["sync=local_sgd", "sync.period=7", "compressor=qsgd", "compressor.entropy=huffman"]
    run = trained(tmp_path, *coded, "sync.sparta=0.03", "sync.buffers=average", "model._target_=tests.kit.models.Plain")
    columns, d = run.comm.ledger.columns(), sum(spec.numel for spec in run.axis.specs)
    averagings, plain = 3, 24 * 4 * int(0.03 * d) + (3 + 1) * 4 * d
    assert plain < columns["entropy_bytes"] < columns["payload_bytes"] < plain + averagings * 4 * d


def test_the_mean_of_the_replicas_is_evaluated(tmp_path):
    found = []

    def watch(trainer):
        before = trainer.comm.ledger.counts["eval"]
        consensus, replicas = local.consensus(trainer), local.replicas(trainer)
        spent = trainer.comm.ledger.counts["eval"] - before
        found.append(
            (deviation(consensus, local.mean(replicas)), spent, deviation(replicas[0], local.replicas(trainer)[0]))
        )

    run = trained(tmp_path, SPARTA, "epochs=1", watch=watch)
    d = sum(spec.numel for spec in run.axis.specs)
    assert all(apart < SAME and spent == 8 * d and still == 0 for apart, spent, still in found)  # float64
    loose = trained(tmp_path / "loose", SPARTA, "epochs=1", "sync.final=false")
    assert not local.all_equal(local.replicas(loose))
    assert deviation(local.consensus(loose), local.mean(local.replicas(loose))) < SAME


def test_synchronous_steps_first(tmp_path):
    apart = []
    run = trained(tmp_path, SPARTA, "sync.switch_step=6", watch=lambda t: apart.append(len(t.axis.replicas)))
    assert apart == [0] * 6 + [4] * 18
    both = [
        trainer_for(tmp_path / name, *typed)
        for name, typed in (("dense", []), ("again", [SPARTA, "sync.switch_step=6"]))
    ]
    for one in both:
        one.begin_epoch()
        for _ in range(6):
            one.train_step()
    assert local.all_equal([one.axis.shared for one in both]) and run.position.step == 24


# ---- beside averagings of everything


def test_beside_diloco_equals_explicit_lists(tmp_path):
    options = ["sync=diloco", "sync.period=4", "sync.sparta=0.2", "sync.outer_nesterov=false"]
    run = trainer_for(tmp_path, *options)
    z = [x.detach().clone() for x in run.axis.params]
    buffer: list = [None] * len(z)

    @torch.no_grad()
    def step(taken, lr, models, optimizers):
        local.average_drawn(run, models, 0.2, taken - 1)
        if taken % 4 == 0:
            for i, mean in enumerate(local.mean(models)):
                moved = z[i] - mean
                buffer[i] = moved if buffer[i] is None else 0.9 * buffer[i] + moved
                z[i] = z[i] - 0.7 * buffer[i]
            local.assign(models, z)

    expected = local.twin(run, step)
    local.fitted(run)
    assert deviation(run.axis.shared, z) < 1e-12 and deviation(run.axis.shared, expected[0]) < 1e-12


@pytest.mark.parametrize("scheme", ["local_sgd", "slowmo", "diloco"])
def test_beside_an_average_it_keeps_the_mean_and_brings_the_workers_closer(tmp_path, scheme):
    """After a first round: the mean of all coordinates stays, as SGD's own steps are what differs later."""
    spread = {}
    for share in ("null", "0.5"):
        seen = []
        trained(
            tmp_path / share, f"sync={scheme}", "sync.period=6", f"sync.sparta={share}", "epochs=1",
            watch=lambda t, seen=seen: seen.append(flat(local.replicas(t)).std(0).mean().item()),
        )  # fmt: skip
        spread[share] = seen
    assert all(some < none for some, none in zip(spread["0.5"][:5], spread["null"][:5], strict=True))
    assert spread["0.5"][5] < 1e-15 > spread["null"][5]


def test_bytes_beside_compressed_differences(tmp_path):
    typed = ["sync=local_sgd", "sync.period=6", "compressor=topk", "compressor.density=0.1"]
    typed += ["model._target_=tests.kit.models.Plain"]
    alone = trained(tmp_path / "alone", *typed).comm.ledger.columns()
    run = trained(tmp_path / "beside", *typed, "sync.sparta=0.05")
    columns, k = run.comm.ledger.columns(), int(0.05 * sum(spec.numel for spec in run.axis.specs))
    assert columns["payload_bytes"] == alone["payload_bytes"] + 24 * 4 * k
    assert columns["wire_bytes"] == alone["wire_bytes"] + 24 * 4 * k * 2 * 3 / 4
    kinds = {kind.what: times for kind, (times, *_) in run.clock.exchanges().items()}
    assert kinds == {"parameter": 23, "difference": 4}  # all but the first step
