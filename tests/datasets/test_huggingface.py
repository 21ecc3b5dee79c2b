"""Images and texts that Hugging Face's `datasets` reads: local files, what it has saved, and its cache offline."""

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from accordion_bench import train
from accordion_bench.datasets import huggingface
from accordion_bench.datasets.huggingface import HuggingFaceImages, HuggingFaceText
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, tiny

CPU = torch.device("cpu")


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface.importlib.util, "find_spec", lambda name: None)
    huggingface.tables.cache_clear()
    for dataset in (HuggingFaceImages(), HuggingFaceText()):
        with pytest.raises(ConfigError, match=re.escape("type pip install 'accordion-bench[hf]'")):
            dataset.count(str(tmp_path))


@pytest.fixture
def hf(monkeypatch, tmp_path):
    """The package, which reaches no network, with a cache of its own."""
    found = pytest.importorskip("datasets")
    huggingface.tables.cache_clear()
    huggingface._texts.cache_clear()
    monkeypatch.setattr(found.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(found.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return found


def picture(i: int) -> Image.Image:
    return Image.fromarray(np.full((12, 9 + i % 5, 3), 8 * i, np.uint8))


def images(hf, numbers, **labels):
    """A table of pictures, whose grey says their number."""
    columns = {"image": [picture(i) for i in numbers], "label": [i % 3 for i in numbers], **labels}
    kinds = {"image": hf.Image(), "label": hf.ClassLabel(names=["a", "b", "c"])}
    return hf.Dataset.from_dict(columns, features=hf.Features(kinds))


def saved(hf, place, how: str, **parts) -> str:
    place.mkdir()
    if how == "saved":
        hf.DatasetDict(parts).save_to_disk(str(place))
    else:
        for name, table in parts.items():
            table.to_parquet(str(place / f"{name}-00000-of-00001.parquet"))
    return str(place)


def loaded(dataset, root: str):
    found = dataset.count(root)
    dataset.prepare(root)
    return found, dataset.load(root, 0, CPU)


@pytest.mark.parametrize("how", ["saved", "parquet"])
def test_pictures_have_their_classes(how, hf, tmp_path):
    root = saved(hf, tmp_path / "data", how, train=images(hf, range(15)), test=images(hf, range(15, 24)))
    found, data = loaded(HuggingFaceImages(workers=0, augment=False), root)
    assert (found["classes"], found["train_size"], found["image_size"]) == (3, 15, 11)
    assert (data.train_size, data.test_size) == (15, 9)
    for files, first in ((data.loader.items.train, 0), (data.loader.items.test, 15)):
        seen = sorted((files.open(i).getpixel((0, 0))[0] // 8, int(files.labels[i])) for i in range(len(files.labels)))
        assert seen == [(i, i % 3) for i in range(first, first + len(seen))]
    ((x, _),) = data.train_batches(0, [torch.arange(15)])
    assert x.shape == (15, 3, 11, 11)


def test_parts_that_lack_and_a_validation_part(hf, tmp_path):
    alone = saved(hf, tmp_path / "alone", "parquet", train=images(hf, range(30)))
    found, data = loaded(HuggingFaceImages(workers=0), alone)
    assert found["test_share"] == 0.2 and (data.train_size, data.test_size) == (24, 6)
    parts = {"train": images(hf, range(15)), "validation": images(hf, range(6)), "test": images(hf, range(15, 24))}
    dataset = HuggingFaceImages(workers=0)
    _, data = loaded(dataset, saved(hf, tmp_path / "three", "parquet", **parts))
    split = dataset.split(data.train_size, 0)
    assert dataset.train_count == 15 and len(split.validation) == 6 and data.train_size == 21
    ((_, y),) = data.validation_batches([split.validation])
    assert sorted(y.tolist()) == sorted(i % 3 for i in range(6))


def test_a_test_without_labels_is_none(hf, tmp_path):
    hidden = images(hf, range(15, 24), label=[-1] * 9)
    found, _ = loaded(
        HuggingFaceImages(workers=0), saved(hf, tmp_path / "d", "parquet", train=images(hf, range(30)), test=hidden)
    )
    assert found["test_share"] == 0.2


@pytest.mark.parametrize("none", [None, "", " ", float("nan")], ids=repr)
def test_a_row_without_a_class_is_refused(none):
    """Columns of a table are sequences by name. A part in which no row has a class is that of a contest."""
    source = huggingface.Origin("owner/name", None, None, "data")
    for part in ("train", "test"):
        with pytest.raises(
            ConfigError, match=f"a class in each row, got row 1 of {part} without; leave out its 2 rows"
        ):
            huggingface.classes_of_rows({"label": ["a", none, "b", none]}, "label", source, part)
    assert huggingface.classes_of_rows({"label": [none] * 3}, "label", source, "test").tolist() == [-1] * 3
    with pytest.raises(ConfigError, match="got row 0 of train"):
        huggingface.classes_of_rows({"label": [none] * 3}, "label", source, "train")
    assert huggingface.classes_of_rows({"label": [0, 2, -1]}, "label", source, "train").tolist() == [0, 2, -1]


def test_other_rows_have_another_fingerprint(hf, tmp_path):
    first = saved(hf, tmp_path / "a", "parquet", train=images(hf, range(15)))
    noted = HuggingFaceImages().count(first)["fingerprint"]
    other = saved(hf, tmp_path / "b", "parquet", train=images(hf, range(15), label=[0, 1, 2] * 4 + [0, 0, 1]))
    with pytest.raises(ConfigError, match="whose files have changed since the run started"):
        HuggingFaceImages(fingerprint=noted).prepare(other)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"image": "photo"}, "dataset.image must be one of image, label, got photo; type dataset.image=image"),
        ({"label": "kind"}, "dataset.label must be one of image, label, got kind; type dataset.label=label"),
        ({"name": "nobody/nothing"}, r"dataset.name must be on the Hub or in its cache, got nobody/nothing \("),
    ],
)
def test_one_sentence(options, told, hf, tmp_path):
    root = saved(hf, tmp_path / "d", "parquet", train=images(hf, range(15)))
    with pytest.raises(ConfigError, match=told) as refused:
        HuggingFaceImages(**options).count(root)
    assert "\n" not in str(refused.value)


def test_a_broken_picture_is_named(hf, tmp_path):
    raw = io.BytesIO()
    picture(1).save(raw, "PNG")
    table = images(hf, range(15)).cast_column("image", hf.Image(decode=False))
    rows = [*table]
    rows[3]["image"]["bytes"] = raw.getvalue()[:40]
    broken = hf.Dataset.from_list(rows, features=table.features)
    _, data = loaded(HuggingFaceImages(workers=0), saved(hf, tmp_path / "d", "parquet", train=broken, test=table))
    with pytest.raises(ConfigError, match="row 3, which"):
        list(data.train_batches(0, [torch.arange(15)]))


TEXT = [f"Row {i} says {'äb' * (i % 4)}." for i in range(60)]


def texts(hf, rows):
    return hf.Dataset.from_dict({"text": list(rows)})


def test_rows_of_text_are_lines(hf, tmp_path):
    root = saved(hf, tmp_path / "d", "parquet", train=texts(hf, [*TEXT, "ends\n", ""]), test=texts(hf, TEXT[:9]))
    dataset = HuggingFaceText(context=8)
    found, data = loaded(dataset, root)
    expected = "".join(f"{line}\n" for line in [*TEXT, "ends", ""]).encode()
    assert bytes(data.tokens["train"].numpy()) == expected and found["train_bytes"] == len(expected)
    assert torch.equal(data.tokens["valid"], data.tokens["test"]) and dataset.train_size == len(expected) // 8 - 1


def test_without_other_parts_rows_are_held_out(hf, tmp_path):
    _, data = loaded(HuggingFaceText(context=8), saved(hf, tmp_path / "d", "saved", train=texts(hf, TEXT)))
    held = {split: bytes(data.tokens[split].numpy()).decode().splitlines() for split in ("train", "valid", "test")}
    assert held["test"] == TEXT[19::20] and held["valid"] == TEXT[18::20]
    assert sorted([*held["train"], *held["valid"], *held["test"]]) == sorted(TEXT)


@pytest.mark.parametrize("what", ["images", "text"])
def test_a_run(what, hf, tmp_path):
    words = [f"paths.runs={tmp_path}/runs", "epochs=2", "batch_size=4", "workers=2", "comm=simulated"]
    if what == "images":
        root = saved(hf, tmp_path / "d", "parquet", train=images(hf, range(24)))
        words += ["dataset=huggingface", "dataset.workers=0", "model=resnet18", "model._target_=tests.kit.tiny.Net"]
    else:
        root = saved(hf, tmp_path / "d", "parquet", train=texts(hf, TEXT))
        words += ["dataset=huggingface_text", "dataset.context=16", "model=gpt_nano", "model.layers=1"]
        words += ["model.width=16", "model.heads=2", "model.positions=16"]
    train.run(composed.cfg(*words, f"paths.data={root}"))
    assert RunFolder(tiny.only(tmp_path / "runs")).read_json("summary.json")["epochs"] == 2
