"""CIFAR-10 and CIFAR-100 through torchvision."""

import socket
from pathlib import Path

import torch

from accordion_bench import check
from accordion_bench.check import ConfigError
from accordion_bench.datasets.images import ImageData, ImageDataset

TIMEOUT = 10.0  # seconds that a silent network may take to say anything


class Cifar(ImageDataset):
    """60,000 colour images of 32x32 pixels; random crop (padding 4) and horizontal flip on the 50,000 training images.

    Args:
        classes: 10 or 100.
        augment: false trains on the images as they are.
        subset, limit_eval, sharding: see `ImageDataset`.
    """

    in_channels, image_size = 3, 32
    train_size = 50_000

    def __init__(self, classes: int, augment: bool = True, **options) -> None:
        super().__init__(**options)
        if classes not in (10, 100):
            raise check.ValueRefused("classes", "10 or 100", classes, 10)
        self.num_classes = classes
        self.augment = check.boolean("augment", augment)
        self.folder = {10: "cifar-10-batches-py", 100: "cifar-100-python"}[classes]
        tens = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]
        self.files = {10: tens, 100: ["train", "test", "meta"]}[classes]

    def _open(self, root: str, train: bool, download: bool = False):
        from torchvision import datasets  # takes seconds to import: only runs that need it pay

        reader = {10: datasets.CIFAR10, 100: datasets.CIFAR100}[self.num_classes]
        return reader(root=root, train=train, download=download)

    def prepare(self, root: str) -> None:
        if all((Path(root) / self.folder / name).is_file() for name in self.files):
            return
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(TIMEOUT)
        try:
            self._open(root, train=True, download=True)
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"paths.data must hold the folder {self.folder}, got {root} without it or not whole, and downloading "
                f"failed ({type(error).__name__}); type paths.data=FOLDER, or dataset=digits, which needs no download"
            ) from error
        finally:
            socket.setdefaulttimeout(before)

    def load(self, root: str, seed: int, device: torch.device) -> ImageData:
        def images_and_labels(train: bool):
            part = self._open(root, train)
            return torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets)

        train, test = self.cut(images_and_labels(True), images_and_labels(False), seed)
        # the constants of the Accordion experiments, in units of the uint8 images
        if self.num_classes == 10:
            mean, std = [125.3, 123.0, 113.9], [63.0, 62.1, 66.7]
        else:
            mean, std = [255 * m for m in (0.5071, 0.4865, 0.4409)], [255 * s for s in (0.2673, 0.2564, 0.2762)]
        return ImageData(train, test, mean, std, 4 * self.augment, self.augment, seed, device)
