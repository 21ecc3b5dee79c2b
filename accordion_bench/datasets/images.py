"""Images in memory: batches by index, with vectorised augmentation on the device; digits, and synthetic images."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from accordion_bench.datasets.dataset import Batches, Dataset, Split, part_only
from accordion_bench.options import checks
from accordion_bench.options.option import NEAREST, Choice, option, with_options
from accordion_bench.tensors import keyed_rng


class ImageData:
    """Images and labels on the device.

    Training images are cropped, flipped and rotated (nearest pixel) by one gather from the stored images; pixels
    outside of an image are 0. Then they are normalised, then a square is cut out. Each sample's random numbers in an
    epoch are keyed by (seed, epoch, sample). They do not depend on worker, batch, placement or device.

    Args:
        train, test: (images [n, C, H, W], labels [n]); uint8 or float.
        mean, std: per channel, in the units of the images.
        padding: pixels added to each side of training images before a random crop; 0 = no crop.
        flip: whether training images are flipped horizontally at random.
        seed: key of the augmentation.
        device: device of all tensors.
        rotation: maximum angle of random rotations of training images, in degrees.
        cutout: side in pixels of a square of training images that is set to 0, the mean, after normalisation. Its
            centre is uniform in the image, so that parts may fall outside (DeVries & Taylor 2017, arXiv 1708.04552).
    """

    by_device = True

    def __init__(
        self,
        train,
        test,
        mean,
        std,
        padding: int,
        flip: bool,
        seed: int,
        device: torch.device,
        rotation: float = 0.0,
        cutout: int = 0,
    ) -> None:
        self.train_images, self.train_labels = (x.to(device) for x in train)
        self.test_images, self.test_labels = (x.to(device) for x in test)
        self.mean, self.std = per_channel(mean, device), per_channel(std, device)
        self.padding, self.flip, self.rotation, self.cutout, self.seed = padding, flip, rotation, cutout, seed
        self.train_size, self.test_size = len(self.train_labels), len(self.test_labels)
        self.indexed_on = device
        self.drawn: dict[str, Tensor] = {}  # random numbers of each sample in this epoch

    def begin_epoch(self, epoch: int) -> None:
        """Draw one crop, flip, angle and hole for each sample in this epoch."""
        generator = keyed_rng.generator(self.seed, "augmentation", epoch)
        count = self.train_size
        height, width = self.train_images.shape[2:]
        if self.padding:
            offsets = torch.randint(0, 2 * self.padding + 1, (count, 2), generator=generator)
            self._draws("offsets", offsets)
        if self.flip:
            self._draws("flips", torch.randint(0, 2, (count,), generator=generator).bool())
        if self.rotation:
            draws = torch.rand(count, generator=generator, dtype=torch.float64)
            self._draws("turns", turns((2 * draws - 1) * self.rotation, height, width))
        if self.cutout:
            centres = [torch.randint(0, side, (count,), generator=generator) for side in (height, width)]
            self._draws("holes", torch.stack(centres, 1) - self.cutout // 2)

    def _draws(self, name: str, drawn: Tensor) -> None:
        """Store random numbers on the device, in the memory of the previous epoch's."""
        if name in self.drawn:
            self.drawn[name].copy_(drawn)
        else:
            self.drawn[name] = drawn.to(self.train_images.device)

    def train_batches(self, epoch: int, batches: Iterable[Tensor]) -> Batches:
        self.begin_epoch(epoch)
        for indices in batches:
            yield self.train_batch(indices.to(self.train_labels.device))

    def test_batches(self, batches: Iterable[Tensor]) -> Batches:
        for indices in batches:
            yield self.test_batch(indices.to(self.test_labels.device))

    def validation_batches(self, batches: Iterable[Tensor]) -> Batches:
        for indices in batches:
            at = indices.to(self.train_labels.device)
            yield normalised(self.train_images[at], self.mean, self.std), self.train_labels[at]

    def train_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised images and labels, augmented for the epoch of the last `begin_epoch`."""
        images = self.train_images[indices]
        if self.padding or self.flip or self.rotation:
            images = self._moved(images, indices)
        images = normalised(images, self.mean, self.std)
        if self.cutout:
            images.masked_fill_(self._hole(indices), 0)
        return images, self.train_labels[indices]

    def test_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised images and labels."""
        return normalised(self.test_images[indices], self.mean, self.std), self.test_labels[indices]

    def _moved(self, images: Tensor, indices: Tensor) -> Tensor:
        """Crop, flip and rotate, in this order, by mapping each output pixel back to its source pixel."""
        height, width = images.shape[2:]
        rows = torch.arange(height, device=images.device)[:, None]
        columns = torch.arange(width, device=images.device)
        inside = None
        if self.rotation:
            cos, sin, x, y = self.drawn["turns"][indices].T[:, :, None, None]
            rows, columns = (sin * columns + cos * rows + y) >> 16, (cos * columns - sin * rows + x) >> 16
            inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        if self.flip:
            columns = torch.where(self.drawn["flips"][indices, None, None], width - 1 - columns, columns)
        if self.padding:
            down, right = (self.drawn["offsets"][indices] - self.padding).T[:, :, None, None]
            rows, columns = rows + down, columns + right
            cropped = ((rows >= 0) & (rows < height)) & ((columns >= 0) & (columns < width))
            inside = cropped if inside is None else inside & cropped
        pixels = rows * width + columns
        if inside is not None:
            pixels = torch.where(inside, pixels, height * width)  # index of the appended black pixel
        flat = F.pad(images.flatten(2), (0, 1))
        return flat.gather(2, pixels.flatten(1)[:, None].expand(*images.shape[:2], -1)).view_as(images)

    def _hole(self, indices: Tensor) -> Tensor:
        """Return the mask of pixels to cut out, [B, 1, H, W]."""
        height, width = self.train_images.shape[2:]
        top, left = self.drawn["holes"][indices].T[:, :, None]
        rows = torch.arange(height, device=top.device) - top
        columns = torch.arange(width, device=top.device) - left
        rows, columns = (rows >= 0) & (rows < self.cutout), (columns >= 0) & (columns < self.cutout)
        return (rows[:, :, None] & columns[:, None, :])[:, None]


def turns(degrees: Tensor, height: int, width: int) -> Tensor:
    """Return rotations about the centre of an image in fixed point with 16 fractional bits, as in Pillow.

    The pixel at (row r, column c) comes from row (sin c + cos r + y) >> 16 and column (cos c - sin r + x) >> 16.
    Integers make the result equal on all devices.

    Args:
        degrees: [n], counter-clockwise, float64.
        height, width: size of the image in pixels.

    Returns:
        (cos, sin, x, y) x 2^16, [n, 4], int64.
    """
    cos, sin = torch.deg2rad(degrees).cos(), torch.deg2rad(degrees).sin()
    across, down = 0.5 - width / 2, 0.5 - height / 2  # from the image centre to the centre of the first pixel
    x, y = cos * across - sin * down + width / 2, sin * across + cos * down + height / 2
    return (torch.stack([cos, sin, x, y], 1) * 2**16 + 0.5).floor().long()


def per_channel(values, device: torch.device) -> Tensor:
    """Return values per channel as a tensor [1, C, 1, 1]."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)


def normalised(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return (x - mean) / std in float32, for images [B, C, H, W] and constants [1, C, 1, 1] in their units."""
    return (images.float() - mean).div_(std)


@with_options
class ImageDataset(Dataset):
    """Images with one label each.

    Samples of `validation` (a share below 1, or a number) are chosen by the seed after `subset`. They are not trained
    on but evaluated; `target`, the best epoch and the best weights go by them, so that the test set chooses nothing.
    `limit_eval` holds for each of the two evaluations.

    Example:
        >>> class Noise(ImageDataset):
        ...     in_channels, num_classes, image_size, train_size, test_size = 1, 2, 8, 64, 16
        ...     def load(self, root, seed, device):
        ...         draw = lambda n: (torch.randn(n, 1, 8, 8), torch.arange(n) % 2)
        ...         train, test = self.cut(draw(64), draw(16), seed)
        ...         return ImageData(train, test, [0.5], [0.5], padding=0, flip=False, seed=seed, device=device)
        >>> x, y = Noise(subset=32).load("data", seed=0, device=torch.device("cpu")).train_batch(torch.arange(4))
        >>> x.shape, y.shape
        (torch.Size([4, 1, 8, 8]), torch.Size([4]))
    """

    subset: int | None = part_only("use only N training samples, chosen by the seed")
    limit_eval: int | None = part_only("evaluate on the first N samples only")
    validation: int | float | None = option(
        "training samples, a number or a share below 1, held out to choose the best epoch; null = the test set",
        default=None,
        above=0,
        instead=0.1,
    )
    sharding: str = option(
        "reshuffled in every epoch, static; dirichlet: each worker has a shard with other label proportions",
        default="reshuffled",
        choices=("reshuffled", "static", "dirichlet"),
    )
    alpha: float | None = option(
        "concentration of dirichlet; smaller = fewer labels per worker", default=None, above=0, instead=0.5
    )

    task = "images"
    labelled = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sharding == "dirichlet" and self.alpha is None:
            raise checks.ValueRefused("alpha", "a number above 0 with dataset.sharding=dirichlet", None, 0.5)
        if self.validation is not None and self.validation >= 1:
            checks.integer("validation", self.validation, at_least=1, instead=int(min(self.validation, 5000)))

    @property
    def chance(self) -> float:
        return 1 / self.num_classes

    @property
    def validation_count(self) -> int:
        """Number of training samples that a run holds out.

        Raises:
            ConfigError: the number is 0, or includes all training samples.
        """
        if self.validation is None:
            return 0
        samples = super().train_count
        count = round(self.validation * samples) if self.validation < 1 else int(self.validation)
        if not 0 < count < samples:
            rule = f"a number or a share of the {samples:,} training samples that leaves some on both sides"
            raise checks.ValueRefused("dataset.validation", rule, self.validation, 0.1 if samples > 9 else None)
        return count

    @property
    def train_count(self) -> int:
        return super().train_count - self.validation_count

    def split(self, size: int, seed: int) -> Split:
        if not self.validation_count:
            return Split()
        order = torch.randperm(size, generator=keyed_rng.generator(seed, "validation"))
        held_out, rest = order[: self.validation_count], order[self.validation_count :]
        return Split(rest.sort().values, held_out[: self.limit_eval])

    def model_arguments(self) -> dict[str, int]:
        return {"in_channels": self.in_channels, "num_classes": self.num_classes}

    def example(self, samples: int) -> tuple[Tensor, Tensor]:
        shape = samples, self.in_channels, self.image_size, self.image_size
        return torch.zeros(shape), torch.zeros(samples, dtype=torch.int64)

    def cut(self, train, test, seed: int):
        """Apply `subset` and `limit_eval` to (images, labels) pairs."""
        if self.subset is not None:
            chosen = torch.randperm(len(train[1]), generator=keyed_rng.generator(seed, "subset"))[: self.subset]
            train = tuple(x[chosen] for x in train)
        if self.limit_eval is not None:
            test = tuple(x[: self.limit_eval] for x in test)
        return train, test


@with_options
class Digits(ImageDataset):
    """1,437 training and 360 test images, 10 classes, one channel; no augmentation."""

    in_channels, num_classes, image_size = 1, 10, 8
    train_size = 1437
    reads_files = False
    chosen_as = {
        "digits": Choice(
            "scikit-learn's handwritten digits: 1,437 training and 360 test images of 8x8 pixels, no download"
        )
    }

    def load(self, root: str, seed: int, device: torch.device) -> ImageData:
        # read the file directly, because importing sklearn.datasets takes three seconds
        spec = importlib.util.find_spec("sklearn")
        assert spec is not None and spec.submodule_search_locations
        file = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
        count = self.train_size  # the first four fifths in the file's order; the rest is the test split
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))
        images, labels = table[:, :64].view(-1, 1, 8, 8), table[:, 64].long()
        train, test = self.cut((images[:count], labels[:count]), (images[count:], labels[count:]), seed)
        return ImageData(train, test, [4.88], [6.02], padding=0, flip=False, seed=seed, device=device)


@with_options
class Synthetic(ImageDataset):
    """Class patterns from N(0, 1) plus noise from N(0, noise^2), for speed measurements and tests only."""

    size: int = option("height and width in pixels", default=32, at_least=1, instead=NEAREST)
    channels: int = option(default=3, at_least=1, instead=NEAREST)
    classes: int = option(default=10, at_least=2, instead=NEAREST)
    train_size: int = option(default=2048, at_least=1, instead=NEAREST)
    test_size: int = option(default=512, at_least=1, instead=NEAREST)
    noise: float = option("standard deviation; larger = harder", default=1.0, at_least=0, instead=1)

    reads_files = False
    chosen_as = {"synthetic": Choice("one random pattern per class, plus noise: for speed measurements and tests")}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.image_size, self.in_channels, self.num_classes = self.size, self.channels, self.classes

    def load(self, root: str, seed: int, device: torch.device) -> ImageData:
        generator = keyed_rng.generator(seed, "synthetic")
        shape = (self.in_channels, self.size, self.size)
        patterns = torch.randn(self.num_classes, *shape, generator=generator)

        def draw(count: int):
            labels = torch.randint(0, self.num_classes, (count,), generator=generator)
            return patterns[labels] + self.noise * torch.randn(count, *shape, generator=generator), labels

        train, test = self.cut(draw(self.train_size), draw(self.test_size), seed)
        ones = [1.0] * self.in_channels
        return ImageData(train, test, [0.0] * self.in_channels, ones, padding=0, flip=False, seed=seed, device=device)
