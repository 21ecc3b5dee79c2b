"""Arrays of anybody's: any usual names, kinds and layouts; one sentence for what does not fit."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from accordion_bench import __main__ as command
from accordion_bench import train
from accordion_bench.datasets import arrays as module
from accordion_bench.datasets.arrays import Arrays, moments
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, tiny

CPU = torch.device("cpu")
DRAWN = np.random.default_rng(0)
X = DRAWN.integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
Y = np.arange(20) % 4
TRAIN, TEST = slice(0, 14), slice(14, 20)


def four(x=X, y=Y) -> dict[str, np.ndarray]:
    return {"x_train": x[TRAIN], "y_train": y[TRAIN], "x_test": x[TEST], "y_test": y[TEST]}


def packed(folder: Path, **named: np.ndarray) -> str:
    np.savez(folder / "data.npz", **named)
    return str(folder / "data.npz")


def loaded(root: str, seed: int = 0, **options):
    """A data set that was counted, checked and loaded, as a run does; and its data."""
    dataset = Arrays(**options)
    found = dataset.count(root)
    dataset = Arrays(**{**options, **found})
    dataset.prepare(root)
    return dataset, dataset.load(root, seed, CPU)


def nchw(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).permute(0, 3, 1, 2)


# ---- what is read


NAMES = {
    "x_train, y_train": ("x_train", "y_train", "x_test", "y_test"),
    "X_train": ("X_train", "Y_train", "X_test", "Y_test"),
    "train_x": ("train_x", "train_y", "test_x", "test_y"),
    "of MedMNIST": ("train_images", "train_labels", "test_images", "test_labels"),
    "images_train": ("images_train", "labels_train", "images_test", "labels_test"),
    "data, targets": ("data_train", "targets_train", "data_test", "targets_test"),
    "training-data": ("training-data", "training-labels", "testing-data", "testing-labels"),
    "a validation part for the test": ("x_train", "y_train", "x_val", "y_val"),
}


@pytest.mark.parametrize("single", [True, False], ids=["npz", "npy"])
@pytest.mark.parametrize("names", NAMES)
def test_names(names, single, tmp_path):
    named = dict(zip(NAMES[names], four().values(), strict=True)) | {"class_names": np.array(["a", "b"])}
    if single:
        root = packed(tmp_path, **named)
    else:
        root = str(tmp_path)
        for name, values in named.items():
            np.save(tmp_path / f"{name}.npy", values)
    dataset, data = loaded(root)
    assert (dataset.num_classes, dataset.train_size, dataset.in_channels, dataset.image_size) == (4, 14, 3, 8)
    assert torch.equal(data.train_images, nchw(X[TRAIN])) and torch.equal(data.test_images, nchw(X[TEST]))
    assert data.train_labels.tolist() == Y[TRAIN].tolist() and data.test_labels.tolist() == Y[TEST].tolist()


def test_what_is_not_read_may_be_anything(tmp_path):
    """Names of classes as Python objects, say, and damaged files."""
    objects = np.array(["cat", None], dtype=object)
    assert loaded(packed(tmp_path, **four(), class_names=objects, index=np.zeros(3)))[0].train_size == 14
    (tmp_path / "data.npz").unlink()
    for name, values in four().items():
        np.save(tmp_path / f"{name}.npy", values)
    (tmp_path / "embeddings.npy").write_bytes(b"x")
    assert loaded(str(tmp_path))[0].train_size == 14


def test_the_file_is_found(tmp_path):
    """As paths.data, the only one in it, or by its name."""
    root = packed(tmp_path, **four())
    (tmp_path / "._data.npz").write_bytes(b"x")
    for place, file in ((root, None), (str(tmp_path), None), (str(tmp_path), "data.npz")):
        assert loaded(place, file=file)[0].train_size == 14
    np.savez(tmp_path / "more.npz", **four())
    with pytest.raises(
        ConfigError, match=r"dataset.file must name one of the 2 .npz files .*; type dataset.file=data.npz"
    ):
        Arrays().count(str(tmp_path))
    assert loaded(str(tmp_path), file="more.npz")[0].train_size == 14


@pytest.mark.parametrize(
    "x, expected",
    [
        (X, nchw(X)),
        (nchw(X).numpy(), nchw(X)),
        (X[..., 0], torch.from_numpy(X[:, None, :, :, 0].copy())),
        (X[..., :1], nchw(X[..., :1])),
        (X.astype(np.int64), nchw(X)),
        (X > 99, nchw((X > 99).astype(np.uint8))),
        (X.astype(np.uint16) * 257, nchw(X.astype(np.float32) * 257)),
        (X.astype(np.int16) - 99, nchw(X.astype(np.float32) - 99)),
        (X.astype(np.float16) / 256, nchw(X.astype(np.float32) / 256)),
        (X.astype(np.float64) / 255, nchw((X.astype(np.float64) / 255).astype(np.float32))),
        (X.astype(">u2"), nchw(X)),
        (np.asfortranarray(X), nchw(X)),
    ],
    ids=[
        "nhwc",
        "nchw",
        "grey",
        "one channel",
        "int64",
        "bool",
        "uint16",
        "signed",
        "float16",
        "float64",
        "big-endian",
        "fortran",
    ],
)
def test_kinds_and_layouts(x, expected, tmp_path):
    _, data = loaded(packed(tmp_path, **four(x)))
    assert torch.equal(data.train_images, expected[TRAIN]) and torch.equal(data.test_images, expected[TEST])
    assert data.train_images.dtype == expected.dtype in (torch.uint8, torch.float32)


@pytest.mark.parametrize(
    "y", [Y + 1, Y[:, None], np.eye(4)[Y], Y.astype(float), np.array(["cat", "dog", "emu", "fox"])[Y], 7 - Y]
)
def test_labels(y, tmp_path):
    dataset, data = loaded(packed(tmp_path, **four(y=y)))
    numbers = 3 - Y if np.array_equal(y, 7 - Y) else Y
    assert dataset.num_classes == 4 and [*data.train_labels, *data.test_labels] == numbers.tolist()
    assert data.train_labels.dtype == torch.int64


def test_images_are_normalised_by_the_training_images(tmp_path):
    x = X.astype(np.uint16) * 257
    _, data = loaded(packed(tmp_path, **four(x)))
    (images, _), (tested, _) = data.train_batch(torch.arange(14)), data.test_batch(torch.arange(6))
    assert images.mean((0, 2, 3)).abs().max() < 1e-6 and (images.std((0, 2, 3), correction=0) - 1).abs().max() < 1e-6
    own = x[TRAIN].astype(np.float64)
    expected = (x[TEST] - own.mean((0, 1, 2))) / own.std((0, 1, 2))
    assert np.abs(tested.numpy() - expected.transpose(0, 3, 1, 2)).max() < 1e-5


def test_moments_of_a_channel_without_spread(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 3)
    images = torch.stack([torch.full((7, 4, 4), 9.0), torch.arange(112.0).view(7, 4, 4)], 1)
    assert moments(images) == ([9.0, 55.5], [1.0, pytest.approx(images[:, 1].std(correction=0).item())])


def test_without_a_test_a_share_is_held_out_by_the_seed(tmp_path):
    root = packed(tmp_path, x=X, y=Y)
    dataset, data = loaded(root)
    assert dataset.test_share == 0.2 and (dataset.train_size, data.train_size, data.test_size) == (16, 16, 4)
    assert data.test_labels.bincount().tolist() == [1] * 4
    both = torch.cat([data.train_images, data.test_images])
    assert sorted(map(bytes, both.numpy())) == sorted(map(bytes, nchw(X).contiguous().numpy()))
    assert not torch.equal(data.test_images, loaded(root, seed=1)[1].test_images)
    assert torch.equal(data.test_images, loaded(root)[1].test_images)
    assert loaded(root, test_share=0.5)[1].test_size == 8


def test_a_validation_part_chooses(tmp_path):
    named = {**four(), "x_val": X[:5], "y_val": Y[:5]}
    root = packed(tmp_path, **named)
    dataset, data = loaded(root)
    assert dataset.train_count == 14 and (data.train_size, data.test_size) == (19, 6)
    split = dataset.split(data.train_size, 0)
    ((x, y),) = data.validation_batches([split.validation])
    assert torch.equal(x, (nchw(X[:5]).float() - data.mean) / data.std) and y.tolist() == Y[:5].tolist()
    assert split.train.tolist() == list(range(14))
    few, _ = loaded(root, limit_eval=2)
    few.load(root, 0, CPU)
    assert len(few.split(19, 0).validation) == 2
    with pytest.raises(ConfigError, match=r"dataset.validation must be null where .* has its own validation split"):
        loaded(root, validation=0.1)


def test_some_of_sorted_data_are_of_all_classes(tmp_path):
    order = np.argsort(np.repeat(np.arange(4), 5), kind="stable")
    labels = np.repeat(np.arange(4), 5)
    _, data = loaded(packed(tmp_path, x_train=X, y_train=labels, x_test=X[order], y_test=labels), limit_eval=10)
    assert data.test_size == 10 and len(data.test_labels.unique()) > 2


def test_augmentation_is_that_of_cifar(tmp_path):
    root = packed(tmp_path, **four())
    _, plain = loaded(root)
    _, moved = loaded(root, augment=True)
    assert (plain.padding, plain.flip) == (0, False) and (moved.padding, moved.flip) == (4, True)


# ---- what does not fit


def wrong(**changed) -> dict:
    return {**four(), **changed}


@pytest.mark.parametrize(
    "named, told",
    [
        ({"arr_0": X, "arr_1": Y}, "must have arrays named x_train and y_train .* got arr_0, arr_1; rename them"),
        ({"x_train": X}, "must have images and labels of each part, got x_train without the labels of train"),
        ({**four(), "y_val": Y}, "got y_val without the images of validation"),
        ({**four(), "train_images": X}, "one array for each of its parts, got x_train and train_images; leave one out"),
        (wrong(y_train=Y), r"a label for each image, got x_train \[14, 8, 8, 3\] uint8 and y_train \[20\] int64"),
        (wrong(x_test=X[TEST, :4, :4]), r"equal images in all parts, got x_train .* and x_test \[6, 4, 4, 3\]"),
        (wrong(y_test=Y[TEST] + 9), "classes of its training part in all parts, got 11 in y_test alone"),
        (four(X.reshape(20, -1)), r"images \[n, H, W\], .* of numbers, got x_train \[14, 192\] uint8"),
        (four(X[:, :6]), r"square images of 1 to 4 channels, got x_train \[14, 6, 8, 3\]"),
        (four(np.zeros((20, 8, 8, 8))), "square images of 1 to 4 channels"),
        (four(np.zeros((20, 3, 3, 3))), r"dataset.layout must be nhwc or nchw, .* got null; type dataset.layout=nhwc"),
        (four(X.astype(complex)), "of numbers, got x_train .* complex128"),
        (four(X.astype(str)), "of numbers, got x_train"),
        (four(y=Y + 0.5), "one class for each image: .* got y_train"),
        (four(y=np.eye(4)[Y] * 2), "one class for each image"),
        (four(y=np.where(Y == 0, " ", "a")), "one class for each image: .* got y_train .* with an empty text"),
        (wrong(x_test=X[TEST] / 255), r"integers, or floats of one range, .* got x_train .* and x_test .* float64"),
        (wrong(x_test=X[TEST].astype(np.float32)), "floats of one range, as images of all parts"),
        (four(X * 1e300), "finite images, also as float32, got NaN or infinity in x_train"),
        (four(y=np.zeros((20, 2, 2))), "one class for each image"),
        (four(y=Y.astype(object)), "contains Python objects, which are never loaded"),
        (four(y=np.zeros(20, int)), "pictures of at least 2 classes, got .* with 1"),
        ({"x": X[:4], "y": Y[:4]}, "at least 2 pictures of each class if a share of them is the test"),
    ],
)  # fmt: skip
def test_one_sentence(named, told, tmp_path):
    root = packed(tmp_path, **named)
    with pytest.raises(ConfigError, match=told) as refused:
        loaded(root)
    assert "\n" not in str(refused.value) and ";" in str(refused.value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_images_must_be_finite(value, tmp_path):
    x = X.astype(np.float32)
    x[15, 2, 2, 1] = value
    with pytest.raises(ConfigError, match="must have finite images, also as float32, got NaN or infinity in x_test"):
        loaded(packed(tmp_path, **four(x)))


def test_the_layout_of_cubes_is_said(tmp_path):
    cubes = DRAWN.integers(0, 256, (20, 3, 3, 3), dtype=np.uint8)
    root = packed(tmp_path, **four(cubes))
    assert torch.equal(loaded(root, layout="nhwc")[1].train_images, nchw(cubes[TRAIN]))
    assert torch.equal(loaded(root, layout="nchw")[1].train_images, torch.from_numpy(cubes[TRAIN]))
    with pytest.raises(ConfigError, match=r"in dataset.layout=nchw, got x_train \[14, 8, 8, 3\]"):
        loaded(packed(tmp_path, **four()), layout="nchw")
    with pytest.raises(ConfigError, match=r"dataset.layout must be null where images have no channels"):
        loaded(packed(tmp_path, **four(X[..., 0])), layout="nhwc")
    with pytest.raises(ConfigError, match="layout must be one of nhwc, nchw, got hwc"):
        Arrays(layout="hwc")


@pytest.mark.parametrize(
    "how, told",
    [
        ("cut", "which is truncated"),
        ("empty", "which is empty"),
        ("text", "which is not an .npz file"),
        ("flipped", "which cannot be read .*CRC"),
        ("gone", "which does not exist"),
        ("pickle", "Python objects, which are never loaded"),
    ],
)
def test_broken_files_are_named(how, told, tmp_path):
    root = packed(tmp_path, **four())
    file, content = Path(root), Path(root).read_bytes()
    if how == "cut":
        file.write_bytes(content[:-50])
    elif how == "flipped":
        middle = content.index(X[TRAIN].tobytes()[:40]) + 20
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif how == "gone":
        file.unlink()
    elif how == "pickle":
        np.save(tmp_path / "x_train.npy", np.array([print], dtype=object), allow_pickle=True)
        file.unlink()
        root = str(tmp_path)
    else:
        file.write_bytes(b"" if how == "empty" else b"version https://git-lfs")
    with pytest.raises(ConfigError, match=told) as refused:
        loaded(root)
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def test_no_arrays_at_all(tmp_path):
    for root in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=rf"must hold an .npz file, or .npy files, got {re.escape(str(root))}"):
            Arrays().count(str(root))


def test_other_arrays_have_another_fingerprint(tmp_path):
    root = packed(tmp_path, **four())
    first = Arrays().count(root)
    assert Arrays().count(root) == first
    packed(tmp_path, **four(), note=np.zeros(3))  # which is not read
    assert Arrays().count(root) == first
    changed = X.copy()
    changed[3, 0, 0, 0] ^= 1
    packed(tmp_path, **four(changed))
    with pytest.raises(ConfigError, match=f"got {first['fingerprint']}; restore them"):
        Arrays(**first).prepare(root)


def test_a_run(tmp_path, monkeypatch):
    """From its command to its folder, which says what was counted, and is resumed."""
    y = np.tile(np.arange(4), 40)
    x = (60 * y[:, None, None] + DRAWN.integers(0, 40, (160, 8, 8))).astype(np.uint8)
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    own = ["dataset=arrays", f"paths.data={tmp_path}/mine.npz", "batch_size=8", "epochs=3", "schedule=constant"]
    words = [
        *own,
        "optimizer.lr=0.01",
        "comm=simulated",
        "model=resnet18",
        "model._target_=tests.kit.tiny.Net",
        f"paths.runs={tmp_path}/runs",
    ]
    monkeypatch.setattr("sys.argv", ["accordion_bench", *words])
    command.main()
    run = RunFolder(tiny.only(tmp_path / "runs"))
    saved = run.read_config()["dataset"]
    counted = [saved[key] for key in ("classes", "train_size", "channels", "image_size", "test_share")]
    assert counted == [4, 128, 1, 8, 0.2] and run.read_json("summary.json")["test_size"] == 32
    more = [f"resume={run.path}", "epochs=4", "dataset=arrays", "model._target_=tests.kit.tiny.Net"]
    train.run(composed.cfg(*more), command.typed(more))
    assert len(run.read_metrics()) == 4
