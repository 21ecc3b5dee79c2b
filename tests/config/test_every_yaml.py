"""Every YAML of the groups that have no contract of their own trains; the bar and the summary say what they should."""

import importlib.util
import io
import json

import numpy as np
import pytest
import torch

from accordion_bench import train
from accordion_bench.config.components import build_components, with_counts
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training import progress
from tests.kit import composed
from tests.kit.helpers import changed_options, yaml_names
from tests.kit.own_data import huggingface_counts, written_tokens
from tests.kit.paths import SHARED
from tests.kit.picture_files import folder

TINY = [
    "dataset=synthetic",
    "dataset.size=8",
    "dataset.train_size=64",
    "dataset.test_size=16",
    "batch_size=8",
    "epochs=2",
    "comm=simulated",
]
GROUPS = {"optimizer": [], "schedule": [], "sync": [], "tracker": []}
CASES = [(group, name, extra) for group, extra in GROUPS.items() for name in yaml_names(group)]


def marked(case: tuple):
    """Wandb's own process takes most of a trial's time; tests/trackers has one in the default suite.

    MLflow is an extra that the development environment leaves out; tests/trackers has a client that is pretended.
    """
    group, name, _ = case
    without = pytest.mark.skipif(name == "mlflow" and not importlib.util.find_spec("mlflow"), reason="no mlflow here")
    return pytest.param(*case, id=f"{group}={name}", marks=[pytest.mark.slow] if name == "wandb" else [without])


def finished(tmp_path, *overrides) -> RunFolder:
    train.run(composed.cfg(*TINY, f"paths.runs={tmp_path}", *overrides))
    (folder,) = tmp_path.iterdir()
    return RunFolder(folder)


@pytest.mark.parametrize("group, name, extra", [marked(case) for case in CASES])
def test_trains(tmp_path, group, name, extra):
    beside = changed_options(group, name) if group == "sync" else []
    folder = finished(tmp_path, *extra, *beside, f"{group}={name}")
    assert folder.done and len(folder.read_metrics()) == 2
    if name == "wandb":  # offline: everything is inside the run folder
        assert list((folder.path / "wandb").glob("offline-run-*/*.wandb"))
    if name == "tensorboard":
        assert list((folder.path / "tensorboard").glob("events.*"))


def test_every_dataset_says_what_a_model_must_accept(tmp_path, monkeypatch):
    """Those that count what is in files do so where there are some: pictures, and arrays beside them."""
    folder(tmp_path, {"a": 3, "b": 3})
    np.savez(tmp_path / "own.npz", x=np.zeros((8, 8, 8), np.uint8), y=np.arange(8) % 2)
    written_tokens(tmp_path)
    huggingface_counts(monkeypatch)
    for name in yaml_names("dataset"):
        config = RunConfig.from_dict(composed.cfg(f"dataset={name}", f"paths.data={tmp_path}"))
        dataset = build_components(with_counts(config), workers=4).dataset
        of_text = {"text": ["vocabulary"], "tokens": ["vocabulary"]}
        model = {"images": ["in_channels", "num_classes"], **of_text}[dataset.task]
        assert list(dataset.model_arguments()) == model and min(dataset.model_arguments().values()) >= 1


def test_digits_are_real_and_split_in_order():
    data = build_components(RunConfig.from_dict(composed.cfg()), 1).dataset.load("nowhere", 0, torch.device("cpu"))
    assert (data.train_size, data.test_size) == (1437, 360)
    assert data.train_images.shape == (1437, 1, 8, 8) and int(data.train_images.max()) == 16
    assert sorted(set(data.test_labels.tolist())) == list(range(10))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar_on_a_terminal(tmp_path, monkeypatch):
    """Loss, accuracy, bytes and time left."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)
    finished(tmp_path, "epochs=3")
    shown = terminal.getvalue()
    assert all(word in shown for word in ("loss=", "accuracy=", "sent=", "step/s"))
    assert "<" in shown  # tqdm's [elapsed<remaining, ...]


def test_quiet_elsewhere(tmp_path, capsys):
    finished(tmp_path)
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    assert lines[-1] == str(next(tmp_path.iterdir()))
    for word in ("accuracy", "payload", "wire", "time", "dense"):
        assert any(word in line for line in lines)
    json.loads((next(tmp_path.iterdir()) / "summary.json").read_text())


@pytest.mark.skipif(not (SHARED / "cifar-10-batches-py").is_dir(), reason="no CIFAR-10 beside the checkout")
def test_real_cifar10(tmp_path):
    overrides = [f"paths.data={SHARED}", "dataset.subset=64", "dataset.limit_eval=32", "batch_size=8", "epochs=1"]
    train.run(composed.cfg("dataset=cifar10", "comm=simulated", f"paths.runs={tmp_path}", *overrides))
    (folder,) = tmp_path.iterdir()
    summary = RunFolder(folder).read_json("summary.json")
    assert summary["steps"] == 2 and summary["test_size"] == 32 and summary["parameters"] == 75_290
