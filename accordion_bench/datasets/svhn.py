"""SVHN (house numbers), read from its original files."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from accordion_bench.datasets import checksums, fetch
from accordion_bench.datasets.cifar import CHECK, CUTOUT, TIMEOUT
from accordion_bench.datasets.fetch import Source
from accordion_bench.datasets.images import ImageData, ImageDataset
from accordion_bench.options.option import Choice, option, with_options

FOLDER = "svhn"
MD5 = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}


@with_options
class SVHN(ImageDataset):
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
    in_channels, num_classes, image_size = 3, 10, 32
    train_size = 73_257

    def prepare(self, root: str) -> None:
        def sources() -> list[Source]:
            from torchvision import datasets  # imported only for a download: takes seconds

            return [Source(*datasets.SVHN.split_list[split]) for split in ("train", "test")]

        found = fetch.ensure(root, FOLDER, list(MD5), sources, TIMEOUT)
        if self.check:
            checksums.refuse_changed(found, MD5)

    def load(self, root: str, seed: int, device: torch.device) -> ImageData:
        folder = fetch.find(root, FOLDER, list(MD5)) or Path(root, FOLDER)
        train, test = (digits(folder / f"{split}_32x32.mat") for split in ("train", "test"))
        fetch.refuse_size("training", self.train_size, len(train[1]), folder)
        train, test = self.cut(train, test, seed)
        grey = [127.5] * 3  # scales [0, 255] to [-1, 1], as Accordion's code does
        return ImageData(train, test, grey, grey, 4 * self.augment, False, seed, device, cutout=self.cutout)


def digits(file: Path) -> tuple[Tensor, Tensor]:
    """Return images [n, 3, 32, 32] in uint8 and labels [n] of a file in the SVHN format.

    The file contains `X` [32, 32, 3, n] and `y` [n, 1], where 10 stands for the digit 0.

    Raises:
        ConfigError: the file is not in that format.
    """
    from scipy.io import loadmat  # takes a third of a second to import

    try:
        found = loadmat(file)
        images = torch.from_numpy(np.ascontiguousarray(found["X"].transpose(3, 2, 0, 1)))
        return images.view(-1, 3, 32, 32), torch.from_numpy(found["y"].astype(np.int64).ravel() % 10)
    except Exception as error:  # a broken file may raise anything
        raise fetch.not_readable(file, error) from error
