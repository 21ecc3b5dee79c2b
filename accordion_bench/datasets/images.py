"""Image classification data in memory: batches by index, augmentation in one vectorised pass."""

from collections.abc import Iterable

import torch
from torch import Tensor

from accordion_bench import rng
from accordion_bench.datasets.base import Batches, Dataset


class ImageData:
    """Images and labels on the device.

    Args:
        train, test: (images [n, C, H, W], labels [n]); uint8 or float.
        mean, std: per channel, in the units of the images.
        padding: pixels of random crop (0 = none) on training images.
        flip: random horizontal flip of training images.
        seed: keys the augmentation by (seed, epoch, sample), so that it depends on no placement.
        device: where everything lives.
    """

    def __init__(self, train, test, mean, std, padding: int, flip: bool, seed: int, device: torch.device) -> None:
        self.train_images, self.train_labels = (x.to(device) for x in train)
        self.test_images, self.test_labels = (x.to(device) for x in test)
        shape = (1, -1, 1, 1)
        self.mean = torch.tensor(mean, dtype=torch.float32, device=device).view(shape)
        self.std = torch.tensor(std, dtype=torch.float32, device=device).view(shape)
        self.padding, self.flip, self.seed = padding, flip, seed
        self.train_size, self.test_size = len(self.train_labels), len(self.test_labels)

    def begin_epoch(self, epoch: int) -> None:
        """Draw this epoch's crops and flips, one for each sample."""
        generator = rng.generator(self.seed, "augmentation", epoch)
        device = self.train_images.device
        if self.padding:
            offsets = torch.randint(0, 2 * self.padding + 1, (self.train_size, 2), generator=generator)
            self._offsets = offsets.to(device)
        if self.flip:
            self._flips = torch.randint(0, 2, (self.train_size,), generator=generator).bool().to(device)

    def train_batches(self, epoch: int, batches: Iterable[Tensor]) -> Batches:
        """Augmented, normalised images and labels for each index tensor in turn."""
        self.begin_epoch(epoch)
        for indices in batches:
            yield self.train_batch(indices.to(self.train_labels.device))

    def test_batches(self, batches: Iterable[Tensor]) -> Batches:
        """Normalised images and labels for each index tensor in turn."""
        for indices in batches:
            yield self.test_batch(indices.to(self.test_labels.device))

    def train_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Augmented, normalised images and labels."""
        images = self.train_images[indices]
        if self.padding or self.flip:
            images = self._augment(images, indices)
        return self._normalise(images), self.train_labels[indices]

    def test_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised images and labels."""
        return self._normalise(self.test_images[indices]), self.test_labels[indices]

    def _normalise(self, images: Tensor) -> Tensor:
        return (images.float() - self.mean) / self.std

    def _augment(self, images: Tensor, indices: Tensor) -> Tensor:
        count, channels, height, width = images.shape
        device = images.device
        rows = torch.arange(height, device=device).expand(count, -1)
        columns = torch.arange(width, device=device).expand(count, -1)
        if self.flip:
            columns = torch.where(self._flips[indices, None], width - 1 - columns, columns)
        if self.padding:
            images = torch.nn.functional.pad(images, (self.padding,) * 4)
            rows = rows + self._offsets[indices, :1]
            columns = columns + self._offsets[indices, 1:]
        sample = torch.arange(count, device=device)[:, None, None, None]
        channel = torch.arange(channels, device=device)[None, :, None, None]
        return images[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


class ImageDataset(Dataset):
    """Images with one label each.

    Args:
        subset, limit_eval, sharding: see `Dataset`.

    Class attributes:
        in_channels, num_classes, image_size: what a model must accept.
    """

    task = "images"
    in_channels: int
    num_classes: int
    image_size: int

    def model_arguments(self) -> dict[str, int]:
        return {"in_channels": self.in_channels, "num_classes": self.num_classes}

    def cut(self, train, test, seed: int):
        """Apply `subset` and `limit_eval` to (images, labels) pairs."""
        if self.subset is not None:
            chosen = torch.randperm(len(train[1]), generator=rng.generator(seed, "subset"))[: self.subset]
            train = tuple(x[chosen] for x in train)
        if self.limit_eval is not None:
            test = tuple(x[: self.limit_eval] for x in test)
        return train, test
