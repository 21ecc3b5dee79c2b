"""CIFAR-10, CIFAR-100 and SVHN (house numbers), read from their original files."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.datasets import cifar_file, fetch
from accordion_bench.datasets.fetch import Source
from accordion_bench.datasets.images import ImageData, ImageDataset
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options

TIMEOUT = 10.0  # seconds without data from the server before a download fails
ORIGINAL = "the original files, in paths.data or downloaded to it"
CUTOUT = "side in pixels of a square cut out of each training image; 0 = none"
CHECK = "compare the files with the published md5 sums, once; false = accept modified files"
# published sums; torchvision has the same ones but takes seconds to import
CIFAR_MD5 = {
    10: {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    100: {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
}
# the constants of the Accordion experiments, in units of the uint8 images
NORMAL = {
    10: ([125.3, 123.0, 113.9], [63.0, 62.1, 66.7]),
    100: ([255 * m for m in (0.5071, 0.4865, 0.4409)], [255 * s for s in (0.2673, 0.2564, 0.2762)]),
}
SVHN_MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}


class _OriginalImages(ImageDataset):
    """Images in a folder of original files, which are downloaded if they are missing."""

    in_channels, image_size = 3, 32
    folder: str
    md5: Mapping[str, str]  # by file name
    check: bool

    def sources(self) -> list[Source]:
        """Return the downloads."""
        raise NotImplementedError

    def prepare(self, root: str) -> None:
        found = fetch.ensure(root, self.folder, [*self.md5], self.sources, TIMEOUT)
        if self.check:
            fetch.refuse_changed(found, self.md5)

    def _splits(self, root: str, seed: int, read: Callable[[Path, str], tuple[Tensor, Tensor]]) -> tuple[Any, Any]:
        """Return images and labels of the training and the test split, cut; `read(folder, split)` reads a split."""
        folder = fetch.find(root, self.folder, [*self.md5]) or Path(root, self.folder)
        train, test = read(folder, "train"), read(folder, "test")
        fetch.refuse_size("training", self.train_size, len(train[1]), folder)
        return self.cut(train, test, seed)


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from ImageDataset.description.idle(cls, options, context)
    if options.get("augment") is False:
        yield "rotation", "dataset.augment is false"


@with_options
class Cifar(_OriginalImages):
    """60,000 colour images of 32x32 pixels (Krizhevsky 2009), 50,000 of them for training.

    Files are read by the safe reader `cifar_file`. Missing files are downloaded from the address that torchvision uses.
    `augment` applies a random crop (padding 4), a horizontal flip, and a rotation to the nearest pixel with black
    corners. Without it only `cutout` changes training images.
    """

    classes: int = option(default=10, choices=(10, 100))
    augment: bool = option("random crop, flip and rotation", default=True)
    rotation: float = option("maximum angle in degrees", default=0, at_least=0, at_most=180, instead=15)
    cutout: int = option(CUTOUT, default=0, at_least=0, at_most=64, instead=16)
    check: bool = option(CHECK, default=True)

    chosen_as = {
        "cifar10": Choice(ORIGINAL),
        "cifar100": Choice(ORIGINAL, {"classes": 100, "rotation": 15}),
    }
    description = replace(ImageDataset.description, idle=_idle)

    train_size = 50_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_classes = self.classes
        self.folder = {10: "cifar-10-batches-py", 100: "cifar-100-python"}[self.classes]
        self.md5 = CIFAR_MD5[self.classes]

    def sources(self) -> list[Source]:
        from torchvision.datasets import CIFAR10, CIFAR100

        theirs = {10: CIFAR10, 100: CIFAR100}[self.num_classes]
        return [Source(theirs.url, theirs.filename, theirs.tgz_md5)]

    def load(self, root: str, seed: int, device: torch.device) -> ImageData:
        def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
            return batches(
                [folder / name for name in self.md5 if name.startswith("test") == (split == "test")], self.classes
            )

        train, test = self._splits(root, seed, read)
        mean, std = NORMAL[self.num_classes]
        padding, rotation = (4, self.rotation) if self.augment else (0, 0.0)
        return ImageData(train, test, mean, std, padding, self.augment, seed, device, rotation, self.cutout)


def batches(files: list[Path], classes: int) -> tuple[Tensor, Tensor]:
    """Read the images [n, 3, 32, 32] in uint8 and labels [n] of several files in the CIFAR format, concatenated."""
    sizes = [min(file.stat().st_size, cifar_file.LARGEST) for file in files if file.is_file()]
    images = np.empty((sum(sizes) // cifar_file.PIXELS, 3, 32, 32), np.uint8)  # untouched pages use no memory
    labels: list[int] = []
    for file in files:
        try:
            pixels, numbers = cifar_file.read(file, classes)
        except Exception as error:  # a broken file may raise anything
            raise fetch.not_readable(file, error) from error
        images[len(labels) : len(labels) + len(numbers)] = pixels
        labels.extend(numbers)
    return torch.from_numpy(images[: len(labels)]), torch.tensor(labels)


@with_options
class SVHN(_OriginalImages):
    """73,257 training and 26,032 test images of 32x32 pixels, cropped digits in colour (Netzer et al. 2011).

    Read from `train_32x32.mat` and `test_32x32.mat` in the folder `svhn`; missing files are downloaded from the address
    that torchvision uses. The 531,131 easier `extra` images are not used, as in Accordion. `augment` is off by default:
    neither Accordion's code nor Wide ResNets (Zagoruyko & Komodakis 2016, arXiv 1605.07146) nor the cutout paper
    augment these images. Digits are never flipped.
    """

    augment: bool = option("random crop, without flip", default=False)
    cutout: int = option(CUTOUT, default=0, at_least=0, at_most=64, instead=16)
    check: bool = option(CHECK, default=True)

    chosen_as = {"svhn": Choice("train_32x32.mat and test_32x32.mat, in paths.data/svhn or downloaded to it")}
    num_classes, train_size = 10, 73_257
    folder, md5 = "svhn", SVHN_MD5

    def sources(self) -> list[Source]:
        from torchvision import datasets

        return [Source(*datasets.SVHN.split_list[split]) for split in ("train", "test")]

    def load(self, root: str, seed: int, device: torch.device) -> ImageData:
        train, test = self._splits(root, seed, lambda folder, split: digits(folder / f"{split}_32x32.mat"))
        grey = [127.5] * 3  # scales [0, 255] to [-1, 1], as Accordion's code does
        return ImageData(train, test, grey, grey, 4 * self.augment, False, seed, device, cutout=self.cutout)


def digits(file: Path) -> tuple[Tensor, Tensor]:
    """Read images [n, 3, 32, 32] in uint8 and labels [n] of an SVHN file.

    The file contains `X` [32, 32, 3, n] and `y` [n, 1], where 10 stands for the digit 0.
    """
    from scipy.io import loadmat  # takes a third of a second to import

    try:
        found = loadmat(file)
        images = torch.from_numpy(np.ascontiguousarray(found["X"].transpose(3, 2, 0, 1)))
        return images.view(-1, 3, 32, 32), torch.from_numpy(found["y"].astype(np.int64).ravel() % 10)
    except Exception as error:  # a broken file may raise anything
        raise fetch.not_readable(file, error) from error
