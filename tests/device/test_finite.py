"""On a device the host waits once in a step to know that everything was finite; on a CPU all is as it was."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.compressors.uncoded import Dense
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.finite import Finite, Look, largest
from accordion_bench.plan import Ladder, Plan, TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import composed

NAN, INF = float("nan"), float("inf")
TINY = [
    *("model._target_=tests.kit.models.Plain", "~model.depth", "dataset=synthetic", "dataset.size=8", "epochs=1"),
    *("dataset.train_size=96", "dataset.test_size=8", "batch_size=4", "comm.bucket_cap_mb=0.001"),
]


class Waits(TorchDispatchMode):
    """Counts what a host would have to wait for: numbers that are read from tensors, one by one or as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.counts["number"] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def lists(monkeypatch):
    """How often a tensor was read as a list; under the dispatcher it is one copy."""
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (reads.append(self.shape), tolist(self))[1])
    return reads


def trainer_for(tmp_path, *overrides, late=True, workers=2) -> Trainer:
    config = RunConfig.from_dict(composed.cfg(*TINY, *overrides))
    trainer = Trainer(config, Comm(workers), RunFolder(tmp_path))
    trainer.runner.preload()
    trainer.runner.finite.late = late
    trainer.begin_epoch()
    return trainer


def spoiled(trainer, name: str, worker: int, value=NAN) -> None:
    """The gradient of a parameter has one bad entry, on one worker."""
    param = trainer.axis.params[[spec.name for spec in trainer.axis.specs].index(name)]

    def spoil(gradient):
        if trainer.axis._current == worker:
            gradient = gradient.clone()
            gradient.view(-1)[-1] = value
        return gradient

    param.register_hook(spoil)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "overrides",
    [
        ["comm.overlap=false", "compressor=powersgd", "compressor.min_compression_rate=0"],
        ["comm.overlap=true"],
        ["sync=local_sgd", "sync.period=3"],
        ["compressor=fp16"],
    ],
    ids=" ".join,
)
def test_a_step_reads_once_and_computes_the_same(tmp_path, overrides, lists):
    late, usual = (trainer_for(tmp_path, *overrides, late=late) for late in (True, False))
    for step in range(4):
        lists.clear()
        with Waits() as waits:
            late.train_step()
        averages = step == 2 and "sync=local_sgd" in overrides
        assert len(lists) == 1 + averages and waits.counts["number"] == 0, (step, lists, waits.counts)
        usual.train_step()
    for ours, theirs in zip(late.axis.params, usual.axis.params, strict=True):
        assert torch.equal(ours, theirs)
    assert late.comm.ledger.counts == usual.comm.ledger.counts


@pytest.mark.sample(4)
@pytest.mark.parametrize("overlap", ["true", "false"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_the_sentence_is_that_of_a_cpu_and_nothing_is_applied(tmp_path, overlap, value):
    told = []
    for late in (True, False):
        trainer = trainer_for(tmp_path, f"comm.overlap={overlap}", late=late)
        trainer.train_step()
        before = [p.detach().clone() for p in trainer.axis.params]
        spoiled(trainer, "net.2.weight", 1, value)
        with pytest.raises(NonFinite) as refused:
            trainer.train_step()
        told.append(str(refused.value))
        assert all(torch.equal(p, q) for p, q in zip(trainer.axis.params, before, strict=True))
    assert told[0] == told[1] and "step 1 (epoch 0): the gradient of net.2.weight on worker 1 is not finite" in told[0]


def test_the_sentence_of_a_local_step_is_that_of_a_cpu(tmp_path):
    for late in (True, False):
        trainer = trainer_for(tmp_path, "sync=local_sgd", "sync.period=3", late=late)
        trainer.train_step()
        before = [p.detach().clone() for row in trainer.axis.replicas for p in row]
        spoiled(trainer, "net.4.bias", 0)
        with pytest.raises(NonFinite, match=r"step 1 .*the gradient of net\.4\.bias on worker 0 is not finite; try"):
            trainer.train_step()
        after = [p for row in trainer.axis.replicas for p in row]
        assert all(torch.equal(p, q) for p, q in zip(after, before, strict=True))


def lost_on_worker_1(model, x, y, row, micro):
    return F.cross_entropy(model(x), y) * (NAN if row else 1)


@pytest.mark.parametrize("overrides", [[], ["sync=local_sgd"], ["precision=float16"]], ids=" ".join)
def test_a_loss_is_named_before_the_gradients(tmp_path, overrides):
    told = []
    for late in (True, False):
        trainer = trainer_for(tmp_path, *overrides, late=late)
        trainer.task.loss = lost_on_worker_1
        before = [p.detach().clone() for p in trainer.axis.params]
        with pytest.raises(NonFinite) as refused:
            trainer.train_step()
        told.append(str(refused.value))
        assert all(torch.equal(p, q) for p, q in zip(trainer.axis.params, before, strict=True))
    assert told[0] == told[1] and "the loss of worker 1 is nan, and the gradient of " in told[0]


class Overflowing(Dense):
    """What it sends is beyond float32, as a norm may be of which no encoder on a device says anything."""

    def exchange(self, xs_W, ctx, state, comm):
        out = super().exchange(xs_W, ctx, state, comm)
        return out._replace(
            update=[u if spec.ndim == 1 else u * INF for u, spec in zip(out.update, ctx.specs, strict=True)]
        )


def exchange_of(*specs, workers=2, compressor=None) -> Exchange:
    exchange = Exchange(compressor or Dense(), list(specs), Ladder("", (), (0, 0)), Comm(workers), torch.zeros(1))
    exchange.finite.late = True
    return exchange


def test_an_update_that_is_not_finite_is_refused_where_no_gradient_is():
    exchange = exchange_of(TensorSpec("b", (3,)), TensorSpec("m", (2, 3)), compressor=Overflowing())
    with pytest.raises(NonFinite, match=r"^the compressor input of some worker for m is not finite$"):
        exchange([torch.ones(2, 3), torch.ones(2, 2, 3)], StepInfo(Plan({}, 1), 0))


def test_tensors_without_entries_are_passed_over():
    exchange = exchange_of(TensorSpec("none", (0,)), TensorSpec("m", (2,)), TensorSpec("empty", (0, 3)))
    xs_W = [torch.zeros(2, 0), torch.ones(2, 2), torch.zeros(2, 0, 3)]
    exchange(xs_W, StepInfo(Plan({}, 1), 0))
    xs_W[1][1, 0] = NAN
    with pytest.raises(NonFinite, match="the gradient of m on worker 1 is not finite"):
        exchange(xs_W, StepInfo(Plan({}, 1), 0))
    assert largest([torch.zeros(0)]).shape == (0,)


def test_large_finite_gradients_are_finite():
    """Their sum, or the sum of their squares, would not be."""
    exchange = exchange_of(TensorSpec("m", (4,)), workers=1)
    xs_W = [torch.full((1, 4), 3e38)]
    assert exchange(xs_W, StepInfo(Plan({}, 1), 0))[0].equal(xs_W[0][0])


def test_who_knows_the_cause_tells_the_others():
    """All processes see the same update, but only one of them has the gradient that has spoilt it."""

    class Others(Comm):
        said: list[str] = []

        def gather_objects(self, said):
            self.said.append(said)
            return ["", "the gradient of m on worker 3 is not finite", said]

    finite, comm = Finite(torch.device("cpu")), Others(1)
    finite.note(torch.ones(2), Look(2, lambda i, value: "never"))
    finite.note(torch.tensor([1.0, NAN]), Look(2, lambda i, value: f"update {i} is {value}", comm))
    with pytest.raises(NonFinite, match=r"^the gradient of m on worker 3 is not finite$"):
        finite.refuse()
    assert comm.said == [""]
    finite.refuse()  # it is forgotten
    finite.note(torch.tensor([INF]), Look(1, lambda i, value: f"the loss is {value}"))
    with pytest.raises(NonFinite, match=r"^the loss is inf$"):
        finite.refuse()
    assert comm.said == [""]  # what is nobody else's is told at once


def test_a_device_is_late_and_a_cpu_is_not():
    assert Finite(torch.device("cuda:1")).late and Finite(torch.device("meta")).late
    assert not Finite(torch.device("cpu")).late
