"""Folders of pictures of anybody's: any usual layout, counted; what is wrong is said before a run, or in it by name."""

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from accordion_bench import __main__ as command
from accordion_bench import train
from accordion_bench.cli import dry_run
from accordion_bench.datasets import image_folder, pictures
from accordion_bench.datasets.counted import held_out
from accordion_bench.datasets.image_folder import ImageFolder, ImageNet, files_of, parts
from accordion_bench.datasets.pictures import spread
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import composed, tiny
from tests.kit.picture_files import folder

CPU = torch.device("cpu")
TWO = {"a": 10, "b": 6}


def under(part: str, of: dict[str, int] = TWO) -> dict[str, int]:
    return {f"{part}/{name}": count for name, count in of.items()}


def counted(place: Path, **options) -> dict:
    return ImageFolder(workers=0, **options).count(str(place))


# ---- layouts


LAYOUTS = {
    "train, val": ({**under("train"), **under("val", {"a": 2, "b": 3})}, 16, 5, 0),
    "train, test": ({**under("train"), **under("test", {"a": 2, "b": 3})}, 16, 5, 0),
    "train, valid": ({**under("train"), **under("valid", {"a": 2, "b": 3})}, 16, 5, 0),
    "train, validation": ({**under("train"), **under("validation", {"a": 2, "b": 3})}, 16, 5, 0),
    "Training, Testing": ({**under("Training"), **under("Testing", {"a": 2, "b": 3})}, 16, 5, 0),
    "train, val, test": (
        {**under("train"), **under("val", {"a": 1, "b": 3}), **under("test", {"a": 2, "b": 3})},
        16,
        5,
        4,
    ),
    "train alone": (under("train"), 13, 3, 0),
    "folders of classes": (TWO, 13, 3, 0),
    "a folder of one's own around it": ({**under("flowers/train"), **under("flowers/test")}, 16, 16, 0),
    "folders of classes in one folder": (under("flowers"), 13, 3, 0),
    "classes called train, bus": ({"train": 10, "bus": 6}, 13, 3, 0),
    "folders within classes": ({"a/x": 4, "a/y": 6, "b": 6}, 13, 3, 0),
}  # of each: folders, training, evaluation and validation pictures


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, tmp_path):
    """Counted and loaded alike; no picture is in two parts, and none is left out."""
    layout, training, evaluated, chosen_by = LAYOUTS[name]
    place = folder(tmp_path / "data", layout)
    dataset = ImageFolder(workers=0)
    found = dataset.count(str(place))
    shared = {"test_share": 0.2} if training + evaluated == 16 and evaluated == 3 else {}
    assert found == {
        "classes": 2,
        "train_size": training,
        "image_size": 12,
        "fingerprint": found["fingerprint"],
        **shared,
    }
    dataset.prepare(str(place))
    data = dataset.load(str(place), 0, CPU)
    views = data.loader.items
    split = dataset.split(data.train_size, 0)
    assert (data.train_size, data.test_size) == (training + chosen_by, evaluated)
    assert dataset.train_count == training
    assert (0 if split.validation is None else len(split.validation)) == chosen_by
    used = [*map(views.train.path, range(data.train_size)), *map(views.test.path, range(data.test_size))]
    assert sorted(used) == sorted(place.rglob("*.png"))
    if chosen_by:
        own = {views.train.path(i) for i in split.validation.tolist()}
        assert own == {*(place / "val").rglob("*.png")}
        assert {views.train.path(i) for i in split.train.tolist()} == {*(place / "train").rglob("*.png")}
        ((x, y),) = data.validation_batches([split.validation])
        assert x.shape == (4, 3, 12, 12) and sorted(y.tolist()) == [0, 1, 1, 1]


def test_order_and_classes_are_torchvisions(tmp_path):
    from torchvision.datasets import ImageFolder as Theirs

    place = folder(tmp_path, {"b": 3, "a/y": 2, "a": 2, "a/x/z": 2, "C": 11})
    (tmp_path / "b" / "note.txt").write_text("no picture")
    mine, theirs = files_of(place, place), Theirs(str(place))
    assert [str(mine.path(i)) for i in range(len(mine.labels))] == [path for path, _ in theirs.samples]
    assert mine.labels.tolist() == theirs.targets and image_folder.classes_of(place) == theirs.classes


def test_what_programs_leave_is_no_picture_and_no_class(tmp_path):
    place = folder(tmp_path, {**TWO, "a/.ipynb_checkpoints": 2, ".cache": 1, "__MACOSX/a": 2, "b/@eaDir": 1})
    for name in ("a/._0.png", "a/.DS_Store", "a/Thumbs.db", "b/labels.csv"):
        (place / name).write_bytes(b"\0\1")
    dataset = ImageFolder(workers=0)
    assert dataset.count(str(place))["train_size"] == 13
    dataset.prepare(str(place))


def test_a_folder_that_leads_back_is_read_once(tmp_path):
    place = folder(tmp_path, TWO)
    (place / "a" / "again").symlink_to(place / "a")
    found = files_of(place, place).names.tolist()
    assert len([name for name in found if name.startswith(b"a/")]) == 10


@pytest.mark.parametrize(("link", "to"), [("a/up", "."), ("b/up", "."), ("b/other", "a"), ("c", "a")])
def test_a_folder_of_two_classes_is_refused(link, to, tmp_path):
    """Its pictures would have been of both."""
    place = folder(tmp_path, TWO)
    (place / link).symlink_to((place / to).resolve())
    with pytest.raises(ConfigError, match=r"each folder of pictures in one class, got .* in a and [bc]; remove"):
        files_of(place, place)


def test_a_share_of_each_class_is_held_out_by_the_seed():
    labels = np.repeat([0, 1, 2], [50, 5, 2])
    seen = []
    for seed in (0, 0, 1):
        kept, out = held_out(labels, 0.2, seed)
        assert (
            sorted([*kept, *out]) == list(range(57)) and kept.tolist() == sorted(kept) and out.tolist() == sorted(out)
        )
        assert np.bincount(labels[out]).tolist() == [10, 1, 1]
        seen.append(out.tolist())
    assert seen[0] == seen[1] != seen[2]
    assert np.bincount(labels[held_out(labels, 0.99, 0)[0]]).tolist() == [1, 1, 1]
    with pytest.raises(ConfigError, match=r"at least 2 pictures of each class .*, got 1 of class 1; add some"):
        held_out(np.array([0, 0, 1]), 0.5, 0)
    with pytest.raises(ConfigError, match=r"got 1 of class white; add some"):
        held_out(np.array([0, 0, 1]), 0.5, 0, ["red", "white"])


def test_the_size_of_images_is_that_of_small_ones(tmp_path):
    folder(tmp_path / "small", TWO, side=20)
    folder(tmp_path / "large", TWO, side=300)
    folder(tmp_path / "small" / "c", {".": 3}, side=90)
    assert counted(tmp_path / "small")["image_size"] == 20
    assert counted(tmp_path / "large")["image_size"] == 224
    assert counted(tmp_path / "large", image_size=64)["image_size"] == 64


def test_spread():
    assert spread(5, 10) == [0, 1, 2, 3, 4] and spread(100, 4) == [0, 25, 50, 75] and spread(0, 4) == []


# ---- what is refused


def refused(place: Path, **options) -> str:
    dataset = ImageFolder(workers=0, **options)
    with pytest.raises(ConfigError) as told:
        dataset.count(str(place))
        dataset.prepare(str(place))
    assert "\n" not in str(told.value) and ";" in str(told.value)
    return str(told.value)


@pytest.mark.parametrize(
    "layout, told",
    [
        (None, r"paths.data must hold pictures in a folder for each class, .*No such file or directory"),
        ({}, "there are no folders in ROOT"),
        ({".": 3}, "there are no folders in ROOT"),
        ({"train": 3, "test": 3}, "there are no folders of classes in ROOT/train"),
        (under("test"), "there is no folder train in ROOT"),
        ({**under("train"), **under("training")}, "train and training both exist"),
        ({"a": 4}, "pictures of at least 2 classes, got ROOT with 1"),
        ({"a": 4, "b": 0}, r"pictures of each class, got ROOT/b without one; .*names of pictures end in .jpg"),
        ({**under("train"), "test/a": 1}, "the same classes in train and test, got b in one only"),
        ({"a": 4, "b": 1}, "at least 2 pictures of each class .* got 1 of class b"),
    ],
)
def test_folders_that_are_none(layout, told, tmp_path):
    root = tmp_path / "data"
    if layout is not None:
        root.mkdir()
        folder(root, layout)
    assert re.search(told.replace("ROOT", re.escape(str(root))), refused(root))


def test_pictures_of_a_contest_without_classes_are_passed_over(tmp_path):
    place = folder(tmp_path, {**under("train"), **under("val"), "test": 5})
    assert parts(place)[1]["validation"] == place / "val"


def test_options_that_would_do_nothing(tmp_path):
    place = folder(tmp_path, {**under("train"), **under("val"), **under("test")})
    assert "dataset.test_share must be null where" in refused(place, test_share=0.1)
    assert "dataset.validation must be null where" in refused(place, validation=0.1)
    with pytest.raises(ConfigError, match="test_share must be a number above 0 and below 1, got 1"):
        ImageFolder(test_share=1)


def test_a_folder_that_may_not_be_read(tmp_path, monkeypatch):
    place, scandir = folder(tmp_path, TWO), os.scandir

    def forbidden(path):
        if str(path).endswith("/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(image_folder.os, "scandir", forbidden)
    assert f"got {place}/b: Permission denied" in refused(place)


@pytest.mark.parametrize("how", ["empty", "dangling", "cut", "text"])
@pytest.mark.parametrize("part", ["train", "test", "val"])
def test_broken_pictures_are_found_before_a_run(how, part, tmp_path):
    place = folder(tmp_path, {**under("train"), **under("test"), **under("val")})
    file = place / part / "b" / "3.png"
    content = file.read_bytes()
    file.unlink()
    if how == "dangling":
        file.symlink_to("nowhere")
    else:
        file.write_bytes({"empty": b"", "cut": content[:-40], "text": b"oops"}[how])
    assert f"got {file}, which is" in refused(place)


def test_many_pictures_are_looked_at_in_part(tmp_path, monkeypatch):
    """What is not looked at is named when it is read."""
    place = folder(tmp_path, TWO)
    monkeypatch.setattr(pictures, "EXAMINED", 4)
    files = files_of(place, place)
    seen = {files.path(i) for i in spread(16, 4)}
    for file in {*map(files.path, range(16))} - seen:
        file.write_bytes(b"")
    ImageFolder(workers=0).prepare(str(place))
    next(iter(seen)).write_bytes(b"")
    assert "which is empty" in refused(place)


def test_other_files_than_those_that_a_run_began_with(tmp_path):
    place = folder(tmp_path, TWO)
    found = counted(place)
    ImageFolder(**{**found, "workers": 0}).prepare(str(place))
    (place / "a" / "0.png").write_bytes((place / "a" / "1.png").read_bytes() + b"\0")
    with pytest.raises(ConfigError, match=f"must be that of .*, got {found['fingerprint']}; restore"):
        ImageFolder(**{**found, "workers": 0}).prepare(str(place))
    (place / "a" / "new.png").write_bytes((place / "a" / "1.png").read_bytes())
    with pytest.raises(
        ConfigError, match=r"dataset.classes and dataset.train_size must be those of .*, got 2 and 13; type"
    ):
        ImageFolder(**{**found, "fingerprint": None, "workers": 0}).prepare(str(place))


def test_imagenet_is_a_folder_of_which_the_numbers_are_known(tmp_path):
    folder(tmp_path / "imagenet", {**under("train"), **under("val")})
    with pytest.raises(ConfigError, match=r"got 1000 and 1281167; type dataset.classes=2 dataset.train_size=16"):
        ImageNet().prepare(str(tmp_path))
    ImageNet(classes=2, train_size=16).prepare(str(tmp_path))


# ---- runs


def typed(place: Path, runs: Path, *overrides: str) -> list[str]:
    """Overrides for a run of a second; later ones replace earlier ones."""
    own = ["dataset=folder", f"paths.data={place}", "model=resnet8", "batch_size=4", "workers=2", "comm=simulated"]
    own += ["epochs=1", "schedule=constant", "schedule.warmup_epochs=0", "optimizer.lr=0.01", f"paths.runs={runs}"]
    return list({item.partition("=")[0]: item for item in (*own, *overrides)}.values())


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return folder(tmp_path_factory.mktemp("pictures"), {**under("train"), **under("val"), **under("test")})


def test_a_run_notes_what_it_has_counted(place, tmp_path):
    """And is found again by what it has noted."""
    arguments = typed(place, tmp_path)
    train.run(composed.cfg(*arguments))
    run = RunFolder(tiny.only(tmp_path))
    saved = yaml.safe_load((run.path / "config.yaml").read_text())["dataset"]
    assert (saved["classes"], saved["train_size"], saved["image_size"], saved["test_share"]) == (2, 16, 12, None)
    assert len(saved["fingerprint"]) == 16
    assert run.read_json("summary.json")["selected_by"] == "validation_accuracy"
    train.run(composed.cfg(*arguments, "resume_sweep=true"))
    assert tiny.only(tmp_path) == run.path  # found again


def test_a_resumed_run_has_the_same_pictures(place, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(place, own)
    train.run(composed.cfg(*typed(own, tmp_path / "runs")))
    run = tiny.only(tmp_path / "runs")
    more = [f"resume={run}", "epochs=2", "dataset=folder"]
    train.run(composed.cfg(*more), command.typed(more))
    assert len(RunFolder(run).read_metrics()) == 2
    os.remove(own / "train" / "a" / "0.png")
    more = [f"resume={run}", "epochs=3"]
    with pytest.raises(ConfigError, match=r"dataset.fingerprint must be that of"):
        train.run(composed.cfg(*more), command.typed(more))


def test_a_dry_run_and_a_sweep_count(place, tmp_path, capsys):
    dry_run.run(composed.cfg(*typed(place, tmp_path)), {})
    assert "resnet8 on folder" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"paths.data must hold pictures"):
        dry_run.run(composed.cfg(*typed(tmp_path / "nowhere", tmp_path)), {})


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_picture_that_goes_away_is_named(workers, place, tmp_path, monkeypatch, capsys):
    """In mid-training, from whichever process reads it; with status 2 and one sentence."""
    own = tmp_path / "own"
    shutil.copytree(place, own)
    begin = Trainer.begin_epoch

    def then_gone(self):
        if self.position.epoch == 1:
            os.remove(own / "train" / "a" / "7.png")
        begin(self)

    monkeypatch.setattr(Trainer, "begin_epoch", then_gone)
    arguments = typed(own, tmp_path / "runs", "epochs=3", f"dataset.workers={workers}")
    monkeypatch.setattr("sys.argv", ["accordion_bench", *arguments])
    with pytest.raises(SystemExit) as end:
        command.main()
    told = capsys.readouterr().err
    assert end.value.code == 2
    gone = f"{own}/train/a/7.png, which no longer exists"
    assert told == f"paths.data must hold pictures that can be read, got {gone}; restore or remove that file\n"
    summary = RunFolder(tiny.only(tmp_path / "runs")).read_json("summary.json")
    assert summary["epoch"] == 0 and "7.png" in summary["reason"]


def test_what_a_run_reads_is_decoded_as_pictures_are(place):
    """By the same words as `pictures.opened`."""
    views = ImageFolder(image_size=8, workers=0, augment=False).load(str(place), 0, CPU).loader.items
    first, label = views[None, 0]
    image = pictures.central(views.test.open(0), 8)
    assert np.array_equal(first.permute(1, 2, 0).numpy(), np.asarray(image)) and label == views.test.labels[0]
