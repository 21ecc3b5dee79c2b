"""What runs on a GPU alone, without one: glue of kernels, streams, graphs, and the scripts that measure.

Kernels compute nothing here: their launches are checked, and all memory is zeros. What they compute is tested in
`triton`.
"""

import contextlib

import pytest
import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.conformance.subject import LATE, Setup, levels_of
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from scripts.gpu import exchange
from tests.kit import composed
from tests.kit.helpers import yaml_names
from tests.kit.no_driver import cuda

SPECS = [  # tensors of one shape, a vector, tensors of several slices
    TensorSpec("a", (32, 16, 3, 3)),
    TensorSpec("b", (32, 16, 3, 3)),
    TensorSpec("bias", (32,)),
    TensorSpec("head", (70, 90)),
    TensorSpec("tail", (9000,)),
]
NAMES = [*yaml_names("compressor"), "topk:chunk=64"]
ON_HOST = {"atomo", "demo", "dion2", "gradiveq", "none"}  # without kernels of their own


def given() -> list[torch.Tensor]:
    return [torch.randn(1, *spec.shape, device="cuda") for spec in SPECS]


@pytest.mark.parametrize("name", NAMES)
def test_every_exchange_is_launched_captured_and_replayed(name):
    with torch.no_grad(), cuda(interpreted=False) as driver:
        arm = exchange.Arm(name, SPECS, given(), replays=True)
        with arm.graphs.training():
            for _ in range(4 * arm.setup.compressor.traits.cycle + 2):  # each turn is eager three times, then captured
                arm.refill()
                updates = arm()
        assert [update.device.type for update in updates] == ["cuda"] * len(SPECS)
        assert driver.captured == arm.graphs.captures * arm.setup.compressor.traits.cycle
        assert bool(driver.launched) == (name not in ON_HOST)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", NAMES)
def test_every_level_is_launched(name):
    make = exchange.maker(name)
    with torch.no_grad(), cuda(interpreted=False):
        for level in levels_of(make, more=True):
            for workers in (1, 2):
                setup = Setup(make(), level, workers=workers, specs=SPECS, dtype=torch.float32, device="cuda")
                xs_W = [torch.randn(workers, *spec.shape, device="cuda") for spec in SPECS]
                setup.exchange.unread(xs_W, StepInfo(setup.plan, 0, 0.1, LATE))


TINY = [
    *("dataset=synthetic", "dataset.size=8", "epochs=1", "dataset.train_size=48", "dataset.test_size=8"),
    *("batch_size=4", "comm.bucket_cap_mb=0.001", "model._target_=tests.kit.models.Plain", "~model.depth"),
]
RUNS = [
    [],
    ["workers_at_once=2", "optimizer=adamw", "clip_norm=1", "measure.norms=true"],
    ["compressor=powersgd", "compressor.min_compression_rate=0", "adaptive=accordion", "deterministic=true"],
    ["sync=local_sgd", "sync.period=2", "precision=float16"],
    ["compressor=topk", "precision=bfloat16", "channels_last=true", "micro_batch_size=2"],
    ["graphs=false", "bn=local", "sync=gossip"],
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("overrides", RUNS, ids=" ".join)
def test_an_epoch_is_trained_and_evaluated(tmp_path, overrides):
    with cuda(kernels=False) as driver:
        config = RunConfig.from_dict(composed.cfg(*TINY, *overrides))
        trainer = Trainer(config, Comm(2, device="cuda"), RunFolder(tmp_path))
        told: list[str] = []
        trainer.step.replayed.tell = told.append
        with contextlib.closing(trainer.progress), trainer.step.graphs.training():
            trainer.runner.preload()
            trainer.progress.begin(trainer.position.steps_left, 0)
            trainer.begin_epoch()
            for _ in range(6):
                trainer.train_step()
            trainer.end_epoch()
        assert not told
        assert bool(driver.captured) == (config.graphs is not False)
        assert {x.device.type for x in trainer.axis.params} == {"cuda"}
