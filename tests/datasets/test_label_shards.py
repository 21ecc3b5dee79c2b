"""dataset.sharding=dirichlet: every sample once, proportions by alpha, the same in every placement, refusals."""

import json

import pytest
import torch
import torch.nn.functional as F

from accordion_bench.comm.collectives import Comm
from accordion_bench.datasets.sampler import Sampler, Sharding, label_counts, log_proportions, shards_by_label
from accordion_bench.options.checks import ConfigError
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import composed, local
from tests.kit.local import resumed, trained, trainer_for

LABELS = torch.arange(1000) % 10
SIZES = [250, 250, 250, 250]
DRAWN = ["dataset.sharding=dirichlet", "dataset.alpha=0.3"]


def counts_of(alpha: float, seed: int = 0, sizes=SIZES, labels=LABELS) -> torch.Tensor:
    shards = shards_by_label(labels, sizes, alpha, seed)
    assert sorted(torch.cat(shards).tolist()) == list(range(len(labels))) and [len(own) for own in shards] == sizes
    counts = torch.tensor(label_counts(labels, shards))
    assert torch.equal(counts.sum(0), labels.bincount()) and counts.sum(1).tolist() == sizes
    return counts


def proportions(share: float, alpha: float, workers: int) -> torch.Tensor:
    return log_proportions(torch.full((round(1 / share),), share), alpha, workers, 0).softmax(1)


# ---- what is drawn


def test_a_large_alpha_is_near_uniform():
    assert (proportions(0.1, 1e6, 4) - 0.1).abs().max() < 0.005
    counts = counts_of(1e6)
    assert (counts - 25).abs().max() < 25 * 0.9 and counts.min() > 8  # multinomial: 25, deviation 4.7


def test_a_small_alpha_concentrates():
    """Alone a worker would have one label; each has as many samples as the others, so that labels run out."""
    assert proportions(0.1, 1e-3, 50).max(1).values.min() > 0.99
    counts = torch.cat([counts_of(1e-3, seed) for seed in range(5)])
    most = counts.sort(1, descending=True).values[:, :4].sum(1).double()
    assert most.min() > 150 and most.mean() > 220  # of 250; uniform shards have about 110


def test_smaller_is_further_from_uniform():
    far = [sum(float((counts_of(a, seed) - 25).abs().sum()) for seed in range(5)) for a in (0.01, 1.0, 100.0, 1e4)]
    assert far == sorted(far, reverse=True)


def test_proportions_have_the_moments_of_a_dirichlet_distribution():
    """Mean p, variance p (1 - p) / (alpha + 1): 20,000 draws."""
    prior, alpha, draws = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64), 2.0, 20_000
    q = log_proportions(prior, alpha, draws, 0).softmax(1)
    assert torch.allclose(q.sum(1), torch.ones(draws, dtype=torch.float64)) and not q[:, 3].any()
    variance = prior * (1 - prior) / (alpha + 1)
    assert ((q.mean(0) - prior).abs() <= 5 * (variance / draws).sqrt()).all()
    assert torch.allclose(q.var(0), variance, rtol=0.05)


def test_an_alpha_that_underflows_has_no_nan():
    assert proportions(0.1, 1e-12, 4).isfinite().all()
    counts_of(1e-12)


def test_draws_are_keyed():
    assert torch.equal(counts_of(0.5), counts_of(0.5)) and not torch.equal(counts_of(0.5), counts_of(0.5, seed=1))


def test_unequal_shards_and_labels_of_unequal_numbers():
    labels = torch.tensor([0] * 700 + [2] * 250 + [3] * 50)
    counts_of(0.5, sizes=[500, 300, 150, 50], labels=labels)


# ---- in the sampler


@pytest.mark.parametrize("batches, sizes", [((), [24] * 4), ((7, 2, 3, 1), [51, 15, 22, 8])])
def test_each_worker_sees_its_own_samples_in_every_epoch(batches, sizes):
    sampler = Sampler(96, 4, 0, Sharding("dirichlet", batches, 0.5, torch.arange(120) % 7), torch.arange(96) + 12)
    seen = []
    for epoch in range(2):
        sampler.begin_epoch(epoch, 7 if batches else 5)
        steps = range(sampler.steps(7 if batches else 5))
        seen.append([torch.cat([sampler.batch(worker, step) for step in steps]) for worker in range(4)])
    assert [len(own) for own in seen[0]] == sizes
    assert sorted(torch.cat(seen[0]).tolist()) == list(range(12, 108))
    for first, second in zip(*seen, strict=True):
        assert sorted(first.tolist()) == sorted(second.tolist()) and first.tolist() != second.tolist()


def test_a_worker_with_a_sample_less_sees_one_twice():
    sampler = Sampler(10, 4, 0, Sharding("dirichlet", (), 0.5, torch.arange(10) % 3))
    sampler.begin_epoch(0, 3)
    own = [sampler.batch(worker, 0).tolist() for worker in range(4)]
    assert [len(set(batch)) for batch in own] == [3, 3, 2, 2] and all(len(batch) == 3 for batch in own)


# ---- in a run


@pytest.mark.parametrize("batches", ["batch_size=4", "batch_size=[7,2,3,1]"])
def test_counts_are_in_the_run_folder_and_a_run_goes_on_bit_for_bit(tmp_path, batches):
    whole = trained(tmp_path / "whole", *DRAWN, batches)
    written = json.loads((whole.folder.path / "labels.json").read_text())
    labels = whole.data.train_labels
    for worker, own in enumerate(written["samples"]):
        whole.sampler.begin_epoch(0, whole.position.plan.batch_size)
        batches_of = [whole.sampler.batch(worker, step) for step in range(whole.position.steps_per_epoch)]
        assert labels[torch.cat(batches_of)].bincount(minlength=len(own)).tolist() == own
    assert written["alpha"] == 0.3

    again = resumed(tmp_path, *DRAWN, batches, steps=3)
    assert all(map(torch.equal, again.axis.shared, whole.axis.shared))


def test_gradients_are_those_of_the_shards(tmp_path):
    run = trainer_for(tmp_path, *DRAWN)
    run.begin_epoch()
    params = list(run.axis.model.parameters())
    expected = []
    for worker in range(4):
        x, y = run.data.train_batch(run.sampler.batch(worker, 0))
        expected.append(torch.autograd.grad(F.cross_entropy(run.axis.model(x), y), params))
    taken = []
    run.step.communicating.before_update = lambda lr: taken.extend(g.clone() for g in run.axis.gradients_W)
    run.step.inner.step = lambda *_: None
    run.step.communicating.after_update = lambda lr: None
    run.train_step()
    for i, g_W in enumerate(taken):
        assert torch.equal(g_W, torch.stack([own[i] for own in expected]))


def test_placements_have_the_same_shards(tmp_path):
    cfg = {**local.cfg_for(tmp_path, *DRAWN), "workers": 4}
    shards = []
    for processes in (1, 2, 4):
        for rank in range(processes):
            comm = Comm(4 // processes, processes, rank)
            comm._run = lambda run: None  # type: ignore[method-assign]  # there are no others
            folder = RunFolder(tmp_path / f"{processes}-{rank}")
            shards.append(Trainer(RunConfig.from_dict(cfg), comm, folder).sampler.shards)
    assert all(torch.equal(a, b) for other in shards for a, b in zip(other, shards[0], strict=True))


# ---- refused


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["dataset.sharding=dirichlet"], "dataset.alpha must be a number above 0 with dataset.sharding=dirichlet"),
        (["dataset.sharding=dirichlet", "dataset.alpha=0"], "dataset.alpha must be a number above 0, got 0"),
        (["dataset.sharding=dirichlet", "dataset.alpha=-1"], "dataset.alpha must be a number above 0, got -1"),
        (
            ["dataset=pydocs_bytes", "model=gpt_nano", "dataset.sharding=dirichlet"],
            "dataset.sharding must be one of reshuffled, static, got dirichlet",
        ),
    ],
)
def test_refusals(overrides, said):
    with pytest.raises(ConfigError) as refused:
        composed.validated(composed.cfg(*overrides))
    assert str(refused.value).startswith(said), str(refused.value)
    assert "; type dataset." in str(refused.value)
