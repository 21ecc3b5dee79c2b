"""Which kernels torch computes with: set for a run, and put back after it."""

import os

import pytest
import torch

from accordion_bench import train
from accordion_bench.config.compose import compose
from accordion_bench.options.advice import explain
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes import machine
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, local, tiny
from tests.kit.helpers import changed_options, yaml_names


def chosen() -> dict:
    """All that a run may change."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "filling": torch.utils.deterministic.fill_uninitialized_memory,
        "search": torch.backends.cudnn.benchmark,
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "conv": torch.backends.cudnn.conv.fp32_precision == "tf32",
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_that_repeat_themselves(device, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = chosen()
    with machine.use_deterministic_variables(True), machine.use_deterministic_kernels(True, device):
        now = chosen()
        assert (now["deterministic"], now["warn_only"], now["filling"], now["search"]) == (True, False, False, False)
        assert (now["tf32"], now["conv"], now["workspace"]) == ((False, False), False, ":4096:8")
    assert chosen() == before


def test_on_a_gpu_the_fastest_kernels_else():
    """TF32 is left as torch has it; a processor has nothing to search for."""
    before = chosen()
    with machine.use_deterministic_variables(False), machine.use_deterministic_kernels(False, "cuda"):
        assert chosen() == {**before, "search": True}
    with machine.use_deterministic_variables(False), machine.use_deterministic_kernels(False, "cpu"):
        assert chosen() == before
    assert chosen() == before


def test_they_import_no_compiler(monkeypatch):
    """`torch.use_deterministic_algorithms` does, and takes four seconds of each process for it."""
    monkeypatch.setattr(torch, "use_deterministic_algorithms", pytest.fail)
    with machine.use_deterministic_kernels(True, "cuda"):
        assert torch.are_deterministic_algorithms_enabled()


def test_they_are_put_back_after_an_error():
    before = chosen()
    with pytest.raises(ValueError), machine.use_deterministic_kernels(True, "cuda"):
        raise ValueError
    assert chosen() == before


def test_a_workspace_that_was_exported_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with machine.use_deterministic_variables(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_run_computes_with_them(tmp_path, monkeypatch):
    """From the option to the training step, on a processor, too; and it changes no digit there."""
    seen = []
    forward = tiny.Net.forward

    def watched(self, x):
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        return forward(self, x)

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(tiny.Net, "forward", watched)
    losses = []
    for value, found in (("true", (True, ":4096:8")), ("false", (False, None))):
        seen.clear()
        train.run(composed.run(tmp_path / value, "epochs=1", f"deterministic={value}", "device=cpu"))
        folder = RunFolder(tiny.only(tmp_path / value))
        losses.append(folder.read_metrics()[0]["train_loss"])
        assert set(seen) == {found} and folder.read_config()["deterministic"] is (value == "true")
    assert losses[0] == losses[1]


def test_a_method_without_such_a_kernel_is_told_in_one_sentence():
    with pytest.raises(RuntimeError) as raised, machine.use_deterministic_kernels(True, "cpu"):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
    assert str(explain(raised.value)).startswith("deterministic must be false where torch has no other kernel for put_")
    assert str(explain(raised.value)).endswith("got true; type deterministic=false")


def test_it_is_true_or_false(tmp_path):
    with pytest.raises(ConfigError, match="deterministic must be true or false, got 1; type deterministic=false"):
        composed.validated(compose(["deterministic=1", f"paths.runs={tmp_path}"]))


@pytest.mark.sample(8)
@pytest.mark.parametrize("compressor", yaml_names("compressor"))
def test_every_compressor_computes_with_them_and_no_digit_changes(compressor, tmp_path):
    """On a processor; on a GPU torch refuses a few operations, see `test_a_method_without_such_a_kernel`."""
    sums = []
    for deterministic in (False, True):
        with machine.use_deterministic_kernels(deterministic, "cpu"):
            beside = changed_options("compressor", compressor) or ["optimizer.momentum=0"]
            options = [f"compressor={compressor}", *beside, "model._target_=tests.kit.tiny.Net"]
            trainer = local.trainer_for(tmp_path / str(deterministic), "epochs=1", *options)
            trainer.begin_epoch()
            for _ in range(3):
                trainer.train_step()
        sums.append([float(x.detach().double().sum()) for x in trainer.axis.params])
    assert sums[0] == sums[1]
