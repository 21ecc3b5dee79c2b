"""Muon in runs: what the start tells, with schemes and compressors, one optimizer for each replica."""

import copy
import functools
import subprocess
import sys

import pytest

from accordion_bench import train
from accordion_bench.cli import smoke
from accordion_bench.optimizers.inner import parameter_kinds, without_dynamo
from accordion_bench.optimizers.muon import Muon
from tests.kit import composed, local, tiny
from tests.kit.helpers import changed_options, compressor, yaml_names
from tests.kit.local import deviation, trained

MUON, EXACT = "optimizer=muon", "optimizer.ns_precision=null"


def test_the_split_is_told_once_at_the_start(tmp_path, capsys):
    train.run(composed.cfg(MUON, "dataset.subset=32", "epochs=1", "comm=simulated", f"paths.runs={tmp_path}"))
    told = [line for line in capsys.readouterr().out.splitlines() if "Muon" in line]
    assert told == [
        "Muon takes 7 matrices (73,872 parameters), AdamW the rest (1,130 parameters): fc.weight, 15 vectors"
    ]


def test_it_learns(tmp_path):
    """Digits as they are typed; chance is 0.1."""
    options = ["dataset.subset=512", "dataset.limit_eval=128", "epochs=4", "schedule.warmup_epochs=1"]
    assert train.run(composed.cfg(MUON, *options, "comm=simulated", f"paths.runs={tmp_path}")) > 0.7


def test_workers_of_one_gradient_are_one_worker(tmp_path):
    """Averaged parameters and buffers of local steps of length 1 are those of synchronous training where A = 1."""
    plain = trained(tmp_path, MUON, EXACT, workers=1)
    alone = trained(tmp_path, MUON, EXACT, "sync=local_sgd", "sync.period=1", "sync.buffers=average", workers=1)
    assert deviation(alone.axis.shared, plain.axis.shared) < 1e-14


def test_replicas_inherit_the_buffers_at_the_switch_and_average_them(tmp_path):
    """Momenta of matrices, both moments of the rest; counts of steps stay."""
    buffers = []

    def watch(trainer):
        if trainer.position.step == 4:
            buffers.append([[copy.deepcopy(o.state[x]) for x in own] for o, own in _replicas(trainer)])

    typed = [MUON, EXACT, "sync=local_sgd", "sync.period=2", "sync.switch_step=2", "sync.buffers=average"]
    run = trained(tmp_path, *typed, "epochs=1", watch=watch)
    (of_replicas,) = buffers
    names = [spec.name for spec in run.axis.specs]
    kept = {name: set(state) for name, state in zip(names, of_replicas[0], strict=True)}
    assert kept["a.weight"] == {"momentum_buffer"}
    assert kept["a.bias"] == kept["b.weight"] == {"step", "exp_avg", "exp_avg_sq"}
    for states in of_replicas[1:]:
        for first, state in zip(of_replicas[0], states, strict=True):
            assert all(bool((first[key] == state[key]).all()) for key in first)
    assert float(of_replicas[0][names.index("a.bias")]["step"]) == 4


def _replicas(trainer):
    return zip(trainer.inner.of_replicas, trainer.axis.replicas, strict=True)


def takes_the_step(name: str) -> bool:
    """Whether a compressor leaves the optimizer no gradient, or not all of them."""
    return bool(compressor(name).compressor.traits.optimizer.owns)


@pytest.mark.parametrize("name", yaml_names("compressor"))
def test_every_compressor_runs_or_is_refused_because_it_takes_the_step(name):
    said = smoke.refusal(composed.cfg(f"compressor={name}", MUON), 4)
    if takes_the_step(name):
        fits = compressor(name).compressor.traits.optimizer.fits[0].lower()
        assert said is not None and f"optimizer must be {fits}, because this compressor takes the step " in said
    else:
        assert said is None


@pytest.mark.parametrize("sync", yaml_names("sync"))
def test_every_scheme_runs_or_is_refused_because_it_takes_the_step(sync):
    """With four workers, and groups of two of them."""
    groups = ["sync.groups=[[4,2],[16,4]]"] if sync == "hierarchical" else []
    said = smoke.refusal(composed.cfg(f"sync={sync}", MUON, "schedule.milestones=[30]", *groups), 4)
    if changed_options("sync", sync) == ["optimizer=adamw"]:
        assert said is not None and f"optimizer must be adamw, because sync={sync} takes the step itself" in said
    else:
        assert said is None


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", [name for name in yaml_names("compressor") if not takes_the_step(name)])
@pytest.mark.parametrize("sync", ["every_step", "diloco"])
def test_compressors_train(tmp_path, name, sync):
    typed = [f"compressor={name}", MUON, f"sync={sync}", *(["sync.period=2"] if sync == "diloco" else [])]
    cfg = tiny.cfg(tmp_path, *typed, "epochs=1")
    if smoke.refusal(cfg, 4) is None:
        train.run(cfg)
        assert tiny.only(tmp_path).joinpath("summary.json").is_file()
    else:
        assert sync == "diloco"  # whose own rule it is


def test_a_step_does_not_import_torchs_compiler():
    """Four seconds of the five that a run may take to its first step."""
    code = """
import sys, torch
from accordion_bench.optimizers.muon import Muon
from accordion_bench.optimizers.inner import without_dynamo
params = [torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4))]
optimizer = without_dynamo(Muon)(params)
for x in params: x.grad = torch.ones_like(x)
optimizer.step()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_one_optimizer_or_one_for_each_replica(tmp_path):
    """Local steps of Muon in four workers are those of four optimizers in a loop by hand."""
    options = [MUON, EXACT, "optimizer.nesterov=true", "sync=local_sgd", "sync.period=3", "epochs=1"]
    run = local.trainer_for(tmp_path, *options)

    def average(taken, lr, models, optimizers):
        if taken % 3 == 0:
            local.assign(models, local.mean(models))

    options = {key: value for key, value in run.config.optimizer.items() if key not in ("_target_", "lr")}
    kinds = list(parameter_kinds(run.axis.model).values())
    expected = local.twin(run, average, functools.partial(without_dynamo(Muon), kinds=kinds), **options)
    local.fitted(run)
    assert deviation(run.axis.shared, local.mean(expected)) < 1e-13
