"""The loop against plain PyTorch, sharding, evaluation, BatchNorm policies, memory."""

import copy
import json
import time

import pytest
import torch
import torch.nn.functional as F

from accordion_bench.comm.collectives import Comm
from accordion_bench.datasets.sampler import Sampler, Sharding
from accordion_bench.models.resnet import CifarResNet, ResNet18
from accordion_bench.options.option import options_of
from accordion_bench.position import StepInfo
from accordion_bench.processes import placement
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training import launch
from accordion_bench.training.trainer import Trainer
from tests.kit import composed

SMALL = ["dataset=synthetic", "dataset.size=8", "dataset.train_size=200", "dataset.test_size=50", "epochs=2"]


def trainer_for(tmp_path, overrides, workers=4):
    cfg = composed.cfg(*SMALL, f"paths.runs={tmp_path}", *overrides)
    composed.validated(cfg)
    return Trainer(RunConfig.from_dict(cfg), Comm(workers), RunFolder.create(str(tmp_path), "test", cfg))


@pytest.mark.parametrize("nesterov", ["false", "true"])
def test_single_worker_without_compression_is_plain_sgd_bit_for_bit(tmp_path, nesterov):
    trainer = trainer_for(
        tmp_path, ["batch_size=32", f"optimizer.nesterov={nesterov}", "schedule.milestones=[1]"], workers=1
    )
    model = copy.deepcopy(trainer.axis.model)
    options = {"momentum": 0.9, "nesterov": nesterov == "true", "weight_decay": 1e-4}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    for epoch in range(2):
        optimizer.param_groups[0]["lr"] = (0.1, 0.1 * 0.1)[epoch]
        trainer.sampler.begin_epoch(epoch, 32)
        trainer.data.begin_epoch(epoch)
        for step in range(trainer.position.steps_per_epoch):
            x, y = trainer.data.train_batch(trainer.sampler.batch(0, step))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    trainer.fit()
    for ours, plain in zip(trainer.axis.params, model.parameters(), strict=True):
        assert torch.equal(ours, plain)
    buffers = dict(model.named_buffers())
    for name, buffer_W in trainer.axis.buffers_W.items():
        assert torch.equal(buffer_W[0], buffers[name])


@pytest.mark.parametrize("micro", [8, 5, 32])
def test_micro_batches_add_up_to_the_batch(tmp_path, micro):
    """Without BatchNorm, whose statistics are those of each micro-batch."""

    def gradients(overrides):
        trainer = trainer_for(tmp_path, ["model._target_=tests.kit.models.Plain", "~model.depth", *overrides])
        trainer.begin_epoch()
        loss = trainer.step.backward(0, next(trainer.step.feed.step()))
        return loss, [g[0].clone() for g in trainer.axis.gradients_W]

    (loss, whole), (loss_too, parts) = gradients([]), gradients([f"micro_batch_size={micro}"])
    torch.testing.assert_close(loss, loss_too)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_four_workers_are_one_with_four_times_the_batch(tmp_path):
    """Mean of the workers' gradients = gradient of the joint batch (no BatchNorm)."""
    overrides = ["model._target_=tests.kit.models.Plain", "~model.depth", "schedule.lr_scaling=none"]
    overrides += ["dataset.train_size=256"]
    four = trainer_for(tmp_path, [*overrides, "batch_size=16"], workers=4)
    one = trainer_for(tmp_path, [*overrides, "batch_size=64"], workers=1)
    assert four.position.steps_per_epoch == one.position.steps_per_epoch
    four.fit()
    one.fit()
    for a, b in zip(four.axis.params, one.axis.params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class TestSampler:
    @pytest.mark.parametrize(("size", "workers", "batch"), [(10, 4, 2), (7, 4, 32), (50_000, 4, 128), (3, 8, 1)])
    def test_every_sample_once_and_equal_shares(self, size, workers, batch):
        sampler = Sampler(size, workers, seed=0)
        sampler.begin_epoch(0, batch)
        seen = [torch.cat([sampler.batch(w, s) for s in range(sampler.steps(batch))]).tolist() for w in range(workers)]
        assert {len(part) for part in seen} == {-(-size // workers)}
        assert {i for part in seen for i in part} == set(range(size))

    def test_paper_has_98_steps(self):
        assert Sampler(50_000, 4, seed=0).steps(128) == 98

    def test_reshuffled_or_static(self):
        for sharding, same in (("reshuffled", False), ("static", True)):
            sampler = Sampler(100, 4, 0, Sharding(sharding))
            sampler.begin_epoch(0, 8)
            first = sampler.batch(2, 1)
            sampler.begin_epoch(1, 8)
            assert torch.equal(first, sampler.batch(2, 1)) == same


class TestBatchNorm:
    @pytest.mark.parametrize("bn", options_of(RunConfig)["bn"].choices)
    def test_evaluation_leaves_training_as_it_was(self, tmp_path, bn):
        trainer = trainer_for(tmp_path, [f"bn={bn}"])
        trainer.begin_epoch()
        trainer.train_step()
        before = {name: b.clone() for name, b in trainer.axis.buffers_W.items()}
        rng = torch.get_rng_state()
        assert trainer.evaluate() == trainer.evaluate()
        assert torch.equal(rng, torch.get_rng_state())
        for name, buffer in trainer.axis.buffers_W.items():
            assert torch.equal(buffer, before[name])

    def test_pooled_variance_is_that_of_the_joined_data(self, tmp_path):
        trainer = trainer_for(tmp_path, [])
        axis = trainer.axis
        data = torch.randn(4, 1000, 16, dtype=torch.float64) * 3 + torch.arange(4).view(4, 1, 1)
        axis.buffers_W["bn.running_mean"].copy_(data.mean(1))
        axis.buffers_W["bn.running_var"].copy_(data.var(1, correction=0))
        pooled = axis.consensus_buffers()[0]
        joined = data.reshape(-1, 16)
        torch.testing.assert_close(pooled["bn.running_mean"], joined.mean(0).float())
        torch.testing.assert_close(pooled["bn.running_var"], joined.var(0, correction=0).float(), rtol=1e-5, atol=1e-5)
        axis.bn = "average"
        average = axis.consensus_buffers()[0]["bn.running_var"]
        torch.testing.assert_close(average, data.var(1, correction=0).mean(0).float())
        assert pooled["bn.num_batches_tracked"].dtype == torch.int64

    def test_recomputed_statistics_depend_on_no_placement(self, tmp_path):
        """Dropout included: worker 2 draws the same units alone as beside the others."""
        overrides = ["bn=recompute", "model._target_=tests.kit.models.DropoutNet", "~model.depth"]

        def recomputed(comm):
            cfg = composed.cfg(*SMALL, f"paths.runs={tmp_path}", *overrides)
            trainer = Trainer(RunConfig.from_dict(cfg), comm, RunFolder.create(str(tmp_path), "test", cfg))
            trainer.begin_epoch()
            seen = []
            trainer.axis.consensus_buffers = lambda: (
                seen.append({n: b.clone() for n, b in trainer.axis.buffers_W.items()})
                or [{n: b[0] for n, b in trainer.axis.buffers_W.items()}] * comm.local_workers
            )
            trainer.evaluate()
            return seen[0]["net.1.running_mean"]

        together = recomputed(Comm(4))
        alone = Comm(1)
        alone.workers, alone.first_worker = 4, 2
        torch.testing.assert_close(recomputed(alone)[0], together[2])

    def test_rank0_and_local(self, tmp_path):
        trainer = trainer_for(tmp_path, ["bn=rank0"])
        trainer.begin_epoch()
        trainer.train_step()
        rows = trainer.axis.consensus_buffers()
        assert all(torch.equal(r["bn.running_mean"], trainer.axis.buffers_W["bn.running_mean"][0]) for r in rows)
        trainer.axis.bn = "local"
        for w, row in enumerate(trainer.axis.consensus_buffers()):
            assert torch.equal(row["bn.running_mean"], trainer.axis.buffers_W["bn.running_mean"][w])


def test_metrics_and_summary_have_every_column(tmp_path):
    trainer = trainer_for(tmp_path, ["compressor=powersgd", "adaptive=accordion", "target=0.01"])
    launch.train(trainer.config, placement.place(trainer.config, {}, 0), trainer.folder)
    rows = trainer.folder.read_metrics()
    assert [row["epoch"] for row in rows] == [0, 1]
    bytes_columns = ["payload", "wire", "inner_wire", "control", "control_wire", "eval", "setup", "dense", "dense_wire"]
    parts = ["data", "compute", "exposed", "update", "policy", "encode", "comm", "decode", "warmup"]
    expected = [f"{c}_bytes" for c in bytes_columns] + ["rounds", "seconds", *(f"{part}_seconds" for part in parts)]
    expected += ["dense_rounds", "control_rounds", "link_sent_bytes", "link_received_bytes"]
    expected += [*(f"modelled_{part}seconds" for part in ("", "exposed_", "comm_", "dense_comm_")), "seconds_by_bucket"]
    expected += ["seconds_by_phase", "outlier_seconds", "outlier_seconds_count"]
    expected += ["epoch", "step", "lr", "train_loss", "test_loss", "accuracy", "plan", "decisions"]
    assert sorted(rows[1]) == sorted([*expected, "entropy_bytes", "paper_floats"]) and rows[1]["entropy_bytes"] is None
    assert all(isinstance(rows[1][f"{c}_bytes"], int) for c in bytes_columns)
    exclusive = sum(rows[1][f"{c}_seconds"] for c in ("data", "compute", "exposed", "update", "policy"))
    assert exclusive == pytest.approx(rows[1]["seconds"], rel=0.02)
    assert rows[1]["comm_seconds"] is None  # four workers in one process measure no communication
    summary = trainer.folder.read_json("summary.json")
    assert (trainer.folder.path / "done").exists()
    assert summary["metric"] == rows[-1]["accuracy"] and summary["steps"] == rows[-1]["step"]
    assert summary["seconds_to_target"] == rows[0]["seconds"]
    assert summary["payload_bytes_to_target"] == rows[0]["payload_bytes"]
    assert set(rows[0]["plan"]["levels"].values()) == {2}
    json.dumps(rows)


@pytest.mark.parametrize("overlap", [[], ["comm.overlap=true", "comm.bucket_cap_mb=0.05"]], ids=["after", "overlapped"])
def test_clock_agrees_with_the_wall_and_leaves_checkpoints_out(tmp_path, monkeypatch, overlap):
    """Exclusive parts sum to the measured steps within 2 %; saving is on no clock.

    A process that is set aside between two marks adds to one of them alone, so one of a few attempts must agree.
    """
    told = []
    for attempt in range(5):
        steps, policy, wall = steps_and_wall(tmp_path / str(attempt), monkeypatch, overlap)
        told.append((steps, policy, wall))
        if steps <= wall + 0.002 and wall - steps - policy <= 0.02 * wall + 0.002:
            return
    raise AssertionError(told)


def steps_and_wall(path, monkeypatch, overlap):
    """Seconds of the steps by the clock, of policies at the ends of epochs, and of the steps by the wall."""
    trainer = trainer_for(path, ["compressor=topk", "adaptive=accordion", "checkpoint.every=1", *overlap])
    wall = 0.0
    train_step = trainer.train_step

    def timed():
        nonlocal wall
        start = time.perf_counter()
        train_step()
        wall += (time.perf_counter() - start) * trainer.measured
        trainer.measured = True

    trainer.measured = False  # the first step is warm-up
    monkeypatch.setattr(trainer, "train_step", timed)
    monkeypatch.setattr(trainer, "save", lambda: time.sleep(0.05))
    trainer.fit()
    columns = trainer.clock.columns(True)
    policy = trainer.clock.totals["policy"]
    return columns["seconds"] - policy, policy, wall  # deciding at the end of an epoch is no step


def test_payload_is_the_prediction_over_a_whole_run(tmp_path):
    overrides = ["compressor=topk", "adaptive=accordion", "adaptive.accordion.interval=1", "epochs=4"]
    trainer = trainer_for(tmp_path, overrides)
    predicted = 0
    train_step = trainer.train_step

    def counted():
        nonlocal predicted
        predicted += trainer.exchange.predicted_bytes(StepInfo(trainer.position.plan, trainer.position.step))
        train_step()

    trainer.train_step = counted
    trainer.fit()
    assert trainer.comm.ledger.columns()["payload_bytes"] == predicted


def test_memory_is_one_model_and_w_gradients_and_residuals(tmp_path):
    """What a process with W workers holds: model, momentum, W x (gradient + residual), Q; not W models."""
    trainer = trainer_for(tmp_path, ["compressor=powersgd", "compressor.min_compression_rate=0"], workers=8)
    trainer.begin_epoch()
    trainer.train_step()
    numel = sum(spec.numel for spec in trainer.axis.specs)
    gradients = sum(g.numel() for g in trainer.axis.gradients_W)
    residuals = sum(e["residual_W"].numel() for e in trainer.exchange.state.values())
    matrices = sum(spec.numel for spec in trainer.axis.specs if spec.ndim > 1)
    assert gradients == 8 * numel and residuals == 8 * matrices
    assert sum(p.numel() for p in trainer.axis.model.parameters()) == numel
    queries = sum(e["q"].numel() for e in trainer.exchange.state.values())
    assert queries < numel / 8


@pytest.mark.parametrize(
    ("model", "count", "matrices"),
    [
        (lambda: CifarResNet(3, 10, 8), 75_290, 8),
        (lambda: CifarResNet(3, 10, 20), 269_722, 20),
        (lambda: ResNet18(3, 10), 11_173_962, 21),
        (lambda: ResNet18(3, 100), 11_220_132, 21),
    ],
)
def test_parameter_counts(model, count, matrices):
    with torch.device("meta"):
        built = model()
        parameters = list(built.parameters())
    assert sum(p.numel() for p in parameters) == count
    assert sum(p.ndim > 1 for p in parameters) == matrices


def test_a_quorum_counts_the_processes_that_are_spawned(tmp_path, monkeypatch):
    """Nobody has typed how many; each of them builds what was validated."""
    config = RunConfig.from_dict(composed.run(tmp_path, "comm=gloo", "sync=local_sgd", "sync.quorum=3"))

    def built(*_: object) -> None:
        raise KeyError("built")

    monkeypatch.setattr("accordion_bench.training.trainer.Trainer", built)
    with pytest.raises(KeyError, match="built"):
        launch.train(config, placement.place(config), RunFolder(tmp_path))
