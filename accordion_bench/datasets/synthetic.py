"""Synthetic images: one random pattern per class, plus noise."""

import torch

from accordion_bench.datasets.images import ImageData, ImageDataset
from accordion_bench.options.option import NEAREST, Choice, option, with_options
from accordion_bench.tensors import keyed_rng


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
