"""What compressors load and compile is loaded before the first step, in no measured time."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import accordion_bench
from accordion_bench import train
from accordion_bench.conformance.subject import from_yaml, gradients, levels_of
from accordion_bench.exchange import runner
from accordion_bench.exchange.runner import preload
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.plan import Ladder
from accordion_bench.tensors import kernels
from accordion_bench.training import trainer
from tests.kit import composed

XS_W = gradients(workers=2, dtype=torch.float32)
WITH_KERNELS = [name for name in yaml_files("compressor") if "cpu" in from_yaml(name)().compressor.description.kernels]

# a process that has loaded nothing yet; it says what is loaded by the preloading, and what by exchanges after it
LOADED = """
import json, sys
import torch
from numba.core.dispatcher import Dispatcher
from accordion_bench.conformance.subject import Setup, from_yaml, levels_of
from tests.exchange.test_preload import XS_W, preloaded

loaded, compile = [], Dispatcher.compile
def noted(self, signature):
    loaded.append(self.py_func.__name__)
    return compile(self, signature)
Dispatcher.compile = noted
preloaded(sys.argv[1])
before = list(loaded)
make = from_yaml(sys.argv[1])
for level in levels_of(make):
    setup = Setup(make(), level, workers=2, dtype=torch.float32)
    for step in range(3):
        setup([x_W.clone() for x_W in XS_W], setup.exchange.start_step + step)
print(json.dumps([before, loaded[len(before):]]))
"""


def preloaded(name: str) -> None:
    """Of a compressor of the YAML files, at all its levels."""
    make = from_yaml(name)
    values = tuple(level for level in levels_of(make) if level is not None)
    preload(make(), Ladder(make().compressor.traits.knob or "", values), {}, XS_W[0])


@pytest.mark.skipif(not kernels.installed(), reason="numba is not installed")
@pytest.mark.sample(21)
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_exchanges_load_nothing_more(name):
    """Tensors of other shapes, three exchanges at each level."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", LOADED, name], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert before and not after


@pytest.mark.parametrize("name", ["onebitadam", "topk"])
def test_the_run_sees_nothing_of_it(name):
    make = from_yaml(name)
    wrapped, drawn = make(), torch.get_rng_state()
    kept = {key: value for key, value in vars(wrapped.compressor).items() if isinstance(value, int | float | str)}
    preload(wrapped, Ladder(wrapped.compressor.traits.knob or "", (wrapped.compressor.level,)), {}, XS_W[0])
    assert torch.equal(torch.get_rng_state(), drawn)
    assert {key: vars(wrapped.compressor)[key] for key in kept} == kept


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """The compressors that are preloaded."""
    names: list[str] = []
    monkeypatch.setattr(runner, "preload", lambda wrapped, *_: names.append(type(wrapped.compressor).__name__))
    return names


def test_a_run_preloads_its_compressor_before_the_first_step(tmp_path, monkeypatch, told):
    """Also where the first steps exchange nothing."""

    def step(self):
        raise RuntimeError("enough")

    monkeypatch.setattr(trainer.Trainer, "train_step", step)
    with pytest.raises(RuntimeError, match="enough"):
        train.run(composed.run(tmp_path, "compressor=bf16", "sync=local_sgd", "epochs=1"))
    assert told == ["Cast"]


def test_so_does_a_loop_of_your_own(tmp_path, told):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with accordion_bench.local(model, optimizer, sync="local_sgd", period=4, compressor="bf16"):
            assert told == ["Cast"]
    finally:
        dist.destroy_process_group()
