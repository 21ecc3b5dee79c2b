"""Where files are found, whether they are the originals, and what a sweep without them says."""

import hashlib
import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from accordion_bench.cli import sweep
from accordion_bench.datasets import fetch
from accordion_bench.datasets.cifar import Cifar
from accordion_bench.options.checks import ConfigError
from tests.datasets.test_images import SHARED, write_cifar100

NAMES = ["train.txt", "*valid*"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "_failed", {})
    return tmp_path / "cache" / "accordion_bench" / "md5"


def test_one_level_too_deep_or_too_high(tmp_path, monkeypatch):
    folder = tmp_path / "x" / "data" / "words"
    folder.mkdir(parents=True)
    for name in ("train.txt", "the.valid.txt"):
        (folder / name).touch()
    for root in (folder.parent, folder, folder.parent.parent):
        assert fetch.find(str(root), "words", NAMES) == folder
    monkeypatch.chdir(folder)
    assert fetch.find(".", "words", NAMES) == Path()
    assert fetch.find(str(tmp_path), "words", NAMES) is None  # two levels
    assert fetch.find(str(folder), "other", NAMES) is None
    assert fetch.find(str(folder.parent), "words", [*NAMES, "test.txt"]) is None


def test_files_are_read_once(tmp_path, own_cache, monkeypatch):
    file = tmp_path / "a"
    file.write_bytes(b"words")
    published = {"a": hashlib.md5(b"words").hexdigest()}
    read, original = [], fetch._md5
    monkeypatch.setattr(fetch, "_md5", lambda path: read.append(path) or original(path))
    for _ in range(2):
        fetch.refuse_changed(tmp_path, published)
    assert read == [file]
    (cache,) = own_cache.iterdir()
    cache.write_text("[1]")  # damaged
    fetch.refuse_changed(tmp_path, published)
    assert len(read) == 2 and list(json.loads(cache.read_text())) == ["a"]
    file.write_bytes(b"other")
    with pytest.raises(
        ConfigError, match=r"must hold the original files, got .*/a, whose md5 is .*dataset\.check=false"
    ):
        fetch.refuse_changed(tmp_path, published)


def test_no_cache_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"words")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    fetch.refuse_changed(tmp_path, {"a": hashlib.md5(b"words").hexdigest()})


def test_images_that_are_no_originals(tmp_path):
    write_cifar100(tmp_path)
    with pytest.raises(ConfigError, match=r"dataset\.check=false"):
        Cifar(classes=100).prepare(str(tmp_path))
    Cifar(classes=100, check=False).prepare(str(tmp_path))


@pytest.mark.skipif(not (SHARED / "cifar-10-batches-py").is_dir(), reason="no CIFAR-10 beside the checkout")
@pytest.mark.parametrize("root", [SHARED, SHARED / "cifar-10-batches-py", SHARED.parent])
def test_real_cifar10_is_the_original(root):
    Cifar(classes=10).prepare(str(root))


def test_a_sweep_without_data_asks_once(tmp_path, capsys, monkeypatch):
    """Before its first cell; where the cells choose the data themselves, the first one asks for all."""
    asked = []

    def unreachable() -> None:
        asked.append(1)
        raise OSError

    get = lambda: fetch.ensure(str(tmp_path), "words", NAMES, unreachable, 1.0)  # noqa: E731
    monkeypatch.setattr(Cifar, "prepare", lambda self, root: get())
    node = {"_target_": "accordion_bench.datasets.cifar.Cifar", "classes": 10}
    paths = {"data": str(tmp_path), "runs": str(tmp_path)}
    launcher = {"launcher": {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"}}
    config = OmegaConf.create({"dataset": node, "paths": paths, "hydra": launcher, "resume_sweep": False})
    monkeypatch.setattr(sweep, "current", sweep.current)
    with pytest.raises(SystemExit) as ended:
        sweep.Sweep().on_multirun_start(config)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.endswith("(nothing has been run)") and "paths.data must hold" in line
    with pytest.raises(ConfigError, match="must hold the folder words"):
        get()
    assert asked == [1]
    for changed in ({"resume_sweep": True}, {"dataset": {"_target_": "accordion_bench.datasets.images.Digits"}}):
        sweep.Sweep().on_multirun_start(OmegaConf.merge(config, changed))
    monkeypatch.setattr(sweep, "needs_data", False)
    sweep.Sweep().on_multirun_start(config)
