"""Overlap: exchanging buckets during the backward pass changes nothing but the time it takes."""

import math
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.on_device import Transport
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.overlap import ExchangeOptions
from accordion_bench.exchange.partition import bucketed
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.plan import Ladder, TensorSpec
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import composed, helpers

COMPRESSORS = sorted(file.stem for file in (conf_dir() / "compressor").glob("*.yaml"))
WITH_MOMENTUM = ("demo", "dgc", "signum")
TINY = [
    *("model=resnet8", "dataset=synthetic", "dataset.size=8", "dataset.train_size=96", "dataset.test_size=8"),
    *("batch_size=4", "epochs=1", "optimizer.lr=0.05", "schedule.lr_scaling=none", "comm.bucket_cap_mb=0.002"),
]


TEXT = [
    *("model=lstm_small", "model.hidden=16", "dataset=synthetic_text", "dataset.train_words=4000", "batch_size=4"),
    *("epochs=1", "optimizer.lr=0.05", "schedule.lr_scaling=none", "comm.bucket_cap_mb=0.001"),
]


def trained(
    tmp_path, overlap: bool, *overrides: str, workers: int = 2, steps: int = 4, prepare=lambda t: None, of=TINY
):
    """A trainer after some steps, all workers in this process."""
    cfg = composed.cfg(*of, f"comm.overlap={str(overlap).lower()}", *overrides)
    trainer = Trainer(RunConfig.from_dict(cfg), Comm(workers), RunFolder(tmp_path))
    prepare(trainer)
    trainer.begin_epoch()
    for _ in range(steps):
        trainer.train_step()
    return trainer


def same(a: Trainer, b: Trainer) -> None:
    """Parameters, compressor's state and bytes, bit for bit."""
    assert all(torch.equal(x, y) for x, y in zip(a.axis.params, b.axis.params, strict=True))
    assert a.comm.ledger.counts == b.comm.ledger.counts
    ours, theirs = a.exchange.state, b.exchange.state
    assert ours.keys() == theirs.keys()
    for name, entries in ours.items():
        for key, value in entries.items():
            assert torch.equal(value, theirs[name][key]), (name, key)


@pytest.fixture
def left_early(monkeypatch):
    """How many buckets were handed over before the end of the backward pass, step by step."""
    from accordion_bench.exchange.overlap import Overlap

    early, complete = [], Overlap.complete

    def noted(self):
        if self.armed is not None and self.armed.ctx is not None:
            early.append(len(self.armed.under_way))
        complete(self)

    monkeypatch.setattr(Overlap, "complete", noted)
    return early


@pytest.mark.sample(7)
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_overlap_equals_the_reference_path_bit_for_bit(tmp_path, compressor, left_early):
    beside = helpers.changed_options("compressor", compressor)
    own = ["optimizer.momentum=0"] if compressor in WITH_MOMENTUM else beside
    overlapped, reference = (trained(tmp_path, on, f"compressor={compressor}", *own) for on in (True, False))
    assert len(overlapped.exchange.buckets) > 1
    assert left_early == [len(overlapped.exchange.buckets)] * 4
    same(overlapped, reference)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "overrides",
    [
        ["micro_batch_size=2"],
        ["compressor=distefblocksgd", "micro_batch_size=3"],
        ["compressor=topk", "compressor.error_feedback=ef21", "optimizer.momentum=0"],
        ["adaptive=accordion", "compressor=powersgd", "adaptive.accordion.interval=1"],
        ["sync=post_local_sgd", "sync.switch_step=2", "compressor=topk"],
        ["compressor=efsignsgd", "compressor.block=bucket", "compressor.block_size=3000"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("workers", [1, 3])
def test_overlap_under_everything_else(tmp_path, overrides, workers, left_early):
    overlapped, reference = (trained(tmp_path, on, *overrides, workers=workers) for on in (True, False))
    assert left_early and all(left_early)
    same(overlapped, reference)


@pytest.mark.sample(3)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("merge", [["sync.merge=pull_back"], ["sync.merge=cocod", "sync.beta=0"]], ids=" ".join)
def test_averages_in_flight_equal_averages_computed_at_once(tmp_path, merge, workers):
    overrides = ["sync=overlap_local_sgd", "sync.period=3", "sync.delay=2", "compressor=topk", *merge]
    a, b = (trained(tmp_path, on, *overrides, workers=workers, steps=7) for on in (True, False))
    assert a.sync.in_flight.landing is not None and b.sync.in_flight.landing is None
    a.sync.land()
    for x, y in zip(a.sync.in_flight.updates, b.sync.in_flight.updates, strict=True):
        assert torch.equal(x, y)
    same(a, b)
    for ours, theirs in zip(a.axis.replicas, b.axis.replicas, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("overrides", [[], ["compressor=topk"]], ids=" ".join)
def test_a_fragment_in_flight_equals_one_averaged_at_once(tmp_path, overrides, workers):
    scheme = ["sync=streaming_diloco", "sync.period=6", "sync.fragments=2", "sync.delay=2", *overrides]
    a, b = (trained(tmp_path, on, *scheme, workers=workers, steps=5) for on in (True, False))
    assert a.sync.in_flight.landing is not None and b.sync.in_flight.landing is None
    a.sync.land()
    ours, theirs = a.sync.in_flight.updates, b.sync.in_flight.updates
    assert all(map(torch.equal, ours, theirs)) and len(ours) == len(a.sync.tensors[1])
    same(a, b)
    for ours, theirs in zip(a.axis.replicas, b.axis.replicas, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("workers", [1, 2])
def test_models_of_neighbours_in_flight_equal_those_that_are_waited_for(tmp_path, workers):
    scheme = ["sync=gossip", "sync.graph=ring", "sync.delay=1"]
    a, b = (trained(tmp_path, on, *scheme, workers=workers, steps=5) for on in (True, False))
    assert a.sync.in_flight.landing is not None and b.sync.in_flight.landing is None
    a.sync.land()
    assert all(map(torch.equal, a.sync.in_flight.updates, b.sync.in_flight.updates))
    same(a, b)
    for ours, theirs in zip(a.axis.replicas, b.axis.replicas, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fragment_lands_before_the_next_sparse_average(tmp_path, workers):
    """Collectives are made one at a time; the same parameters and bytes come of it."""
    scheme = ["sync=streaming_diloco", "sync.period=8", "sync.fragments=2", "sync.delay=2", "sync.sparta=0.1"]
    flying: list[bool] = []
    a = trained(tmp_path, True, *scheme, workers=workers, steps=2)
    for _ in range(4):
        flying.append(a.sync.in_flight.landing is not None)
        a.train_step()
    assert flying == [True, False, False, False]
    same(a, trained(tmp_path, False, *scheme, workers=workers, steps=6))


def test_overlap_of_a_language_model(tmp_path, left_early):
    """The embedding is the output layer, too: its gradient is complete last of all."""
    overlapped, reference = (trained(tmp_path, on, "compressor=topk", of=TEXT) for on in (True, False))
    assert left_early == [len(overlapped.exchange.buckets)] * 4
    same(overlapped, reference)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "overrides",
    [
        ["clip_norm=1"],
        ["compressor=topk", "compressor.scope=model"],
        ["compressor=distefblocksgd", "compressor.weight_decay_mode=in_gradient"],
        ["compressor=qsgd", "adaptive=alq", "adaptive.alq.update_at=[2]"],
    ],
    ids=" ".join,
)
def test_what_needs_all_gradients_first_is_exchanged_after_the_backward_pass(tmp_path, overrides, left_early):
    overlapped, reference = (trained(tmp_path, on, *overrides) for on in (True, False))
    assert len(left_early) < 4
    same(overlapped, reference)


class Branches(nn.Module):
    """One layer is frozen, one is not used in every step, the last one never."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3) -> None:
        super().__init__()
        self.frozen = nn.Linear(in_channels * 64, 32)
        self.frozen.weight.requires_grad_(False)
        self.sometimes, self.last = nn.Linear(32, 32), nn.Linear(32, num_classes)
        self.never = nn.Linear(300, 300)
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        x = self.frozen(x.flatten(1)).relu()
        return self.last(self.sometimes(x) if self.forwards % 3 else x)


@pytest.mark.sample(3)
@pytest.mark.parametrize("compressor", ["none", "topk", "powersgd", "distefblocksgd"])
def test_frozen_and_unused_parameters(tmp_path, compressor):
    overrides = ["model._target_=tests.exchange.test_overlap.Branches", "~model.depth", f"compressor={compressor}"]
    a, b = (trained(tmp_path, on, *overrides, "comm.bucket_cap_mb=0.001", steps=6) for on in (True, False))
    assert "frozen.weight" not in {spec.name for spec in a.axis.specs}
    same(a, b)


def test_one_bucket_and_many_agree_within_rounding(tmp_path):
    """PowerSGD multiplies equal shapes together, so that other buckets round differently; the rest is exact."""
    for compressor in ("none", "topk", "powersgd"):
        cap = f"compressor={compressor}"
        many = trained(tmp_path, True, cap)
        one = trained(tmp_path, False, cap, "comm.bucket_cap_mb=1000")
        assert len(one.exchange.buckets) == 1 < len(many.exchange.buckets)
        for x, y in zip(many.axis.params, one.axis.params, strict=True):
            if compressor == "powersgd":
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(x, y)
        assert many.comm.ledger.counts["payload"] == one.comm.ledger.counts["payload"]
        assert many.comm.ledger.counts["rounds"] > one.comm.ledger.counts["rounds"]


@pytest.mark.parametrize("mb", [(1.0, 25.0), (1.0, 4.0), (math.inf, math.inf), (0.5, 0.5)])
def test_buckets_are_those_of_distributed_data_parallel(mb):
    model = __import__("torchvision").models.resnet18()
    specs = [TensorSpec(name, tuple(p.shape)) for name, p in model.named_parameters()]
    limits = [min(int(cap * 2**20), 2**62) if cap < math.inf else 2**62 for cap in mb]
    reverse = list(model.parameters())[::-1]
    theirs, _ = dist._compute_bucket_assignment_by_size(reverse, limits)
    numbers = [[len(specs) - 1 - i for i in bucket][::-1] for bucket in theirs]
    assert bucketed([4 * spec.numel for spec in specs], mb) == numbers


def test_a_gradient_that_is_not_finite_is_named(tmp_path):
    def poison(trainer):
        names = [spec.name for spec in trainer.axis.specs]
        param = trainer.axis.params[names.index("conv1.weight") if "conv1.weight" in names else 0]
        param.register_hook(lambda g: g * float("nan"))

    with pytest.raises(NonFinite, match=r"step 0 .*the gradient of \S+ on worker \d is not finite.*optimizer\.lr"):
        trained(tmp_path, True, prepare=poison)


def test_after_a_failure_nothing_more_is_begun():
    transport, begun = Transport(torch.device("cpu")), []

    def work(number, fails=False):
        begun.append(number)
        if fails:
            raise ArithmeticError("lost")
        return []

    futures = [transport.submit(lambda n=n: work(n, fails=n == 1)) for n in range(3)]
    assert transport.wait(futures[0]) == []
    for future in futures[1:]:
        with pytest.raises(ArithmeticError, match="lost"):
            transport.wait(future)
    assert begun == [0, 1]


def test_a_failure_reaches_whoever_starts_the_next_collective():
    """Others may still be inside the collectives of the exchange that has failed here."""
    comm, begun = Comm(2), []
    comm.transport = Transport(comm.device)

    def fail():
        raise ArithmeticError("lost")

    comm.transport.submit(fail)
    with pytest.raises(ArithmeticError, match="lost"):
        comm._run(lambda: begun.append("collective"))
    assert not begun


def test_a_norm_over_all_tensors_is_not_cut_into_buckets(tmp_path):
    clip = ["compressor=dgc", "compressor.clip=0.1", "optimizer.momentum=0.9"]
    assert len(trained(tmp_path, True, *clip).exchange.buckets) == 1


def test_what_it_was_given_is_not_kept():
    transport, x = Transport(torch.device("cpu")), torch.zeros(3)
    kept = weakref.ref(x)
    future = transport.submit(lambda: [torch.ones(1)], [x])
    result = weakref.ref(transport.wait(future)[0])
    del x, future
    transport.wait(transport.submit(lambda: []))  # the thread has gone on
    assert kept() is None and result() is None
    transport.close()
    transport._thread.join(5)
    assert not transport._thread.is_alive()


def test_other_threads_wait_before_they_start_a_collective():
    comm, gate, order = Comm(2), threading.Event(), []
    comm.transport = Transport(comm.device)
    comm.transport.submit(lambda: (gate.wait(5) and order.append("exchange")) or [])
    threading.Timer(0.05, gate.set).start()
    comm._run(lambda: None)
    order.append("main")
    assert order == ["exchange", "main"]


def test_a_lone_worker_has_no_hooks_and_its_last_gradients_make_room_for_the_new(tmp_path):
    trainer = Trainer(RunConfig.from_dict(composed.cfg(*TINY)), Comm(1), RunFolder(tmp_path))
    assert not any(param._post_accumulate_grad_hooks for param in trainer.axis.params)
    trainer.begin_epoch()
    trainer.train_step()
    last = [weakref.ref(gradient_W) for gradient_W in trainer.axis.gradients_W]
    alive = []
    loss = trainer.task.loss

    def looked(*args):
        alive.append(sum(ref() is not None for ref in last))
        return loss(*args)

    trainer.task.loss = looked
    trainer.train_step()
    assert alive == [0]


@pytest.mark.parametrize("overrides", [["clip_norm=1"], ["sync=local_sgd"], ["comm.overlap=false"]], ids=" ".join)
def test_no_hooks_where_no_bucket_leaves_early(tmp_path, overrides):
    """Nor would one in processes of their own, for which the clock of four workers in one process notes it."""
    hooked, plain = (
        Trainer(RunConfig.from_dict(composed.cfg(*TINY, *typed)), Comm(4), RunFolder(tmp_path))
        for typed in ([], overrides)
    )
    assert all(param._post_accumulate_grad_hooks for param in hooked.axis.params)
    assert not any(param._post_accumulate_grad_hooks for param in plain.axis.params)


@pytest.mark.parametrize(("compressor", "buckets"), [("bf16", 3), ("none", 3), ("signsgd", 2)])
def test_casts_fill_a_bucket_by_gradients_as_the_dense_exchange_does(compressor, buckets):
    """12 tensors of 4 MB: 1 MB, then 25 MB of gradients; of signs all the rest is less than 25 MB."""
    specs = [TensorSpec(f"w{i}", (1024, 1024)) for i in range(12)]
    cast = helpers.compressor(compressor).compressor
    options = ExchangeOptions()
    sending = SendOptions(bucket_mb=options.bucket_mb, gradient_mb=options.gradient_mb)
    exchange = Exchange(cast, specs, Ladder("", ()), Comm(2), torch.zeros(1), sending)
    assert [len(members) for members in exchange.members] == ([1, 7, 4] if buckets == 3 else [8, 4])
