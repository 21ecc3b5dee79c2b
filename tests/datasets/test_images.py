"""Image data sets: augmentation against slow twins, files in their original formats, reading ahead by processes."""

import multiprocessing
import os
import pickle
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.io import savemat
from torch import Tensor

from accordion_bench import train
from accordion_bench.datasets.cifar import SVHN, Cifar
from accordion_bench.datasets.image_folder import ImageNet, files_of
from accordion_bench.datasets.images import ImageData
from accordion_bench.datasets.pictures import Files, FolderData, Views, box, central
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.runs.folder import RunFolder
from accordion_bench.tensors import keyed_rng
from tests.kit import composed
from tests.kit.paths import SHARED
from tests.kit.readers import ORDER, in_a_daemon, passes

CPU = torch.device("cpu")


def random_images(count: int, height: int, width: int) -> Tensor:
    shape = (count, 3, height, width)
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


# ---- augmentation


class TestAugmentation:
    height, width = 7, 10

    def data(self, padding=2, flip=True, rotation=40.0, cutout=0) -> ImageData:
        pair = (random_images(6, self.height, self.width), torch.arange(6))
        return ImageData(pair, pair, [9.0, 0.0, 1.0], [2.0, 1.0, 3.0], padding, flip, 5, CPU, rotation, cutout)

    def slow_twin(self, data: ImageData, epoch: int) -> Tensor:
        """Each image by itself: pad, slice, flip, rotate by Pillow, normalise, cut out."""
        generator, images = keyed_rng.generator(5, "augmentation", epoch), data.train_images
        if data.padding:
            images = F.pad(images, (data.padding,) * 4)
            offsets = torch.randint(0, 2 * data.padding + 1, (6, 2), generator=generator).tolist()
            images = torch.stack(
                [x[:, a : a + self.height, b : b + self.width] for x, (a, b) in zip(images, offsets, strict=True)]
            )
        if data.flip:
            flips = torch.randint(0, 2, (6,), generator=generator).tolist()
            images = torch.stack([x.flip(-1) if flip else x for x, flip in zip(images, flips, strict=True)])
        if data.rotation:
            degrees = (torch.rand(6, generator=generator, dtype=torch.float64) * 2 - 1) * data.rotation
            turned = [
                np.array(Image.fromarray(x.permute(1, 2, 0).numpy()).rotate(angle))
                for x, angle in zip(images, degrees.tolist(), strict=True)
            ]
            images = torch.from_numpy(np.stack(turned)).permute(0, 3, 1, 2)
        out = (images.float() - torch.tensor([9.0, 0.0, 1.0])[:, None, None]) / torch.tensor([2.0, 1, 3])[:, None, None]
        if data.cutout:
            rows, columns = (torch.randint(0, side, (6,), generator=generator) for side in (self.height, self.width))
            for x, row, column in zip(out, rows.tolist(), columns.tolist(), strict=True):
                top, left = row - data.cutout // 2, column - data.cutout // 2
                x[:, max(top, 0) : top + data.cutout, max(left, 0) : left + data.cutout] = 0
        return out

    @pytest.mark.parametrize("cutout", [0, 3, 4])
    @pytest.mark.parametrize("rotation", [0.0, 15.0, 180.0])
    @pytest.mark.parametrize("padding, flip", [(0, False), (2, False), (0, True), (2, True)])
    def test_equals_pad_slice_flip_rotate_cut(self, padding, flip, rotation, cutout):
        data = self.data(padding, flip, rotation, cutout)
        before = torch.get_rng_state()
        for epoch in range(4):
            data.begin_epoch(epoch)
            indices = torch.tensor([4, 0, 2, 2])
            x, y = data.train_batch(indices)
            assert torch.equal(x, self.slow_twin(data, epoch)[indices])
            assert torch.equal(y, indices)
        assert torch.equal(before, torch.get_rng_state())

    def test_depends_on_sample_and_epoch_only(self):
        data = self.data(cutout=3)
        (together, _), (alone, _) = (next(data.train_batches(1, [torch.tensor(batch)])) for batch in ([3, 1, 5], [1]))
        assert torch.equal(together[1], alone[0])
        other, _ = next(data.train_batches(2, [torch.tensor([1])]))
        assert not torch.equal(alone, other)

    def test_evaluation_and_the_stored_images_stay_as_they_are(self):
        data = self.data(cutout=3)
        stored = data.train_images.clone()
        list(data.train_batches(0, torch.arange(6).split(4)))
        ((x, _),) = data.test_batches([torch.tensor([5, 1])])
        assert torch.equal(data.train_images, stored)
        assert torch.equal(x[:, 2], (data.test_images[[5, 1], 2].float() - 1) / 3)

    @pytest.mark.gpu
    def test_a_gpu_finds_the_same_pixels(self):
        pair = random_images(64, 32, 32), torch.arange(64)
        rest = [0.0] * 3, [1.0] * 3, 4, True, 0
        here, there = (ImageData(pair, pair, *rest, torch.device(name), 15, 8) for name in ("cpu", "cuda"))
        for (x, _), (other, _) in zip(*(d.train_batches(3, [torch.arange(64)]) for d in (here, there)), strict=True):
            assert torch.equal(x, other.cpu())


# ---- files in the original formats


def write_cifar100(root: Path, train_size=40, test_size=20) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The pickles of cifar-100-python, as Python 2 wrote them; returns (images [n, 3072], labels) of each."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    drawn, generator = {}, np.random.default_rng(0)
    for name, count in (("train", train_size), ("test", test_size)):
        rows, fine = generator.integers(0, 256, (count, 3072), np.uint8), generator.integers(0, 100, count)
        batch = {"data": rows, "fine_labels": fine.tolist(), "coarse_labels": [0] * count, "batch_label": "one"}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
        drawn[name] = rows, fine
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(i) for i in range(100)]}, protocol=2))
    return drawn


def write_svhn(root: Path, train_size=30, test_size=12) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """train_32x32.mat and test_32x32.mat; returns (X, y) of each."""
    (root / "svhn").mkdir(parents=True)
    drawn, generator = {}, np.random.default_rng(0)
    for name, count in (("train", train_size), ("test", test_size)):
        x, y = generator.integers(0, 256, (32, 32, 3, count), np.uint8), generator.integers(1, 11, (count, 1), np.uint8)
        savemat(root / "svhn" / f"{name}_32x32.mat", {"X": x, "y": y}, do_compression=True)
        drawn[name] = x, y
    return drawn


def test_cifar100(tmp_path, monkeypatch):
    """Channels are planes, rows come next; subset and limit_eval cut; a run of it ends."""
    drawn = write_cifar100(tmp_path)
    monkeypatch.setattr(Cifar, "train_size", 40)
    dataset = Cifar(classes=100, augment=False, limit_eval=7, check=False)
    dataset.prepare(str(tmp_path))
    data = dataset.load(str(tmp_path), 0, CPU)
    rows, labels = drawn["train"]
    assert data.train_images.dtype == torch.uint8 and data.train_labels.tolist() == labels.tolist()
    assert int(data.train_images[3, 1, 2, 5]) == rows[3, 1024 + 2 * 32 + 5]
    x, _ = data.train_batch(torch.tensor([3]))
    assert float(x[0, 1, 2, 5]) == pytest.approx((rows[3, 1024 + 2 * 32 + 5] / 255 - 0.4865) / 0.2564, rel=1e-5)
    assert (data.test_size, data.test_labels.tolist()) == (7, drawn["test"][1][:7].tolist())

    data_of = [
        "dataset=cifar100",
        f"paths.data={tmp_path}",
        f"paths.runs={tmp_path / 'runs'}",
        "dataset.subset=16",
        "dataset.check=false",
    ]
    data_of.append("dataset.check=false")
    train.run(composed.cfg(*data_of, "dataset.cutout=8", "batch_size=4", "epochs=1", "comm=simulated", "workers=2"))
    (folder,) = (tmp_path / "runs").iterdir()
    assert RunFolder(folder).read_json("summary.json")["steps"] == 2


def test_svhn(tmp_path, monkeypatch):
    """Ten stands for 0; pixels go to [-1, 1]; never flipped."""
    drawn = write_svhn(tmp_path)
    monkeypatch.setattr(SVHN, "train_size", 30)
    dataset = SVHN(augment=True, subset=20, check=False)
    dataset.prepare(str(tmp_path))
    data = dataset.load(str(tmp_path), 0, CPU)
    x, y = drawn["test"]
    assert data.test_labels.tolist() == (y.ravel() % 10).tolist() and data.train_size == 20
    images, _ = data.test_batch(torch.tensor([4]))
    assert float(images[0, 2, 7, 9]) == pytest.approx(x[7, 9, 2, 4] / 127.5 - 1, abs=1e-6)
    assert (data.padding, data.flip, SVHN().augment) == (4, False, False)


def test_files_that_are_no_originals(tmp_path, monkeypatch):
    """Too few images, half a file, a pickle that would run something, a .mat that is none: one sentence each."""
    write_cifar100(tmp_path)
    write_svhn(tmp_path)
    load = lambda dataset: dataset.load(str(tmp_path), 0, CPU)  # noqa: E731
    for dataset, told in ((Cifar(classes=100), "all 50,000 training images, got 40"), (SVHN(), "all 73,257 .* got 30")):
        with pytest.raises(ConfigError, match=told):
            load(dataset)
    file = tmp_path / "cifar-100-python" / "train"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"original files, got .*train, which cannot be read"):
        load(Cifar(classes=100))
    file.write_bytes(pickle.dumps(os.getpid, protocol=2))
    with pytest.raises(ConfigError, match=r"posix.getpid is not an array name"):
        load(Cifar(classes=100))
    (tmp_path / "svhn" / "train_32x32.mat").write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(ConfigError, match=r"original files, got .*train_32x32.mat, which cannot be read"):
        load(SVHN())


@pytest.mark.skipif(not (SHARED / "cifar-10-batches-py").is_dir(), reason="no CIFAR-10 beside the checkout")
def test_real_cifar10_is_what_torchvision_reads():
    from torchvision.datasets import CIFAR10

    data, theirs = Cifar(classes=10, subset=5000).load(str(SHARED), 0, CPU), CIFAR10(SHARED, train=False)
    assert torch.equal(data.test_images.permute(0, 2, 3, 1), torch.from_numpy(theirs.data))
    assert data.test_labels.tolist() == theirs.targets
    assert data.train_size == 5000 and min(data.train_labels.bincount()) > 400


@pytest.mark.parametrize(
    "build, told",
    [
        (lambda: Cifar(classes=100, rotation=-1), "rotation must be a number at least 0 and at most 180, got -1"),
        (lambda: Cifar(classes=10, cutout=65), "cutout must be an integer of at most 64, got 65"),
        (lambda: SVHN(cutout=1.5), "cutout must be an integer of at least 0, got 1.5"),
        (lambda: SVHN(augment=1), "augment must be true or false, got 1"),
        (lambda: ImageNet(workers=-1), "workers must be an integer of at least 0, got -1; type workers=4"),
        (lambda: ImageNet(classes=1), "classes must be an integer of at least 2, got 1; type classes=1000"),
    ],
)
def test_refused(build, told):
    with pytest.raises(ValueRefused, match=told):
        build()


# ---- folders of images


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder of 3 classes of JPEG files, 15 for training and 6 for evaluation, small and of many shapes."""
    root, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 15), ("val", 6)):
        for i in range(count):
            folder = root / "imagenet" / split / f"n0{i % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            width, height = generator.integers(20, 60, 2)
            pixels = generator.integers(0, 80, (height, width, 3)) + 80 * (i % 3)
            image = Image.fromarray(pixels.astype(np.uint8))
            image = image.convert({4: "L", 5: "CMYK"}.get(i, "RGB"))
            image.save(folder / f"{split}_{i}.JPEG")
    return root


def small(**options) -> ImageNet:
    return ImageNet(**{"classes": 3, "train_size": 15, "image_size": 16, "workers": 0} | options)


def files(root: Path, split: str) -> Files:
    return files_of(root / "imagenet", root / "imagenet" / split)


def views(root: Path, augment: bool = True) -> Views:
    train, test = (files(root, split) for split in ("train", "val"))
    return Views(train, test, 16, augment, seed=3)


def test_crops_are_torchvisions(root):
    """Decoded, cropped, resized and flipped as by its functions at the same places; the central square, too."""
    from torchvision.transforms import functional as V
    from torchvision.transforms import v2

    seen, names = views(root), files(root, "train")
    middle = v2.Compose([v2.Resize(round(16 * 256 / 224)), v2.CenterCrop(16)])
    flipped = 0
    for sample in range(15):
        image = names.open(sample)
        for epoch in range(3):
            draws = torch.rand(11, 4, generator=keyed_rng.generator(3, "augmentation", epoch, sample))
            left, top, right, bottom = box(*image.size, draws[1:].tolist())
            expected = V.resized_crop(image, top, left, bottom - top, right - left, [16, 16])
            flipped += (flip := bool(draws[0, 0] < 0.5))
            expected = V.hflip(expected) if flip else expected
            x, label = seen[epoch, sample]
            assert torch.equal(x, V.pil_to_tensor(expected)) and label == names.labels[sample]
        assert torch.equal(V.pil_to_tensor(central(image, 16)), V.pil_to_tensor(middle(image)))
    assert 10 < flipped < 35
    assert torch.equal(views(root, augment=False)[5, 2][0], V.pil_to_tensor(central(names.open(2), 16)))


def test_boxes_have_the_allowed_areas_and_ratios():
    generator = torch.Generator().manual_seed(0)
    areas = []
    for width, height in ((400, 300), (300, 400), (333, 333)):
        for _ in range(200):
            left, top, right, bottom = box(width, height, torch.rand(10, 4, generator=generator).tolist())
            assert 0 <= left < right <= width and 0 <= top < bottom <= height
            areas.append((right - left) * (bottom - top) / (width * height))
            assert 0.74 < (right - left) / (bottom - top) < 1.35
    assert 0.079 < min(areas) < 0.12 and 0.9 < max(areas) <= 1 and 0.4 < np.mean(areas) < 0.56
    never_fits = [[0.999, 0.5, 0.5, 0.5]] * 10
    assert box(1000, 30, never_fits) == (480, 0, 520, 30) and box(30, 1000, never_fits) == (0, 480, 30, 520)


def test_subset_and_limit_eval(root):
    """The evaluation images of a smaller set are the same for every seed, and of all classes."""
    every = small().load(str(root), 0, CPU)
    assert (every.train_size, every.test_size) == (15, 6)
    few = [small(subset=7, limit_eval=4).load(str(root), seed, CPU) for seed in (0, 1)]
    assert [(data.train_size, data.test_size) for data in few] == [(7, 4)] * 2
    kept = [sorted(data.loader.items.test.names.tolist()) for data in few]
    assert kept[0] == kept[1] and len(set(few[0].loader.items.test.labels.tolist())) > 1
    chosen = [sorted(data.loader.items.train.names.tolist()) for data in few]
    assert chosen[0] != chosen[1] and len(set(chosen[0])) == 7
    assert len(list(few[0].test_batches(torch.arange(4).split(3)))) == 2


def test_held_out_images_are_the_central_squares(root):
    data = small(validation=4).load(str(root), 0, CPU)
    ((x, y),) = data.validation_batches([torch.tensor([2, 9])])
    files = data.loader.items.train
    squares = torch.stack([torch.from_numpy(np.array(central(files.open(i), 16))).permute(2, 0, 1) for i in (2, 9)])
    assert torch.equal(x, (squares.float() - data.mean) / data.std) and y.tolist() == files.labels[[2, 9]].tolist()


def test_refused_folders(root, tmp_path):
    small().prepare(str(root))
    with pytest.raises(ConfigError, match=r"paths.data must hold the images imagenet/\{train,val\}/CLASS"):
        small().prepare(str(tmp_path))
    told = "got 1000 and 1281167; type dataset.classes=3 dataset.train_size=15"
    with pytest.raises(ConfigError, match=told):
        ImageNet().prepare(str(root))
    for split in ("train", "val"):
        (tmp_path / "imagenet" / split / split).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / "imagenet" / split / split / "x.png")
    with pytest.raises(ConfigError, match="the same classes in train and val, got train in one only"):
        small().prepare(str(tmp_path))


@pytest.fixture(scope="module")
def ahead(root) -> FolderData:
    """Read by two processes."""
    return FolderData(views(root), 2, CPU)


@pytest.fixture(scope="module")
def alone(root) -> list[Tensor]:
    """What is read without."""
    return passes(FolderData(views(root), 0, CPU))


class TestReadingAhead:
    def test_batches_are_in_order_and_keyed_by_epoch_and_sample(self, root, alone):
        labels = files(root, "train").labels
        for y, indices in zip(alone[1:12:2], ORDER, strict=True):
            assert y.tolist() == labels[indices.numpy()].tolist()
        first, again, twice = alone[0], alone[6], alone[4]  # all with sample 3 in epoch 0
        assert torch.equal(first[0], again[0]) and torch.equal(first[0], twice[2])
        assert torch.equal(alone[12], alone[14]) and not torch.equal(alone[12], alone[0])

    def test_two_processes_read_what_none_reads(self, ahead, alone):
        before = torch.get_rng_state()
        read = passes(ahead)
        assert torch.equal(before, torch.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(read, alone, strict=True))
        assert len(ahead.loader._idle) == 1  # four passes, one after another, and the same processes

    def test_passes_may_cross(self, root, alone):
        data = FolderData(views(root), 0, CPU)
        crossing = zip(data.train_batches(0, ORDER), data.train_batches(1, ORDER), strict=True)
        for i, ((x, _), (y, _)) in enumerate(crossing):
            assert torch.equal(x, alone[2 * i]) and torch.equal(y, alone[2 * i + 14])

    def test_they_leave_signals_to_their_parent_and_end_with_it(self, ahead):
        """A terminal's or a launcher's signals do nothing; SIGTERM of the parent itself is how daemons are ended."""
        list(ahead.test_batches([torch.tensor([0])]))
        ((loader, _),) = ahead.loader._idle
        reader = loader._iterator._workers[0]
        subprocess.run(["sh", "-c", f"kill -INT {reader.pid}; kill -TERM {reader.pid}"], check=True)
        time.sleep(0.3)
        assert len(list(ahead.train_batches(2, ORDER))) == len(ORDER) and reader.is_alive()
        reader.terminate()
        reader.join(5)
        assert reader.exitcode == 0

    def test_a_daemon_may_have_them(self, root, alone):
        context = multiprocessing.get_context("forkserver")  # spawned anew, it would import everything
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=in_a_daemon, args=(views(root), send), daemon=True)
        child.start()
        send.close()
        read = receive.recv()
        child.join()
        assert child.exitcode == 0
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(read, alone, strict=True))


def run(root: Path, runs: Path, *overrides: str) -> list[dict]:
    """Metrics rows of two epochs of a small network."""
    folder = ["dataset.classes=3", "dataset.train_size=15", "dataset.image_size=16", f"paths.data={root}"]
    own = ["model.depth=8", "batch_size=4", "epochs=2", "optimizer.lr=0.01", f"paths.runs={runs}"]
    train.run(composed.cfg("dataset=imagenet", *folder, *own, *overrides))
    (written,) = runs.iterdir()
    assert RunFolder(written).done
    return RunFolder(written).read_metrics()


def test_a_run(root, tmp_path):
    rows = run(root, tmp_path, "dataset.workers=0", "comm=simulated", "workers=2")
    assert [row["step"] for row in rows] == [2, 4]


@pytest.mark.slow
def test_two_processes_with_readers_are_the_same_run(root, tmp_path):
    """The readers end with the run."""
    before = multiprocessing.active_children()
    one = run(root, tmp_path / "one", "dataset.workers=1", "comm=simulated", "workers=2")
    two = run(root, tmp_path / "two", "dataset.workers=1", "comm=gloo", "comm.processes=2", "workers=2")
    for row, other in zip(one, two, strict=True):
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
        assert row["test_loss"] == pytest.approx(other["test_loss"], rel=1e-3)
    assert not {*multiprocessing.active_children()} - {*before}  # one of an earlier test may have ended meanwhile
