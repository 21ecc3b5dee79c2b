"""Mixed precision: what autocast computes, and steps that all workers skip together."""

import copy
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.forward.execution import LossScale
from accordion_bench.options.checks import ConfigError
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import composed, tiny
from tests.kit.processes import in_two

HALF = "precision=float16"
ARMS = {
    "momentum": [],
    "topk": ["compressor=topk"],
    "powersgd": ["compressor=powersgd", "compressor.min_compression_rate=0"],
    "dist-EF": ["compressor=distefblocksgd"],
    "qsgd with accordion": ["compressor=qsgd", "adaptive=accordion", "adaptive.accordion.interval=1"],
}


def begun(tmp_path, *overrides: str, comm: Comm | None = None) -> Trainer:
    """A trainer at the start of its first epoch; without comm, of two workers in this process."""
    cfg = composed.run(tmp_path, "workers=2", *overrides)
    trainer = Trainer(RunConfig.from_dict(cfg), comm or Comm(2), RunFolder.create(str(tmp_path), "run", cfg))
    trainer.begin_epoch()
    return trainer


def steps(trainer: Trainer, count: int) -> Trainer:
    for _ in range(count):
        trainer.train_step()
    return trainer


def overflow_at(trainer: Trainer, step: int, worker: int) -> None:
    """An infinite gradient of one worker in one step."""
    axis = trainer.axis

    def hook(gradient):
        here = trainer.position.step == step and axis._current == worker - trainer.comm.first_worker
        return gradient * float("inf") if here else gradient

    axis.params[2].register_hook(hook)


def state(trainer: Trainer) -> dict:
    """Everything that a skipped step must leave as it is."""
    exchange, optimizer = trainer.exchange.state, trainer.inner.common.state
    return copy.deepcopy(
        {
            "parameters": [p.detach() for p in trainer.axis.params],
            "compressor": [value for name in sorted(exchange) for _, value in sorted(exchange[name].items())],
            "optimizer": [value for p in trainer.axis.params for _, value in sorted(optimizer[p].items())],
            "sums": [x for x in trainer.policy_runner.epoch_sums.state_dict().values() if isinstance(x, torch.Tensor)],
            "exchanges": [torch.tensor(trainer.policy_runner.exchanges)],
            "payload": [torch.tensor([trainer.comm.ledger.counts[key] for key in ("payload", "wire", "dense")])],
        }
    )


def same(a: dict, b: dict) -> bool:
    return all(len(a[k]) == len(b[k]) and all(map(torch.equal, a[k], b[k])) for k in a) and a.keys() == b.keys()


def plain(trainer: Trainer, epochs: int, interval: int = 2000) -> tuple[torch.nn.Module, list[float]]:
    """The run of one worker in plain PyTorch: autocast, GradScaler, SGD; and the scale after every step."""
    model = copy.deepcopy(trainer.axis.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=trainer.loss_scale.value, growth_interval=interval)
    scales = []
    for epoch in range(epochs):
        trainer.sampler.begin_epoch(epoch, trainer.position.plan.batch_size)
        trainer.data.begin_epoch(epoch)
        for step in range(trainer.position.steps_per_epoch):
            x, y = trainer.data.train_batch(trainer.sampler.batch(0, step))
            optimizer.param_groups[0]["lr"] = trainer.position.lr(step, epoch)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
    return model, scales


SMOOTH = ["model._target_=tests.kit.models.Plain", "workers=1", "epochs=2"]


def test_one_worker_is_gradscaler_and_sgd_bit_for_bit(tmp_path, monkeypatch):
    """From a scale that overflows, through steps that are skipped, to one that has grown again."""
    monkeypatch.setattr("accordion_bench.forward.execution.INTERVAL", 4)
    trainer = begun(tmp_path, *SMOOTH, HALF, comm=Comm(1))
    trainer.loss_scale.value = 2.0**26
    model, expected = plain(trainer, 2, interval=4)
    scales, train_step = [], trainer.train_step

    def noted():
        train_step()
        scales.append(trainer.loss_scale.value)

    trainer.train_step = noted  # type: ignore[method-assign]
    trainer.fit()
    assert scales == expected
    assert any(b < a for a, b in itertools.pairwise(scales)) or scales[0] < 2.0**26
    assert any(b > a for a, b in itertools.pairwise(scales))
    assert all(torch.equal(x, y) for x, y in zip(trainer.axis.params, model.parameters(), strict=True))
    (*_, row) = trainer.folder.read_metrics()
    assert row["loss_scale"] == expected[-1] and 0 < row["skipped_steps"] < len(scales)


@pytest.mark.parametrize("arm", ARMS)
def test_a_skipped_step_changes_nothing(tmp_path, arm):
    trainer = begun(tmp_path, HALF, *ARMS[arm])
    overflow_at(trainer, step=3, worker=1)
    before = state(steps(trainer, 3))
    scale = trainer.loss_scale.value
    after = state(steps(trainer, 1))
    assert same(before, after)
    assert trainer.position.step == trainer.position.step_in_epoch == 4
    assert trainer.loss_scale.value == scale / 2 and trainer.loss_scale.skipped == 1
    assert not same(after, state(steps(trainer, 1)))
    assert trainer.loss_scale.value == scale / 2 and trainer.loss_scale.skipped == 1


def _in_two(rank: int, cfg: dict, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    trainer = Trainer(RunConfig.from_dict(cfg), Comm(1, 2, rank), RunFolder(Path(folder)))
    trainer.begin_epoch()
    overflow_at(trainer, step=2, worker=1)
    steps(trainer, 5)
    kept = {"parameters": [p.detach() for p in trainer.axis.params], "ledger": trainer.comm.ledger.counts}
    torch.save({**kept, "scale": trainer.loss_scale.state_dict()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("engine", ["exchange", "ddp"])
def test_processes_skip_together(tmp_path, engine):
    """As workers of one process do; DistributedDataParallel has sent the overflow, and is charged for it."""
    cfg = composed.run(tmp_path, "comm=gloo", "comm.processes=2", "workers=2", HALF, f"comm.engine={engine}")
    in_two(_in_two, cfg, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["scale"] == second["scale"] == {"loss_scale": {"value": 2.0**15, "good_steps": 2, "skipped": 1}}
    assert all(map(torch.equal, first["parameters"], second["parameters"]))
    together = begun(tmp_path, HALF)
    overflow_at(together, step=2, worker=1)
    steps(together, 5)
    for x, y in zip(together.axis.params, first["parameters"], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    ours, theirs = together.comm.ledger.counts, first["ledger"]
    assert theirs["control"] == ours["control"] == 5 * 4
    assert theirs["payload"] == ours["payload"] * (5 if engine == "ddp" else 4) // 4


def test_a_resumed_run_goes_on_with_the_scale(tmp_path):
    """The state in a checkpoint is that of the run that was not stopped."""
    straight = begun(tmp_path, HALF, "compressor=topk")
    overflow_at(straight, step=1, worker=0)
    saved = steps(straight, 3).save()
    again = begun(tmp_path, HALF, "compressor=topk")
    again.load(saved)
    kept = {"value": 2.0**15, "good_steps": 1, "skipped": 1}
    assert again.loss_scale.state_dict() == straight.loss_scale.state_dict() == {"loss_scale": kept}
    again.begin_epoch()
    assert same(state(steps(again, 2)), state(steps(straight, 2)))


def test_what_stays_infinite_stops_the_run(tmp_path):
    trainer = begun(tmp_path, HALF)
    trainer.loss_scale.value = 2.0
    for step in range(2):
        overflow_at(trainer, step=step, worker=1)
    steps(trainer, 1)
    with pytest.raises(NonFinite, match=r"step 1 .*gradient of \S+ on worker 1 is not finite, at a loss scale of 1;"):
        trainer.train_step()


def test_an_infinite_loss_stops_the_run(tmp_path):
    """A smaller scale would not change it."""
    trainer = begun(tmp_path, HALF)
    trainer.axis.model.head.register_forward_hook(lambda module, args, out: out * float("inf"))
    with pytest.raises(NonFinite, match="the loss of worker 0 is nan"):
        trainer.train_step()


def test_the_scales_rule():
    """Halved by an overflow, doubled after 2,000 good steps; the count starts anew with either."""
    scale = LossScale()
    for _ in range(1999):
        scale.update(False)
    assert (scale.value, scale.good_steps) == (2.0**16, 1999)
    scale.update(True)
    assert (scale.value, scale.good_steps) == (2.0**15, 0)
    for _ in range(2000):
        scale.update(False)
    assert (scale.value, scale.good_steps, scale.skipped) == (2.0**16, 0, 1)


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan"), -float("inf")])
def test_an_overflow_is_found_wherever_it_is(bad):
    """Large sums of finite gradients are none."""
    gradients_W = [torch.full((2, 5), 1e38), torch.full((2, 3, 2), -3e38)]
    if bad is not None:
        gradients_W[1][1, 2, 0] = bad
    expected = [g_W / 2**16 for g_W in gradients_W]
    assert float(LossScale().undo_(gradients_W)) == (bad is not None)
    assert all(torch.equal(x, y) for x, y in zip(gradients_W, expected, strict=True) if bad is None)


class Watched(tiny.Net):
    """Notes in which type its layers compute."""

    seen: list[torch.dtype] = []

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            self.seen.append(y.dtype)
        return y


@pytest.mark.parametrize("precision", [None, "float32", "bfloat16", "float16"])
def test_forward_is_in_the_precision_and_parameters_are_in_float32(tmp_path, precision):
    Watched.seen = []
    overrides = [] if precision is None else [f"precision={precision}"]
    trainer = steps(begun(tmp_path, "model._target_=tests.forward.test_precision.Watched", *overrides), 2)
    assert set(Watched.seen) == {getattr(torch, precision or "float32")}
    everything = [*trainer.axis.params, *trainer.axis.gradients_W, *trainer.axis.model.buffers()]
    assert {x.dtype for x in everything if x.is_floating_point()} == {torch.float32}


def test_float32_is_null(tmp_path):
    assert same(state(steps(begun(tmp_path), 3)), state(steps(begun(tmp_path, "precision=float32"), 3)))


def test_bfloat16_overlaps_and_equals_the_reference_path(tmp_path):
    options = ["precision=bfloat16", "compressor=topk", "comm.bucket_cap_mb=0.001"]
    overlapped, reference = (steps(begun(tmp_path, *options, f"comm.overlap={on}"), 3) for on in ("true", "false"))
    assert overlapped.runner.overlap.allowed and not reference.runner.overlap.allowed
    assert same(state(overlapped), state(reference))
    assert not begun(tmp_path, HALF, "comm.overlap=true").runner.overlap.allowed


def test_a_language_model_in_bfloat16(tmp_path):
    """It trains, or is refused before anything starts where oneDNN has no bfloat16 LSTM for this processor."""
    from tests.exchange.test_overlap import TEXT

    cfg = composed.cfg(*TEXT, "precision=bfloat16", f"paths.runs={tmp_path}", "workers=2")
    try:
        composed.validated(cfg)
    except ConfigError as refused:
        assert "precision must be float32 for model=lstm_small on this processor" in str(refused)
        return
    trainer = Trainer(RunConfig.from_dict(cfg), Comm(2), RunFolder.create(str(tmp_path), "run", cfg))
    trainer.begin_epoch()
    steps(trainer, 3)
    assert bool(trainer.axis.loss_sum_W.sum().isfinite())


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["precision=half"], "precision must be one of float32, bfloat16, float16, got half; type precision=float32"),
        ([HALF, "sync=local_sgd"], "precision must be .* where workers take local steps, .*; type precision=bfloat16"),
        (
            [
                *(HALF, "comm=gloo", "comm.processes=2", "workers=2", "comm.engine=ddp", "compressor=powersgd"),
                *("compressor.residual=aggregate", "compressor.start_step=2"),
            ],
            "torch's hook would keep an overflow, got float16; type precision=bfloat16",
        ),
    ],
)
def test_refused(tmp_path, overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        composed.validated(composed.run(tmp_path, *overrides))
