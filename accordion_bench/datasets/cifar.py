"""CIFAR-10 and CIFAR-100, read from their original files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.datasets import checksums, cifar_file, fetch
from accordion_bench.datasets.fetch import Source
from accordion_bench.datasets.images import ImageData, ImageDataset
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options

TIMEOUT = 10.0  # seconds without data from the server before a download fails
ORIGINAL = "the original files, in paths.data or downloaded to it"
CUTOUT = "side in pixels of a square cut out of each training image; 0 = none"
CHECK = "compare the files with the published md5 sums, once; false = accept modified files"
TENS = ([f"data_batch_{i}" for i in range(1, 6)], ["test_batch"])
# published sums of the Python version; torchvision has the same ones but takes seconds to import
MD5 = {
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


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from ImageDataset.description.idle(cls, options, context)
    if options.get("augment") is False:
        yield "rotation", "dataset.augment is false"


@with_options
class Cifar(ImageDataset):
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

    in_channels, image_size = 3, 32
    train_size = 50_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_classes = self.classes
        self.folder = {10: "cifar-10-batches-py", 100: "cifar-100-python"}[self.classes]
        self.train_files, self.test_files = {10: TENS, 100: (["train"], ["test"])}[self.classes]

    def prepare(self, root: str) -> None:
        def sources() -> list[Source]:
            from torchvision.datasets import CIFAR10, CIFAR100  # imported only for a download: takes seconds

            theirs = {10: CIFAR10, 100: CIFAR100}[self.num_classes]
            return [Source(theirs.url, theirs.filename, theirs.tgz_md5)]

        found = fetch.ensure(root, self.folder, self.files, sources, TIMEOUT)
        if self.check:
            checksums.refuse_changed(found, {name: MD5[self.num_classes][name] for name in self.files})

    @property
    def files(self) -> list[str]:
        return [*self.train_files, *self.test_files]

    def load(self, root: str, seed: int, device: torch.device) -> ImageData:
        folder = fetch.find(root, self.folder, self.files) or Path(root, self.folder)
        train, test = (
            batches([folder / name for name in names], self.num_classes)
            for names in (self.train_files, self.test_files)
        )
        fetch.refuse_size("training", self.train_size, len(train[1]), folder)
        train, test = self.cut(train, test, seed)
        mean, std = NORMAL[self.num_classes]
        padding, rotation = (4, self.rotation) if self.augment else (0, 0.0)
        return ImageData(train, test, mean, std, padding, self.augment, seed, device, rotation, self.cutout)


def batches(files: list[Path], classes: int) -> tuple[Tensor, Tensor]:
    """Read the images [n, 3, 32, 32] in uint8 and labels [n] of several files in the CIFAR format, concatenated.

    Raises:
        ConfigError: a file is not in that format.
    """
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
