"""Streaming DiLoCo: DiLoCo with one fragment, explicit lists with several, bytes, what is in flight, resuming there."""

import itertools
import shutil
from collections import Counter

import pytest
import torch
from torch import nn

from accordion_bench.comm.collectives import Comm
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import local
from tests.kit.local import deviation, trained, trainer_for

STREAMING, SAME = "sync=streaming_diloco", 1e-13
DEEP = "model._target_=tests.kit.local.Deep"  # four blocks between a first and a last layer


def of(period: int, fragments: int, delay: int, mixing: float) -> list[str]:
    own = {"period": period, "fragments": fragments, "delay": delay, "mixing": mixing}
    return [STREAMING, *(f"sync.{key}={value}" for key, value in own.items())]


# ---- identities


@pytest.mark.sample(4)
@pytest.mark.parametrize("compressor", ["none", "topk", "qsgd", "distefblocksgd"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_one_fragment_at_once_is_diloco_bit_for_bit(tmp_path, compressor, optimizer):
    """In every step, with residuals and bytes; the run ends in mid-round."""
    seen: list[list] = [[], []]
    typed = [DEEP, f"compressor={compressor}", f"optimizer={optimizer}", "optimizer.lr=0.01"]
    schemes = (["sync=diloco", "sync.period=5"], of(5, 1, 0, 0))
    runs = []
    for found, scheme in zip(seen, schemes, strict=True):

        def note(run, found=found):
            values = [*run.axis.shared, *run.sync.consensus(), *(x for own in local.replicas(run) for x in own)]
            found.append(([x.clone() for x in values], dict(run.comm.ledger.counts)))

        runs.append(trained(tmp_path, *typed, *scheme, watch=note))
    for (ours, own_bytes), (theirs, bytes_) in zip(*seen, strict=True):
        assert own_bytes == bytes_ and all(map(torch.equal, ours, theirs))
    assert all(map(torch.equal, runs[0].axis.shared, runs[1].axis.shared))
    assert runs[0].comm.ledger.counts == runs[1].comm.ledger.counts
    for name, entries in runs[0].exchange.state.items():
        assert all(torch.equal(value, runs[1].exchange.state[name][key]) for key, value in entries.items())


def reference(run, period, delay, mixing):
    """z and an outer optimizer for each fragment, over explicit lists."""
    tensors = run.sync.tensors
    z = [x.detach().clone().requires_grad_() for x in run.axis.params]
    outers = [torch.optim.SGD([z[i] for i in own], lr=0.7, momentum=0.9, nesterov=True) for own in tensors]
    slot = period // len(tensors)

    def after_step(taken, lr, models, optimizers):
        turn = (taken - 1) // slot % len(tensors)
        own = tensors[turn]
        if (taken + delay) % slot == 0:
            means = local.mean(models)
            for i in own:
                z[i].grad = z[i].detach() - means[i]
        if taken % slot == 0:
            outers[turn].step()
            with torch.no_grad():
                for model in models:
                    for i in own:
                        model[i].copy_((1 - mixing) * z[i] + mixing * model[i])

    return after_step, z


@pytest.mark.sample(5)
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("period, fragments, delay, mixing", [
    (6, 1, 0, 0.5), (6, 1, 5, 0.0), (6, 2, 0, 0.5), (6, 2, 2, 0.0), (6, 3, 1, 0.5), (8, 4, 1, 0.25), (4, 4, 0, 0.0),
])  # fmt: skip
def test_equals_explicit_lists(tmp_path, period, fragments, delay, mixing, workers):
    run = trainer_for(tmp_path, DEEP, *of(period, fragments, delay, mixing), workers=workers)
    after_step, z = reference(run, period, delay, mixing)
    models = local.twin(run, after_step)
    last: list = []
    local.fitted(run, lambda t: last.__setitem__(slice(None), [local.replicas(t), [x.clone() for x in t.axis.shared]]))
    assert max(deviation(ours, plain) for ours, plain in zip(last[0], models, strict=True)) < SAME
    assert deviation(last[1], z) < SAME
    assert deviation(run.axis.shared, local.mean(models)) < SAME and local.all_equal(local.replicas(run))


@pytest.mark.parametrize("fragments, delay", [(2, 2), (3, 0)])
def test_beside_sparse_averages_equals_explicit_lists(tmp_path, fragments, delay):
    """They come before what a slot does in that step."""
    run = trainer_for(tmp_path, DEEP, *of(6, fragments, delay, 0.5), "sync.sparta=0.2")
    fragment, z = reference(run, 6, delay, 0.5)

    def after_step(taken, lr, models, optimizers):
        local.average_drawn(run, models, 0.2, taken - 1)
        fragment(taken, lr, models, optimizers)

    models = local.twin(run, after_step)
    last: list = []
    local.fitted(run, lambda t: last.__setitem__(slice(None), [local.replicas(t), [x.clone() for x in t.axis.shared]]))
    assert max(deviation(ours, plain) for ours, plain in zip(last[0], models, strict=True)) < SAME
    assert deviation(last[1], z) < SAME


def test_mixing_0_is_a_restart_and_1_is_never_pulled(tmp_path):
    """With 1 every worker trains alone, whatever travels."""
    kept: dict[int, list] = {0: [], 1: []}
    for mixing, found in kept.items():
        scheme = of(6, 2, 2, mixing)
        trained(tmp_path, DEEP, *scheme, watch=lambda t, found=found: found.append((t, local.replicas(t))))
    alone: list = []
    trained(tmp_path, DEEP, "sync=local_sgd", "sync.period=99", watch=lambda t: alone.append(local.replicas(t)))
    assert all(
        torch.equal(x, y)
        for (_, ours), theirs in zip(kept[1], alone, strict=True)
        for own, other in zip(ours, theirs, strict=True)
        for x, y in zip(own, other, strict=True)
    )
    run, _ = kept[0][0]
    for step in (3, 6, 9):
        own = run.sync.tensors[(step // 3 - 1) % 2]
        replicas = kept[0][step - 1][1]
        assert local.all_equal([[model[i] for i in own] for model in replicas])
        assert not local.all_equal(replicas)


# ---- when, and how much


@pytest.mark.parametrize("switch", [0, 6])
def test_every_coordinate_is_averaged_once_in_a_period(tmp_path, switch):
    """And none before the switch."""
    run = trainer_for(tmp_path, DEEP, *of(6, 3, 1, 0.5), f"sync.switch_step={switch}")
    use, used = run.sync.use, []

    def spied():
        used.append((run.position.step + 1, tuple(run.sync.tensors[run.sync.turn])))
        use()

    run.sync.use = spied
    local.fitted(run)
    assert [step for step, _ in used] == list(range(switch + 2, 25, 2))
    for first in range(0, len(used), 3):
        counts = Counter(i for _, own in used[first : first + 3] for i in own)
        assert counts == dict.fromkeys(range(len(run.axis.specs)), 1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("compressor", ["none", "topk", "bf16"])
def test_a_slot_hands_over_its_fragment_and_a_period_the_model(tmp_path, compressor):
    """Step by step; the peak is the largest fragment."""
    typed = [f"{DEEP}Float", f"compressor={compressor}", "epochs=3"]
    sent: dict[str, list[int]] = {}
    runs = {}
    for name, scheme in {"diloco": ["sync=diloco", "sync.period=6"], "streaming": of(6, 3, 1, 0.5)}.items():
        sent[name] = [0]
        runs[name] = trained(
            tmp_path, *typed, *scheme, watch=lambda t, n=name: sent[n].append(t.comm.ledger.counts["payload"] // 4)
        )
    by_step = {name: [b - a for a, b in itertools.pairwise(counts)] for name, counts in sent.items()}
    sync, info = runs["streaming"].sync, runs["streaming"].position.info()
    own = [part.predicted_bytes(info) for part in sync.parts]
    assert by_step["streaming"] == [own[step // 2 % 3] if step % 2 == 0 else 0 for step in range(18)]
    assert sum(own) == sync.exchange.predicted_bytes(info)
    assert sum(by_step["streaming"][:6]) == sum(by_step["diloco"][:6]) == sum(own)
    assert max(by_step["streaming"]) == max(own) < max(by_step["diloco"])
    if compressor == "none":
        numel = [sum(runs["streaming"].axis.specs[i].numel for i in tensors) for tensors in sync.tensors]
        assert own == [4 * n for n in numel]
    assert sync.averagings(18) == [3, 3, 3] and sync.averagings(9) == [2, 2, 1]


def test_nobody_learns_of_the_others_before_the_arrival(tmp_path):
    """With one worker's gradients doubled, the others change with the arrival, and only in that fragment."""

    def seen(poisoned):
        run = trainer_for(tmp_path, DEEP, *of(8, 2, 2, 0.5), "epochs=2")
        backward = run.axis.backward

        def changed(row, *rest):
            loss = backward(row, *rest)
            if poisoned and row == 3:
                for g_W in run.axis.gradients_W:
                    g_W[3].mul_(2)
            return loss

        run.axis.backward = changed
        found: list = []
        local.fitted(run, lambda t: found.append(local.replicas(t)[0]))
        return found, run.sync.tensors

    (plain, (first, second)), (poisoned, _) = seen(False), seen(True)
    assert all(deviation(a, b) == 0 for a, b in zip(plain[:3], poisoned[:3], strict=True))
    assert deviation([plain[3][i] for i in first], [poisoned[3][i] for i in first]) > 1e-4
    assert deviation([plain[3][i] for i in second], [poisoned[3][i] for i in second]) == 0


def test_bytes_beside_sparse_averages(tmp_path):
    typed = [f"{DEEP}Float", *of(6, 2, 2, 0.5)]
    alone = trained(tmp_path / "alone", *typed).comm.ledger.counts["payload"]
    run = trained(tmp_path / "beside", *typed, "sync.sparta=0.1")
    assert run.comm.ledger.counts["payload"] == alone + 24 * 4 * 4 * run.sync.sparse.kept  # steps, workers, bytes


# ---- in between, and the end


def test_what_is_evaluated_is_the_mean_of_the_workers(tmp_path):
    apart = []

    def watch(trainer):
        apart.append(deviation(local.consensus(trainer), local.mean(local.replicas(trainer))))

    run = trained(tmp_path, DEEP, *of(6, 3, 1, 0.5), watch=watch)
    assert max(apart) < SAME
    assert local.all_equal([run.axis.shared, *local.replicas(run)])
    assert all(x is y for x, y in zip(run.sync.consensus(), run.axis.shared, strict=True))


def test_without_a_last_average(tmp_path):
    run = trained(tmp_path, DEEP, *of(6, 3, 1, 0.5), "sync.final=false")
    assert not local.all_equal(local.replicas(run)) and not run.sync.ends_apart(24, 6)
    assert deviation(local.consensus(run), local.mean(local.replicas(run))) < SAME


def test_an_average_at_the_end_is_told_where_there_is_one(tmp_path):
    assert trainer_for(tmp_path, DEEP, *of(6, 3, 1, 0.5)).sync.ends_apart(24, 6)
    assert trainer_for(tmp_path, DEEP, *of(6, 1, 0, 0)).sync.ends_apart(25, 6)
    assert not trainer_for(tmp_path, DEEP, *of(6, 1, 0, 0)).sync.ends_apart(24, 6)


# ---- stopped and resumed


ARMS = {  # the first one is in the default suite
    "residuals": ["compressor=topk"],
    "dense": [],
    "sparse averages, too": ["sync.sparta=0.2"],
    "adamw, whole": ["optimizer=adamw", "optimizer.lr=0.01", "sync.mixing=0"],
}
TWELVE = ["epochs=1", "dataset.train_size=192"]  # steps


@pytest.mark.sample(4)
@pytest.mark.parametrize("arm", ARMS)
def test_a_run_resumed_after_any_step_is_the_same(tmp_path, arm):
    """Before a launch, in flight, and after the arrival: parameters, momenta, residuals, bytes."""
    cfg = {**local.cfg_for(tmp_path, DEEP, *of(8, 2, 2, 0.5), *ARMS[arm], *TWELVE), "workers": 4}
    config = RunConfig.from_dict(cfg)
    straight = local.fitted(Trainer(config, Comm(4), RunFolder.create(str(tmp_path), "straight", cfg)))
    for step in range(1, 12):
        folder = RunFolder.create(str(tmp_path), f"stopped-{step}", cfg)
        stopped = Trainer(config, Comm(4), folder)
        stopped.begin_epoch()
        for _ in range(step):
            stopped.train_step()
        stopped.save()
        resumed = Trainer(config, Comm(4), folder)
        resumed.load(folder.path / "checkpoint" / f"step-{step:08d}")
        assert bool(resumed.sync.in_flight) == (step % 4 in (2, 3))
        local.fitted(resumed)
        assert all(map(torch.equal, resumed.axis.shared, straight.axis.shared)), step
        for key in ("payload", "wire", "rounds"):
            assert resumed.comm.ledger.counts[key] == straight.comm.ledger.counts[key], step
        ours, theirs = resumed.sync.outer_buffers, straight.sync.outer_buffers
        assert len(ours) == len(theirs) == len(resumed.axis.specs) and all(map(torch.equal, ours, theirs))
        for name, entries in straight.exchange.state.items():
            assert all(torch.equal(value, resumed.exchange.state[name][key]) for key, value in entries.items())
        shutil.rmtree(folder.path)


def test_the_inner_optimizers_buffers_stay(tmp_path):
    """As in DiLoCo."""
    run = trained(tmp_path, DEEP, *of(4, 2, 1, 0.0), "optimizer=adamw", "optimizer.lr=0.01")
    for inner, own in zip(run.inner.of_replicas, run.axis.replicas, strict=True):
        assert {float(inner.state[x]["step"]) for x in own} == {24.0}
    assert isinstance(run.axis.model, nn.Module)
