"""batch_size=[12,4,4,4]: equal to one worker with the whole batch, to a plain loop with weights, in every placement."""

import contextlib
import copy
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from accordion_bench.batches import unequal
from accordion_bench.comm.collectives import Comm
from accordion_bench.datasets.sampler import Sampler, Sharding
from accordion_bench.options.checks import ConfigError
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import checkpoint
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import by_hand, composed, local
from tests.kit.local import deviation, trained, trainer_for
from tests.kit.processes import together

LIST = "batch_size=[7,2,3,1]"  # 96 samples: 7 whole steps, and 5 samples for 4 workers
SIZES = [(7, 2, 3, 1)] * 7 + [(2, 1, 1, 1)]
SAME = 1e-12
FOUR = ["compressor=none", "compressor=powersgd", "compressor=topk", "compressor=qsgd", "compressor=distefblocksgd"]


def mean_of(models, sizes):
    """The mean of models, or gradients, weighted by samples."""
    return [sum(n * x for n, x in zip(sizes, xs, strict=True)) / sum(sizes) for xs in zip(*models, strict=True)]


def plain(trainer, one_batch: bool) -> list[torch.Tensor]:
    """A freshly built trainer's run in plain PyTorch, every mean written out.

    Args:
        trainer: has not trained yet.
        one_batch: one worker has the batches of all.
    """
    model = copy.deepcopy(trainer.axis.model)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.0, momentum=0.9, weight_decay=1e-4)
    for epoch in range(trainer.config.epochs):
        trainer.sampler.begin_epoch(epoch, 7)
        trainer.data.begin_epoch(epoch)
        for step, sizes in enumerate(SIZES):
            batches = [trainer.sampler.batch(worker, step) for worker in range(4)]
            assert tuple(map(len, batches)) == sizes
            batches = [torch.cat(batches)] if one_batch else batches
            gradients = []
            for batch in batches:
                x, y = trainer.data.train_batch(batch)
                gradients.append(torch.autograd.grad(F.cross_entropy(model(x), y), params))
            means = gradients[0] if one_batch else mean_of(gradients, sizes)
            for param, mean in zip(params, means, strict=True):
                param.grad = mean
            optimizer.param_groups[0]["lr"] = trainer.position.lr(step, epoch)
            optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("one_batch", [True, False])
def test_the_dense_mean_is_that_of_all_samples(tmp_path, one_batch):
    expected = plain(trainer_for(tmp_path / "plain", LIST), one_batch)
    run = trained(tmp_path / "run", LIST)
    assert run.position.step == 4 * len(SIZES)
    assert deviation(run.axis.shared, expected) < SAME


def test_one_worker_with_the_whole_batch_has_the_same_loss_and_model(tmp_path):
    unscaled = ["dataset.subset=91", "schedule.lr_scaling=none"]
    several = trained(tmp_path / "several", LIST, *unscaled)
    one = trained(tmp_path / "one", "batch_size=13", *unscaled, workers=1)
    assert deviation(several.axis.shared, one.axis.shared) < SAME
    for key in ("train_loss", "test_loss"):
        assert several.last_row[key] == pytest.approx(one.last_row[key], rel=1e-6)


def test_local_steps_are_averaged_by_samples(tmp_path):
    sizes = SIZES[0]

    def average(taken, lr, models, optimizers):
        if taken % 5 == 0 or taken == 4 * len(SIZES):
            with torch.no_grad():
                local.assign(models, [mean.clone() for mean in mean_of(models, sizes)])

    options = [LIST, "sync=local_sgd", "sync.period=5"]
    expected = local.twin(trainer_for(tmp_path / "twin", *options), average)
    run = trained(tmp_path / "run", *options)
    assert deviation(run.sync.consensus(), expected[0]) < SAME


def test_groups_are_averaged_by_samples(tmp_path):
    sizes = SIZES[0]

    def average(taken, lr, models, optimizers):
        with torch.no_grad():
            for first in (0, 2) if taken % 4 == 2 else ():
                local.assign(models[first : first + 2], mean_of(models[first : first + 2], sizes[first : first + 2]))
            if taken % 4 == 0:
                local.assign(models, mean_of(models, sizes))

    options = [LIST, "sync=hierarchical", "sync.groups=[[2,2],[4,4]]"]
    expected = local.twin(trainer_for(tmp_path / "twin", *options), average)
    assert deviation(trained(tmp_path / "run", *options).sync.consensus(), expected[0]) < SAME


# ---- placements and checkpoints


def train_in(rank: int, folder: str, workers_each: int, options: tuple[str, ...]) -> None:
    cfg = {**local.cfg_for(folder, *options), "workers": 4}
    comm = Comm(workers_each, 4 // workers_each, rank)
    run = RunFolder(Path(folder) / "run")
    run.path.mkdir(parents=True, exist_ok=True)
    alone = contextlib.nullcontext()
    with alone if comm.processes == 1 else by_hand.in_group(rank, f"{folder}/store", comm.processes):
        trainer = Trainer(RunConfig.from_dict(cfg), comm, run)
        trainer.fit()
    if comm.leader:
        torch.save([x.clone() for x in trainer.axis.shared], Path(folder) / "model.pt")


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", FOUR)
def test_placements(tmp_path, method):
    options = (LIST, "epochs=2", method)
    models, rows = {}, {}
    for each in (4, 2, 1):
        folder = tmp_path / str(each)
        together(4 // each, train_in, str(folder), each, options)
        models[each] = torch.load(folder / "model.pt")
        rows[each] = RunFolder(folder / "run").read_metrics()
    for each in (2, 1):
        assert deviation(models[each], models[4]) < 1e-12
        for ours, theirs in zip(rows[each], rows[4], strict=True):
            assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-9)
            assert [ours[key] for key in ("step", "payload_bytes", "wire_bytes", "rounds")] == [
                theirs[key] for key in ("step", "payload_bytes", "wire_bytes", "rounds")
            ]


@pytest.mark.parametrize("method", ["compressor=powersgd", "sync=local_sgd"])
@pytest.mark.parametrize("at", [11, 16])
def test_a_run_goes_on_bit_for_bit(tmp_path, method, at):
    options = [LIST, method]
    whole = trained(tmp_path / "whole", *options)
    stopped = trainer_for(tmp_path / "half", *options, f"checkpoint.every={at}")

    def keep(trainer):
        if trainer.position.step == at + 1:
            shutil.copytree(trainer.folder.path, tmp_path / "kept")

    local.fitted(stopped, keep)
    resumed = trainer_for(tmp_path / "again", *options)
    resumed.load(checkpoint.latest(tmp_path / "kept"))
    resumed.fit()
    assert all(map(torch.equal, resumed.sync.consensus(), whole.sync.consensus()))
    assert resumed.last_row["train_loss"] == whole.last_row["train_loss"]


# ---- the sampler


@pytest.mark.parametrize("how", ["reshuffled", "static"])
def test_each_worker_draws_its_share_and_no_sample_is_lost(how):
    sampler = Sampler(96, 4, 0, Sharding(how, (7, 2, 3, 1)))
    for epoch in range(2):
        sampler.begin_epoch(epoch, 7)
        batches = [sampler.batch(worker, step) for step in range(sampler.steps(7)) for worker in range(4)]
        assert sorted(torch.cat(batches).tolist()) == list(range(96))
        assert [len(batch) for batch in batches] == [n for sizes in SIZES for n in sizes]


def test_strands_of_text_are_the_same_whoever_reads_them():
    unequal_one, one = Sampler(45, 3, 0, Sharding("consecutive", (2, 1, 3))), Sampler(45, 1, 0, Sharding("consecutive"))
    unequal_one.begin_epoch(0, 3)
    one.begin_epoch(0, 6)
    assert unequal_one.steps(3) == one.steps(6)
    for step in range(one.steps(6)):
        parts = torch.cat([unequal_one.batch(worker, step) for worker in range(3)])
        assert torch.equal(parts, one.batch(0, step))


# ---- refused


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        composed.validated({**composed.cfg(*overrides), "workers": 4})
    return str(refused.value)


@pytest.mark.parametrize(
    "given, rule, instead",
    [
        ("[64,32]", "a number, or a list of one for each of 4 workers, got [64,32]", "[64,32,64,32]"),
        ("[64,32,32,0]", "a list of numbers of samples, at least 1, got [64,32,32,0]", "[64,32,32,32]"),
        ("[64,32,-2,32]", "a list of numbers of samples, at least 1, got [64,32,-2,32]", "[64,32,32,32]"),
        ("[64,32,0.5,32]", "a list of numbers of samples, at least 1, got [64,32,0.5,32]", "[64,32,32,32]"),
        ("[]", "a number, or a list of one for each worker, got []", "32"),
        ("[640,320,320,320]", "a list whose sum is at most 1437, the training samples, got [640,320,320,320]", ""),
    ],
)
def test_bad_lists_are_one_sentence(given, rule, instead):
    said = refusal(f"batch_size={given}")
    assert said.startswith(f"batch_size must be {rule}") and "; type batch_size=" in said and instead in said


@pytest.mark.parametrize(
    "method, why",
    [
        ("compressor=signsgd", "compressor=signsgd, whose signs have no magnitude that could be weighted"),
        ("sync=gossip", "sync=gossip, whose means weight all workers equally"),
        ("sync=noloco", "sync=noloco, whose means weight all workers equally"),
        ("adaptive=adabatch", "adaptive=adabatch, which changes it for all workers"),
        ("comm.engine=ddp", "comm.engine=ddp, which weights all workers alike"),
    ],
)
def test_means_that_cannot_be_weighted_are_one_sentence(method, why):
    said = refusal("batch_size=[64,32,32,32]", method)
    assert why in said and said.endswith("; type batch_size=64") and "got [64,32,32,32]" in said


def test_equal_numbers_in_a_list_are_that_number(tmp_path):
    assert unequal([4, 4, 4, 4]) == ()
    assert (
        deviation(
            trained(tmp_path / "list", "batch_size=[4,4,4,4]", "epochs=1").axis.shared,
            trained(tmp_path / "number", "batch_size=4", "epochs=1").axis.shared,
        )
        == 0
    )
