"""scikit-learn's handwritten digits: 1,797 real images of 8x8 pixels, shipped with that dependency."""

import importlib.util
from pathlib import Path

import numpy as np
import torch

from accordion_bench.datasets.images import ImageData, ImageDataset
from accordion_bench.options.option import Choice, with_options

TRAIN = 1437  # the first four fifths in the file's order; the rest is the test split


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
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))
        images, labels = table[:, :64].view(-1, 1, 8, 8), table[:, 64].long()
        train, test = self.cut((images[:TRAIN], labels[:TRAIN]), (images[TRAIN:], labels[TRAIN:]), seed)
        return ImageData(train, test, [4.88], [6.02], padding=0, flip=False, seed=seed, device=device)
