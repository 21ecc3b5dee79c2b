"""Synthetic images: one random pattern for each class, plus noise."""

import torch

from accordion_bench.datasets.images import ImageData, ImageDataset
from accordion_bench.options import checks
from accordion_bench.tensors import keyed_rng


class Synthetic(ImageDataset):
    """Class patterns from N(0, 1) plus noise from N(0, noise^2); for speed measurements and tests, not for results.

    Args:
        size: height and width in pixels.
        channels, classes: of the images.
        train_size, test_size: number of images.
        noise: standard deviation of the noise; larger = harder.
        validation, subset, limit_eval, sharding, alpha: see `ImageDataset`.
    """

    reads_files = False

    def __init__(
        self,
        size: int = 32,
        channels: int = 3,
        classes: int = 10,
        train_size: int = 2048,
        test_size: int = 512,
        noise: float = 1.0,
        **options,
    ) -> None:
        super().__init__(**options)
        sizes = {"size": size, "channels": channels, "train_size": train_size, "test_size": test_size}
        for key, value in sizes.items():
            checks.integer(key, value, at_least=1)
        self.size, self.image_size, self.in_channels = size, size, channels
        self.num_classes = checks.integer("classes", classes, at_least=2)
        self.train_size, self.test_size = train_size, test_size
        self.noise = checks.number("noise", noise, at_least=0, instead=1)

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
