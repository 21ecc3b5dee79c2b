"""What else of a step is other on a device: buckets, the order of an epoch, optimizers, copies for checkpoints."""

import copy
import functools
import inspect
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accordion_bench.adaptive.distributions import Histogram
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.powersgd import PowerSGD
from accordion_bench.compressors.probe import Buckets, bucket_table, lengths
from accordion_bench.config.components import build_optimizer
from accordion_bench.conformance.pretend_device import pretended
from accordion_bench.datasets.images import ImageData
from accordion_bench.datasets.sampler import Sampler, Sharding
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.exchange.overlap import ExchangeOptions
from accordion_bench.exchange.partition import MB
from accordion_bench.optimizers.elementwise import SGDPlusGradient
from accordion_bench.optimizers.inner import fused, without_dynamo
from accordion_bench.plan import BucketMoments, CoordinateHistogram, Ladder, PooledMoments, TensorSpec
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.signals.statistics import BucketStatistics
from accordion_bench.training.trainer import Trainer
from scripts.launches import resnet50
from tests.kit import composed, local

TINY = [
    *("model._target_=tests.kit.models.Plain", "~model.depth", "dataset=synthetic", "dataset.size=8", "epochs=1"),
    *("dataset.train_size=96", "dataset.test_size=8", "batch_size=4"),
]
CUDA, META, CPU = torch.device("cuda"), torch.device("meta"), torch.device("cpu")


class Operations(TorchDispatchMode):
    """Counts them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class TestBuckets:
    @functools.cached_property
    def specs(self) -> list[TensorSpec]:
        return resnet50()

    def exchange(self, device, options, compressor=None) -> Exchange:
        like, limits = (
            torch.zeros(1, device=device),
            {"bucket_mb": options.bucket_mb, "gradient_mb": options.gradient_mb},
        )
        sending, ladder = SendOptions(**limits), Ladder("rank", (2,), (1, 2))
        return Exchange(compressor or PowerSGD(), self.specs, ladder, Comm(4), like, sending)

    def test_on_a_device_they_close_at_25_mb_of_gradients(self):
        """By messages alone PowerSGD on ResNet-50 has one, which leaves when all is computed."""
        on_cpu, on_device = (self.exchange(device, ExchangeOptions()) for device in ("cpu", "meta"))
        sizes = [4 * sum(self.specs[i].numel for i in members) / MB for members in on_device.members]
        assert len(on_cpu.buckets) == 1 and len(on_device.buckets) == 4
        assert all(size >= 25 for size in sizes[:-1])
        largest = max(4 * spec.numel / MB for spec in self.specs)
        assert all(size < 25 + largest for size in sizes)
        assert sorted(i for members in on_device.members for i in members) == list(range(len(self.specs)))

    def test_a_number_that_is_typed_counts_alone(self):
        assert len(self.exchange("meta", ExchangeOptions(bucket_cap_mb=1000)).buckets) == 1
        one, other = (self.exchange(device, ExchangeOptions(bucket_cap_mb=0.5)) for device in ("cpu", "meta"))
        assert one.buckets == other.buckets

    def test_what_needs_all_tensors_has_one_bucket(self):
        compressor = PowerSGD()
        compressor.traits = replace(compressor.traits, grouping="all")
        assert len(self.exchange("meta", ExchangeOptions(), compressor).buckets) == 1


class TestOrder:
    @pytest.mark.parametrize("sharding", ["reshuffled", "static", "consecutive"])
    def test_it_goes_to_the_device_once_in_an_epoch(self, sharding):
        sampler = Sampler(100, 4, 0, Sharding(sharding), device=META)
        sampler.begin_epoch(1, 8)
        with Operations() as operations:
            batches = [sampler.batch(worker, step) for worker in range(4) for step in range(sampler.steps(8))]
        assert {batch.device for batch in batches} == {META}
        assert not operations.counts.keys() & {"_to_copy", "copy_", "arange", "randperm"}

    def test_images_say_where_they_are_indexed(self):
        images = torch.zeros(4, 1, 2, 2), torch.zeros(4, dtype=torch.int64)
        for device in (CPU, META):
            assert ImageData(images, images, [0.0], [1.0], 0, False, 0, device).indexed_on == device


class TestOptimizers:
    def test_fused_where_torch_offers_it_and_on_a_gpu_alone(self):
        for cls in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
            captured = {"capturable": True} if "capturable" in inspect.signature(cls).parameters else {}
            assert fused(without_dynamo(cls), CUDA).keywords == {"fused": True, **captured}
            assert isinstance(fused(without_dynamo(cls), CPU), type)
        for cls in (SGDPlusGradient, torch.optim.Adamax):
            assert isinstance(fused(without_dynamo(cls), CUDA), type)

    def test_on_a_cpu_nothing_has_changed(self):
        params = [torch.nn.Parameter(torch.zeros(3))]
        node = {"_target_": "torch.optim.AdamW", "lr": 0.1}
        assert not build_optimizer(node, PowerSGD(), params, {}).defaults["fused"]

    @pytest.mark.parametrize("sync", ["every_step", "local_sgd"])
    def test_a_fused_one_goes_on_from_its_checkpoint(self, tmp_path, monkeypatch, sync):
        """torch's CPU has such kernels, too. Their count of steps lives on the device."""
        components = "accordion_bench.config.components"
        monkeypatch.setattr(f"{components}.fused", lambda cls, device: fused(cls, CUDA))

        def begun():
            trainer = local.trainer_for(tmp_path, f"sync={sync}", "optimizer=adamw")
            trainer.begin_epoch()
            return trainer

        whole, first, rest = begun(), begun(), begun()
        assert whole.inner.common.defaults["fused"]
        for _ in range(4):
            whole.train_step()
        for _ in range(2):
            first.train_step()
        for owner, same in zip(first.owners.of_all[:3], rest.owners.of_all[:3], strict=True):
            same.load_state_dict(copy.deepcopy(owner.state_dict()))
        for row in range(4):
            rest.inner.load_worker_state(row, copy.deepcopy(first.inner.worker_state(row)))
        rest.position.step = rest.position.step_in_epoch = 2
        rest.step.feed.begin_epoch(0, range(2, 6))
        for _ in range(2):
            rest.train_step()
        for x, y in zip(rest.axis.params, whole.axis.params, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize(
    "overrides",
    [
        ["compressor=powersgd", "compressor.min_compression_rate=0", "measure.norms=true"],
        ["sync=overlap_local_sgd", "sync.period=2", "compressor=topk"],
        ["sync=hierarchical", "sync.groups=[[2,2],[4,4]]", "optimizer=adamw"],
    ],
    ids=" ".join,
)
def test_checkpoints_copy_nothing_where_it_is(tmp_path, overrides):
    """A copy on a GPU would be memory that a run of its size does not have."""
    trainer = local.trainer_for(tmp_path, *overrides)
    trainer.begin_epoch()
    for _ in range(3):
        trainer.train_step()
    trainer.sync.land()
    with Operations() as operations:
        states = [owner.state_dict() for owner in trainer.owners.of_all]
        states += [owner.worker_state(row) for owner in trainer.owners.of_each for row in range(4)]
    assert operations.counts["_to_copy"] > 10 and operations.counts["clone"] == 0
    assert trainer.axis.state_dict()["parameters"]["a.weight"].data_ptr() != trainer.axis.shared[0].data_ptr()


class TestLoop:
    """The whole loop on a device that is not there."""

    def trainer(self, tmp_path, *overrides, device="meta") -> Trainer:
        config = RunConfig.from_dict(composed.cfg(*TINY, *overrides))
        trainer = Trainer(config, Comm(2, device=device), RunFolder(tmp_path))
        trainer.begin_epoch()
        return trainer

    @pytest.mark.parametrize(
        "overrides",
        [
            [],
            ["compressor=powersgd", "compressor.min_compression_rate=0", "comm.bucket_cap_mb=0.001"],
            ["clip_norm=1", "measure.norms=true", "optimizer=adamw"],
        ],
        ids=" ".join,
    )
    def test_a_step_waits_once_and_computes_the_same(self, tmp_path, overrides):
        on_cpu = self.trainer(tmp_path, *overrides, device="cpu")
        with pretended() as counts:
            on_device = self.trainer(tmp_path, *overrides)
            for step in range(4):
                counts.reset()
                on_device.train_step()
                on_cpu.train_step()
                if step:  # the first one draws queries
                    assert counts.waits == {"tolist": 1} and counts.uploads == 0
            for ours, theirs in zip(on_device.axis.shared, on_cpu.axis.shared, strict=True):
                torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-6)

    def test_a_local_step_waits_once_and_an_averaging_once_more(self, tmp_path):
        with pretended() as counts:
            trainer = self.trainer(tmp_path, "sync=local_sgd", "sync.period=3", "micro_batch_size=2")
            for step in range(6):
                counts.reset()
                trainer.train_step()
                assert counts.waits == {"tolist": 1 + (step % 3 == 2)} and counts.uploads == 0

    def test_checkpoints_leave_the_device_without_a_copy_there(self, tmp_path):
        options = ["compressor=efsignsgd", "optimizer=adamw", "measure.norms=true"]
        with pretended() as counts:
            trainer, rest = self.trainer(tmp_path, *options), self.trainer(tmp_path, *options)
            trainer.train_step()
            counts.reset()
            owners = trainer.owners
            states = [owner.state_dict() for owner in owners.of_all]
            rows = [[owner.worker_state(row) for row in range(2)] for owner in owners.of_each]
            assert not counts.launches and counts.waits.keys() == {"copy to the host"}
            assert all(x.device == CPU for x in tree_leaves((states, rows)) if isinstance(x, torch.Tensor))
            states, rows = copy.deepcopy((states, rows))  # as a file does
            for owner, state in zip(rest.owners.of_all, states, strict=True):
                owner.load_state_dict(state)
            for owner, row_states in zip(rest.owners.of_each, rows, strict=True):
                for row, state in enumerate(row_states):
                    owner.load_worker_state(row, state)
            rest.step.feed.begin_epoch(0, range(1, 12))
            for _ in range(2):
                trainer.train_step()
                rest.train_step()
            for ours, theirs in zip(rest.axis.shared, trainer.axis.shared, strict=True):
                assert torch.equal(ours.cpu(), theirs.cpu())


class TestStatistics:
    def buckets(self, device="cpu") -> list[list[Buckets]]:
        def of(worker, count, length):
            r = torch.rand(count, length, generator=torch.Generator().manual_seed(worker), dtype=torch.float64) * 2 - 1
            exists = torch.ones_like(r, dtype=torch.bool)
            exists[-1, 1:] = False
            return Buckets(r.norm(dim=1).float(), r * exists, exists)

        made = [[of(worker, 5, 7), of(worker + 9, 3, 4), of(worker + 5, 2, 7)] for worker in range(2)]
        return [[Buckets(*(x.to(device) for x in own)) for own in row] for row in made]

    def test_they_come_to_the_cpu_in_one_copy_of_each_kind(self, monkeypatch):
        needs = frozenset([PooledMoments(), BucketMoments(4, "squared"), CoordinateHistogram("squared")])
        copies, cpu = [], torch.Tensor.cpu
        monkeypatch.setattr(torch.Tensor, "cpu", lambda self: (copies.append(self.shape), cpu(self))[1])
        statistics = BucketStatistics(Comm(2))
        statistics.add(needs, self.buckets())
        assert copies == [(2, 10, 4), (2, 3, 4096)]

    def test_the_device_counts_without_being_waited_for(self):
        """`meta` has no numbers: whatever asks for one fails."""
        for own in self.buckets("meta"):
            assert bucket_table(own).shape == (10, 4)
            for norms, r, exists in own:
                assert Histogram.of(r, norms[:, None] * exists).arrays().shape == (3, 4096)

    def test_lengths_are_those_of_all_tensors(self):
        assert lengths(self.buckets()[0]) == {1, 4, 7} and lengths([]) == set()
