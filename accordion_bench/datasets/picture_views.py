"""Model inputs from picture files: random crops and flips for training, the central square for evaluation."""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from accordion_bench.datasets import pictures
from accordion_bench.datasets.dataset import Batches
from accordion_bench.datasets.images import normalised, per_channel
from accordion_bench.datasets.loader import Loader, Upload, Uploaded
from accordion_bench.tensors import keyed_rng

MEAN = [255 * m for m in (0.485, 0.456, 0.406)]  # constants of torchvision's reference training, in units of uint8
STD = [255 * s for s in (0.229, 0.224, 0.225)]
ATTEMPTS = 10  # number of random crops tried
HELD_OUT = -1  # used as epoch: a training image without augmentation


class Pictures(Protocol):
    """Protocol of a collection of encoded pictures with classes.

    Attributes:
        labels: classes of all pictures, array [n].
    """

    @property
    def labels(self) -> np.ndarray: ...

    def only(self, indices: Tensor) -> Any:
        """Return the pictures with these indices, in this order."""

    def with_others(self, others: Any) -> Any:
        """Append other pictures of the same type."""

    def open(self, index: int) -> Image.Image:
        """Decode one picture in colour.

        Raises:
            Unreadable: the picture cannot be decoded; names it and the reason.
        """

    def sides(self, indices: Sequence[int]) -> Iterator[int]:
        """Yield the shorter side in pixels of those pictures that can be read."""

    def to_examine(self, indices: Sequence[int]) -> Iterable[Path]:
        """Return files to check before a run."""

    def identities(self) -> Iterator[bytes]:
        """Yield the content of a fingerprint."""


@dataclass(frozen=True)
class Files:
    """Names and classes of many picture files, in arrays; Python lists would use hundreds of megabytes per process.

    Args:
        folder: folder that the names are relative to.
        names, labels: arrays [n].
    """

    folder: Path
    names: np.ndarray
    labels: np.ndarray

    def only(self, indices: Tensor) -> "Files":
        """Return the pictures with these indices, in this order."""
        return Files(self.folder, self.names[indices.numpy()], self.labels[indices.numpy()])

    def with_others(self, others: "Files") -> "Files":
        """Append other pictures of the same folder."""
        both = np.concatenate([self.names, others.names]), np.concatenate([self.labels, others.labels])
        return Files(self.folder, *both)

    def path(self, index: int) -> Path:
        """Return the path of one picture."""
        return self.folder / os.fsdecode(self.names[index])

    def open(self, index: int) -> Image.Image:
        """See `Pictures`."""
        return pictures.opened(self.path(index))

    def sides(self, indices: Sequence[int]) -> Iterator[int]:
        """See `Pictures`."""
        return pictures.sides(map(self.path, indices))

    def to_examine(self, indices: Sequence[int]) -> Iterable[Path]:
        """See `Pictures`."""
        return map(self.path, indices)

    def identities(self) -> Iterator[bytes]:
        """Yield names and sizes."""
        place = os.fsencode(self.folder)
        for name in self.names:
            try:
                size = os.stat(os.path.join(place, name)).st_size
            except OSError:  # a broken link; `refuse_broken` reports it
                size = -1
            yield b"%s %d\n" % (name, size)


class Views(Dataset):
    """Data set of model inputs, indexed by (epoch, sample), or by (None, sample) for test images.

    Args:
        train, test: the pictures.
        size: height and width in pixels.
        augment: whether training images get random crops and flips, keyed by (seed, epoch, sample).
        seed: seed of the run.
    """

    def __init__(self, train: Pictures, test: Pictures, size: int, augment: bool, seed: int) -> None:
        self.train, self.test, self.size, self.augment, self.seed = train, test, size, augment, seed

    def __getitem__(self, key: tuple[int | None, int]) -> tuple[Tensor, int]:
        """Return image [3, size, size] in uint8 and class for a key (epoch, index); epoch None = test image."""
        epoch, sample = key
        files = self.test if epoch is None else self.train
        image = files.open(sample)
        if epoch in (None, HELD_OUT) or not self.augment:
            image = central(image, self.size)
        else:
            draws = torch.rand(ATTEMPTS + 1, 4, generator=keyed_rng.generator(self.seed, "augmentation", epoch, sample))
            image = image.crop(box(*image.size, draws[1:].tolist()))
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
            if draws[0, 0] < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), int(files.labels[sample])


def box(width: int, height: int, draws: Iterable[list[float]]) -> tuple[int, int, int, int]:
    """Return a random crop (left, top, right, bottom) of an image, as torchvision's RandomResizedCrop draws it.

    Area A = (0.08 + 0.92 u1) width x height, aspect ratio r = (3/4) (16/9)^u2, w = sqrt(A r), h = sqrt(A / r). The
    first crop that fits is placed by u3 and u4. If none fits, the largest central crop with an allowed ratio is used.

    Args:
        width, height: size of the image in pixels.
        draws: [attempts, 4], uniform in [0, 1).
    """
    for u in draws:
        area, ratio = (0.08 + 0.92 * u[0]) * width * height, 0.75 * (16 / 9) ** u[1]
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(u[2] * (width - w + 1)), int(u[3] * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def central(image: Image.Image, size: int) -> Image.Image:
    """Resize the shorter side of an image to 8/7 of `size` and return the central square."""
    shorter = max(size, round(size * 8 / 7))
    short, long = sorted(image.size)
    longer = shorter * long // short
    width, height = (shorter, longer) if image.width <= image.height else (longer, shorter)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))


class FolderData:
    """Images that separate processes read from files ahead of use.

    Args:
        views: model inputs to read.
        workers: number of processes.
        device: destination of batches.
    """

    def __init__(self, views: Views, workers: int, device: torch.device) -> None:
        self.train_size, self.test_size = len(views.train.labels), len(views.test.labels)
        self.train_labels = torch.from_numpy(views.train.labels)
        self.device, self.mean, self.std = device, per_channel(MEAN, device), per_channel(STD, device)
        self.loader = Loader(views, workers, pin=device.type == "cuda")
        self.upload = Upload(device)

    def train_batches(self, epoch: int, batches: Iterable[Tensor]) -> Batches:
        """Yield augmented, normalised images and labels for each tensor of indices."""
        return self._read(epoch, batches)

    def test_batches(self, batches: Iterable[Tensor]) -> Batches:
        """Yield normalised images and labels for each tensor of indices."""
        return self._read(None, batches)

    def validation_batches(self, batches: Iterable[Tensor]) -> Batches:
        """Yield normalised training images without augmentation, and labels, for each tensor of indices."""
        return self._read(HELD_OUT, batches)

    def _read(self, epoch: int | None, batches: Iterable[Tensor]) -> Batches:
        ready = None
        # one batch ahead: copies to a GPU overlap with its work, and the reading pass has ended at the last batch
        for images, labels in self.loader.read([(epoch, i) for i in indices.tolist()] for indices in batches):
            if ready is not None:
                yield self._normalised(ready)
            ready = self.upload.send((images, labels))
        if ready is not None:
            yield self._normalised(ready)

    def _normalised(self, sent: Uploaded) -> tuple[Tensor, Tensor]:
        images, labels = self.upload.receive(sent)
        return normalised(images, self.mean, self.std), labels
