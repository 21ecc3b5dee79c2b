"""measure: norms of the epoch's summed gradients, and the error of a compressed message, for figures."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from accordion_bench import train
from accordion_bench.comm.collectives import Comm
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.runs.folder import RunFolder
from accordion_bench.signals import policy_runner
from accordion_bench.signals.statistics import GradientSums
from accordion_bench.training.trainer import Trainer
from tests.forward.test_text import cfg_for, fitted
from tests.kit import composed, local, tiny
from tests.runs.test_resume import differences, resume, state, stop

BOTH = ["measure.norms=true", "measure.error=true"]
PLAIN = ["optimizer.momentum=0", "optimizer.weight_decay=0", "schedule.milestones=[]"]
COMPRESSORS = {
    "topk": ["compressor=topk", "compressor.density=0.2"],
    "topk of the model": ["compressor=topk", "compressor.scope=model"],
    "powersgd": ["compressor=powersgd", "compressor.min_compression_rate=0"],
    "qsgd": ["compressor=qsgd", "compressor.bits=2"],
    "dist-EF": ["compressor=distefblocksgd"],
    "dgc": ["compressor=dgc"],
    "demo": ["compressor=demo", "optimizer.momentum=0"],
    "local SGD": ["sync=local_sgd", "sync.period=4", "compressor=topk"],
    "hierarchical": ["sync=hierarchical", "sync.groups=[[2,2],[8,4]]", "compressor=topk"],
    "overlap": ["sync=overlap_local_sgd", "sync.period=4", "compressor=topk"],
}


def rows(tmp_path) -> list[dict]:
    return RunFolder(tmp_path).read_metrics()


def summed_by_hand(trainer: Trainer, period: int | None = None) -> list[list[float]]:
    """Per epoch the norm of the sum of worker 0's gradients, per tensor; plain PyTorch, one model per worker."""
    models = [copy.deepcopy(trainer.axis.model) for _ in range(4)]
    found, taken = [], 0
    for epoch in range(trainer.config.epochs):
        trainer.sampler.begin_epoch(epoch, trainer.position.plan.batch_size)
        trainer.data.begin_epoch(epoch)  # type: ignore[attr-defined]
        total = [torch.zeros_like(p) for p in models[0].parameters()]
        for step in range(trainer.position.steps_per_epoch):
            gradients = []
            for worker, model in enumerate(models):
                x, y = trainer.data.train_batch(trainer.sampler.batch(worker, step))  # type: ignore[attr-defined]
                gradients.append(torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())))
            total = [a + g for a, g in zip(total, gradients[0], strict=True)]
            mean = [sum(parts) / 4 for parts in zip(*gradients, strict=True)]
            taken += 1
            with torch.no_grad():
                for model, own in zip(models, gradients, strict=True):
                    for p, g in zip(model.parameters(), mean if period is None else own, strict=True):
                        p -= trainer.position.lr(step, epoch) * g
                if period and taken % period == 0:
                    for ps in zip(*(model.parameters() for model in models), strict=True):
                        for p, value in zip(ps, [sum(ps) / 4] * 4, strict=True):
                            p.copy_(value)
        found.append([float(g.norm()) for g in total])
    return found


@pytest.mark.parametrize("period", [None, 4])
def test_norms_are_those_of_an_obvious_sum(tmp_path, period):
    """Over a dense run, and over the replica of worker 0."""
    scheme = [] if period is None else ["sync=local_sgd", f"sync.period={period}"]
    options = [*PLAIN, *scheme, "measure.norms=true", "epochs=2"]
    expected = summed_by_hand(local.trainer_for(tmp_path, *options), period)
    (tmp_path / "run").mkdir()
    trainer = local.trainer_for(tmp_path / "run", *options)
    trainer.fit()
    names = [spec.name for spec in trainer.axis.specs]
    for row, norms in zip(trainer.folder.read_metrics(), expected, strict=True):
        assert list(row["norms"]) == names  # and not the whole model's
        assert list(row["norms"].values()) == pytest.approx(norms, rel=1e-9)
        assert "compression_error" not in row


@pytest.mark.parametrize("statistic", ["local", "mean", "update"])
def test_norms_are_those_that_accordion_sees(tmp_path, statistic):
    """Where it looks at worker 0, too; otherwise both are collected side by side."""
    options = ["compressor=topk", "adaptive=accordion", "adaptive.accordion.interval=2", "measure.norms=true"]
    trainer = local.trained(tmp_path, *options, f"adaptive.accordion.statistic={statistic}")
    alone = local.trained(tmp_path, *options[:-1], f"adaptive.accordion.statistic={statistic}")
    for row, other in zip(trainer.folder.read_metrics(), alone.folder.read_metrics(), strict=True):
        assert row["decisions"] == other["decisions"] and all(row["norms"].values())
        if (seen := row["decisions"].get("accordion")) and seen["norm"]:
            theirs = dict(zip(seen["names"], seen["norm"], strict=True))
            assert ({name: row["norms"][name] for name in theirs} == theirs) == (statistic == "local")


def test_norms_of_accordion_for_the_batch(tmp_path):
    """The policy looks until it has switched; the rows have norms in every epoch."""
    switch = [
        "adaptive=accordion_batch",
        "adaptive.accordion_batch.factor=2",
        "adaptive.accordion_batch.fixed_switch=1",
    ]
    trainer = local.trained(tmp_path, *switch, "measure.norms=true")
    assert all(len(row["norms"]) == 4 and all(row["norms"].values()) for row in trainer.folder.read_metrics())


def test_nothing_is_done_where_nothing_is_measured(tmp_path, monkeypatch):
    def never(*args, **options):
        raise AssertionError("asked for by nobody")

    for name in ("probe_exchange", "compressor_input", "measure_level", "cut_into_buckets"):
        monkeypatch.setattr(policy_runner, name, never)
    sums: list[dict] = []
    add = GradientSums.add_gradients
    monkeypatch.setattr(GradientSums, "add_gradients", lambda self, *args: (sums.append(self.sums), add(self, *args)))
    trainer = local.trained(tmp_path, "compressor=topk")
    assert sums == [{}] * 24
    assert not {"norms", "compression_error"} & trainer.folder.read_metrics()[0].keys()


# ---- the error


def relative(xs: list[Tensor], sent: list[Tensor]) -> float:
    lost = sum(float((x - s).double().square().sum()) for x, s in zip(xs, sent, strict=True))
    return lost / sum(float(x.double().square().sum()) for x in xs)


def largest(x: Tensor, count: int) -> Tensor:
    kept = torch.zeros_like(x).flatten()
    where = x.flatten().abs().topk(count).indices
    kept[where] = x.flatten()[where]
    return kept.view_as(x)


def first_of_each_epoch(tmp_path, *options: str) -> tuple[list[float], list[tuple[list[Tensor], list[Tensor]]]]:
    """The column, and for each epoch worker 0's first gradients with the residual before them, by hand."""
    trainer = local.trainer_for(tmp_path, *options, "measure.error=true")
    before_step, seen = trainer.sync.before_step, []

    def watched(*args):
        if trainer.position.step_in_epoch == 0:
            gradients = [g_W[0].clone() for g_W in trainer.axis.gradients_W]
            state = trainer.exchange.state
            names = [spec.name for spec in trainer.axis.specs]
            residuals = [state.get(name, {}).get("residual_W") for name in names]
            pairs = zip(gradients, residuals, strict=True)
            seen.append((gradients, [torch.zeros_like(g) if r is None else r[0].clone() for g, r in pairs]))
        return before_step(*args)

    trainer.sync.before_step = watched  # type: ignore[method-assign]
    trainer.fit()
    return [row["compression_error"] for row in trainer.folder.read_metrics()], seen


@pytest.mark.parametrize("feedback", ["true", "false"])
def test_error_of_topk_by_hand(tmp_path, feedback):
    """Of the matrices the largest fifth is sent; with error feedback the residual counts into the message."""
    options = ["compressor=topk", "compressor.density=0.2", f"compressor.error_feedback={feedback}"]
    found, seen = first_of_each_epoch(tmp_path, *options)
    expected = []
    for gradients, residuals in seen:
        xs = [g + r for g, r in zip(gradients, residuals, strict=True)]
        sent = [x if x.ndim < 2 else largest(x, int(0.2 * x.numel())) for x in xs]
        expected.append(relative(xs, sent))
    assert found == pytest.approx(expected, rel=1e-6) and len(found) == 4
    assert any(float(r.abs().max()) > 0 for _, residuals in seen[1:] for r in residuals) == (feedback == "true")


def test_error_of_signs_by_hand(tmp_path):
    """EF-SignSGD: the mean magnitude with every sign; biases, too."""
    found, seen = first_of_each_epoch(tmp_path, "compressor=efsignsgd")
    expected = []
    for gradients, residuals in seen:
        xs = [g + r for g, r in zip(gradients, residuals, strict=True)]
        sent = [x.abs().mean() * torch.where(x >= 0, 1.0, -1.0) for x in xs]
        expected.append(relative(xs, sent))
    assert found == pytest.approx(expected, rel=1e-6)


def test_nothing_is_lost_without_compression(tmp_path):
    trainer = local.trained(tmp_path, "measure.error=true")
    assert [row["compression_error"] for row in trainer.folder.read_metrics()] == [0.0] * 4


def test_an_epoch_without_an_exchange_has_no_error(tmp_path):
    trainer = local.trained(tmp_path, "sync=local_sgd", "sync.period=8", "compressor=topk", *BOTH)
    errors = [row["compression_error"] for row in trainer.folder.read_metrics()]
    assert [error is None for error in errors] == [True, False, False, False]  # after 8, 16, 24 of 4 x 6 steps
    assert all(0 < error < 1 for error in errors[1:])
    assert all(len(row["norms"]) == 4 for row in trainer.folder.read_metrics())


@pytest.mark.sample(5)
@pytest.mark.parametrize("arm", COMPRESSORS)
def test_measuring_changes_no_bit(tmp_path, arm):
    """Neither weights nor bytes; the messages are really lossy."""
    plain, measured = (local.trained(tmp_path, *COMPRESSORS[arm], *more) for more in ([], BOTH))
    assert all(map(torch.equal, local.consensus(plain), local.consensus(measured)))
    strip = lambda row: {k: v for k, v in row.items() if k not in ("norms", "compression_error") and "sec" not in k}  # noqa: E731
    pairs = list(zip(plain.folder.read_metrics(), measured.folder.read_metrics(), strict=True))
    assert all(strip(row) == strip(other) for row, other in pairs)
    assert all(other["compression_error"] > 0 for _, other in pairs)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "scheme, stop_at", [([], 9), (["sync=local_sgd", "sync.period=4"], 3), (["sync=local_sgd"], 9)]
)
def test_stopped_in_mid_epoch(tmp_path, scheme, stop_at):
    """Also before the epoch's first exchange, and after it."""
    composed = tiny.cfg(tmp_path, "compressor=topk", *BOTH, *scheme, f"checkpoint.every={4 * tiny.STEPS}")
    cfgs = [{**composed, "paths": {"data": "data", "runs": str(tmp_path / name)}} for name in ("straight", "stopped")]
    torch.manual_seed(0)  # the global generator's state is saved, too, although no run draws from it
    train.run(cfgs[0])
    folder = stop(cfgs[1], stop_at, every=1)
    resume(folder, cfgs[1])
    assert differences(state(folder), state(tiny.only(tmp_path / "straight"))) == []


def test_on_text(tmp_path):
    """A tied tensor has one norm, that of the sum of both uses."""
    trainer = fitted(tmp_path, "compressor=powersgd", "compressor.min_compression_rate=0", *BOTH)
    for row in trainer.folder.read_metrics():
        assert set(row["norms"]) == {spec.name for spec in trainer.axis.specs} and "decoder.weight" not in row["norms"]
        assert all(row["norms"].values()) and 0 < row["compression_error"] < 1


@pytest.mark.parametrize("key", ["norms", "error"])
def test_refused(tmp_path, key):
    with pytest.raises(ConfigError) as refused:
        composed.validated(cfg_for(tmp_path, f"measure.{key}=3"))
    assert str(refused.value) == f"measure.{key} must be true or false, got 3; type measure.{key}=false"


def test_sums_of_a_long_epoch_in_half_precision():
    """A bfloat16 that has reached 256 times a gradient grows no more by it."""
    specs = [TensorSpec("weight", (4,))]
    sums = GradientSums(specs, Comm(1), torch.zeros((), dtype=torch.bfloat16))
    sums.begin(frozenset(["norm_of_sum_local", "norm_of_sum_mean", "norm_of_sum_update"]))
    ones = torch.ones(1, 4, dtype=torch.bfloat16)
    for _ in range(1000):
        sums.add_gradients([ones])
        sums.add_updates([ones[0]])
    assert {values["weight"] for values in sums.read().values()} == {2000}
