"""clip_norm: a worker's whole gradient is cut to a norm before anything else is done with it."""

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion_bench import train
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.worker_axis import WorkerAxis
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs.folder import RunFolder
from tests.forward.test_text import cfg_for, fitted, trainer_for
from tests.kit import composed, local, tiny

TEXT = ["model._target_=tests.forward.test_text.Double", "model.dropout=0", "epochs=1"]


def axis_with(gradients_W: list[Tensor]) -> WorkerAxis:
    """An axis whose workers have just found these gradients [W, ...]."""
    network = nn.Module()
    for i, g_W in enumerate(gradients_W):
        network.register_parameter(f"p{i}", nn.Parameter(torch.zeros_like(g_W[0])))
    axis = WorkerAxis(network, Comm(len(gradients_W[0])), seed=0)
    axis.gradients_W = [g_W.clone() for g_W in gradients_W]
    return axis


def drawn(workers: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(7, 3, 2, 2), (50, 4), (9,), ()]
    return [scale * torch.randn(workers, *shape, generator=generator) for shape in shapes]


def norms(gradients_W: list[Tensor]) -> Tensor:
    """Of each worker's whole gradient."""
    return torch.cat([g_W.double().reshape(len(g_W), -1) for g_W in gradients_W], dim=1).norm(dim=1)


@pytest.mark.parametrize("limit", [1e-3, 0.4, 12.0, 1e6])
def test_each_worker_is_cut_by_itself(limit):
    """To at most the limit, without a turn; who is below it keeps every bit."""
    before = [g_W * torch.tensor([0.1, 1, 3]).view(3, *[1] * (g_W.ndim - 1)) for g_W in drawn(3)]
    axis = axis_with(before)
    axis.clip(limit)
    after = axis.gradients_W
    assert bool((norms(after) <= limit * (1 + 1e-6)).all())
    for row, norm in enumerate(norms(before).tolist()):
        for ours, g_W in zip(after, before, strict=True):
            if norm <= limit:
                assert torch.equal(ours[row], g_W[row])
            else:
                torch.testing.assert_close(ours[row], g_W[row] * (limit / norm))
    cut = norms(before) > limit
    torch.testing.assert_close(norms(after)[cut], torch.full((int(cut.sum()),), limit).double())


@pytest.mark.parametrize("limit", [0.4, 1e6])
def test_as_torch_does_for_one_worker(limit):
    axis, gradients = axis_with(drawn(1)), drawn(1)
    axis.clip(limit)
    params = [nn.Parameter(g_W[0].clone()) for g_W in gradients]
    for p, g_W in zip(params, gradients, strict=True):
        p.grad = g_W[0].clone()
    nn.utils.clip_grad_norm_(params, limit)
    for p, g_W in zip(params, axis.gradients_W, strict=True):
        torch.testing.assert_close(g_W[0], p.grad, rtol=1e-5, atol=0)


def test_a_zero_gradient_stays_zero():
    axis = axis_with(drawn(2, scale=0.0))
    axis.clip(0.5)
    assert not any(g_W.any() for g_W in axis.gradients_W)


def test_a_large_matrix_is_measured_exactly():
    """One float32 sum over all of it would be off in the fourth digit already."""
    g = torch.randn(1, 8000, 500, generator=torch.Generator().manual_seed(0))
    axis = axis_with([g])
    axis.clip(1.0)
    assert float(norms(axis.gradients_W)[0]) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_left_alone(bad):
    """Else every parameter would have a NaN, and the first one the blame."""
    before = drawn(2)
    before[1][1, 3, 2] = bad
    axis = axis_with(before)
    axis.clip(0.5)
    for ours, g_W in zip(axis.gradients_W, before, strict=True):
        assert torch.equal(ours[1].nan_to_num(), g_W[1].nan_to_num())
    assert norms([g_W[:1] for g_W in axis.gradients_W]).item() == pytest.approx(0.5)


# ---- in a run


def reference(trainer, limit: float) -> list[Tensor]:
    """One worker's epoch in plain PyTorch, with torch's clipping."""
    model = copy.deepcopy(trainer.axis.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=trainer.position.lr(0), momentum=0.9, weight_decay=1e-4)
    trainer.sampler.begin_epoch(0, trainer.position.plan.batch_size)
    state = None
    for step in range(trainer.position.steps_per_epoch):
        x, y = trainer.data.train_batch(trainer.sampler.batch(0, step))
        logits, state = model(x, state)
        state = tuple(part.detach() for part in state)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), y.flatten()).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), limit) > limit
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_a_run_of_one_worker_is_plain_pytorch(tmp_path):
    options = [*TEXT, "workers=1", "clip_norm=0.1"]
    expected = reference(trainer_for(tmp_path, *options), 0.1)
    for ours, plain in zip(fitted(tmp_path, *options).axis.params, expected, strict=True):
        torch.testing.assert_close(ours.detach(), plain, rtol=1e-4, atol=1e-8)  # torch adds 1e-6 to the norm


@pytest.mark.parametrize("options", [[], ["compressor=topk"], ["sync=local_sgd", "sync.period=3"]])
def test_a_large_norm_changes_no_bit(tmp_path, options):
    plain, clipped = (fitted(tmp_path, "epochs=1", *options, f"clip_norm={norm}") for norm in ("null", 1e6))
    assert all(map(torch.equal, plain.axis.params, clipped.axis.params))
    other = fitted(tmp_path, "epochs=1", *options, "clip_norm=0.01")
    assert not any(map(torch.equal, plain.axis.params, other.axis.params))


@pytest.mark.parametrize("sync", ["every_step", "local_sgd"])
def test_what_everybody_sees_is_clipped(tmp_path, sync):
    """The exchange, the local optimizers, and the statistics of Accordion."""
    trainer = trainer_for(tmp_path, *TEXT, "clip_norm=0.1", f"sync={sync}", "measure.norms=true")
    before_step, seen = trainer.sync.before_step, []

    def watched(*args):
        seen.append([g_W.clone() for g_W in trainer.axis.gradients_W])
        return before_step(*args)

    trainer.sync.before_step = watched  # type: ignore[method-assign]
    trainer.fit()
    for gradients_W in seen:
        torch.testing.assert_close(norms(gradients_W), torch.full((4,), 0.1).double())
    for i, spec in enumerate(trainer.axis.specs):
        total = sum(gradients_W[i][0] for gradients_W in seen)
        assert trainer.policy_runner.norms[spec.name] == pytest.approx(float(total.norm()), rel=1e-9)


def test_accordion_decides_on_clipped_gradients(tmp_path):
    options = ["compressor=topk", "adaptive=accordion", "adaptive.accordion.interval=1", "measure.norms=true"]
    (tmp_path / "run").mkdir()
    trainer = fitted(tmp_path / "run", *options, "clip_norm=0.001")
    decision = trainer.folder.read_metrics()[1]["decisions"]["accordion"]
    assert 0 < max(decision["norm"] + decision["norm_before"]) <= 6e-3 * (1 + 1e-6)  # six steps of at most 0.001


@pytest.mark.parametrize("trouble", ["nan", "gradient"])
def test_nan_is_still_refused(tmp_path, monkeypatch, trouble):
    """As without clipping, with the same sentence."""
    said = []
    for norm in ("null", 0.5):
        monkeypatch.setenv("TINY_TROUBLE", f"{trouble}:0:7")
        with pytest.raises(NonFinite) as refused:
            local.trained(tmp_path, "model._target_=tests.kit.tiny.Net", f"clip_norm={norm}")
        said.append(str(refused.value))
    assert said[0] == said[1] and "worker 2" in said[0]


@pytest.mark.slow
def test_two_processes_of_two_workers_equal_one_of_four(tmp_path):
    """And worker 0 measures the same in both."""
    found = []
    for place in (["comm=simulated"], ["comm=gloo", "comm.processes=2"]):
        runs = tmp_path / place[0].split("=")[1]
        options = ["workers=4", "clip_norm=0.3", "epochs=2", "measure.error=true", "measure.norms=true"]
        train.run(tiny.cfg(runs, *place, *options, "compressor=topk", f"checkpoint.every={2 * tiny.STEPS}"))
        folder = tiny.only(runs)
        shared = torch.load(folder / f"checkpoint/step-{2 * tiny.STEPS:08d}/shared.pt", weights_only=True)
        found.append((RunFolder(folder).read_metrics(), shared["parameters"]))
    (rows, weights), (others, other_weights) = found
    for row, other in zip(rows, others, strict=True):
        assert row["payload_bytes"] == other["payload_bytes"]
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
        assert row["compression_error"] == pytest.approx(other["compression_error"], rel=1e-4)
        assert row["norms"] == pytest.approx(other["norms"], rel=1e-4)
    for name, value in weights.items():
        assert (other_weights[name] - value).norm() <= 1e-4 * value.norm()


@pytest.mark.parametrize("value", ["0", "-1", "big", "true"])
def test_refused(value):
    with pytest.raises(ConfigError) as refused:
        composed.validated(cfg_for(Path("nowhere"), f"clip_norm={value}"))
    assert str(refused.value) == f"clip_norm must be a number above 0, got {value}; type clip_norm=1.0"


@pytest.mark.parametrize("workers", [1, 3])
def test_after_the_exchange_is_clip_grad_norm(tmp_path, workers):
    """Of the mean gradient, as one worker with the whole batch would have it."""
    options = ["clip_norm=0.05", "clip_at=after", "optimizer.weight_decay=0.1"]
    trainer = local.trainer_for(tmp_path, *options, workers=workers)
    model = copy.deepcopy(trainer.axis.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    cut = 0
    for epoch in range(trainer.config.epochs):
        trainer.sampler.begin_epoch(epoch, trainer.position.plan.batch_size)
        trainer.data.begin_epoch(epoch)
        for step in range(trainer.position.steps_per_epoch):
            optimizer.param_groups[0]["lr"] = trainer.position.lr(step, epoch)
            optimizer.zero_grad()
            for worker in range(workers):
                x, y = trainer.data.train_batch(trainer.sampler.batch(worker, step))
                (F.cross_entropy(model(x), y) / workers).backward()
            cut += bool(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05)
            optimizer.step()
    trainer.fit()
    assert cut > trainer.position.step // 2
    for ours, plain in zip(trainer.axis.params, model.parameters(), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)  # it divides by the norm + 1e-6


def test_after_the_exchange_residuals_and_bytes_do_not_know_of_it(tmp_path):
    """Nothing but the optimizer sees the cut; a cut that never happens changes no bit."""
    first = {}
    for name, options in {"none": [], "after": ["clip_norm=0.001", "clip_at=after"]}.items():
        trainer = local.trainer_for(tmp_path, "compressor=topk", *options)
        trainer.begin_epoch()
        trainer.train_step()
        first[name] = trainer
    for name, entries in first["none"].exchange.state.items():
        for key, value in entries.items():
            assert torch.equal(value, first["after"].exchange.state[name][key])
    assert first["none"].comm.ledger.counts == first["after"].comm.ledger.counts
    loose, without = (
        local.trained(tmp_path, "compressor=topk", *o) for o in (["clip_norm=1000000", "clip_at=after"], [])
    )
    assert all(map(torch.equal, loose.axis.params, without.axis.params))


def test_after_the_exchange_is_before_it_for_one_dense_worker(tmp_path):
    before, after = (local.trained(tmp_path, "clip_norm=0.05", f"clip_at={at}", workers=1) for at in ("null", "after"))
    assert all(map(torch.equal, before.axis.params, after.axis.params))
    named = local.trained(tmp_path, "clip_norm=0.05", "clip_at=before", workers=1)
    assert all(map(torch.equal, before.axis.params, named.axis.params))


def test_after_the_exchange_leaves_the_overlap(tmp_path):
    runs = [
        local.trainer_for(tmp_path, "clip_norm=0.05", f"comm.overlap={on}", "clip_at=after") for on in (True, False)
    ]
    assert [run.runner.overlap.allowed for run in runs] == [True, False]
    for run in runs:
        run.fit()
    assert all(map(torch.equal, *(run.axis.params for run in runs)))
    assert not local.trainer_for(tmp_path, "clip_norm=0.05", "comm.overlap=True").runner.overlap.allowed


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["clip_at=later"], "clip_at must be one of before, after, got later; type clip_at="),
        (
            ["clip_at=after", "sync=local_sgd"],
            "before where workers take local steps, .* got after; type clip_at=before",
        ),
        (
            ["clip_at=after", "compressor=dgc"],
            "before where the compressor takes the step itself, .*type clip_at=before",
        ),
        (["clip_at=after", "compressor=distefblocksgd"], "before where the compressor takes the step itself"),
    ],
)
def test_after_the_exchange_is_refused_where_the_update_is_no_gradient(tmp_path, overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        composed.validated(tiny.cfg(tmp_path, "clip_norm=1", *overrides))


def test_where_without_a_norm_is_warned_of(tmp_path):
    assert composed.warnings(tiny.cfg(tmp_path, "workers=2", "clip_at=after"), {"clip_at"}) == [
        "clip_at has no effect here: clip_norm is null"
    ]
