"""ImageNet: a folder of pictures of which the numbers are known."""

from typing import Any

from accordion_bench.datasets.image_folder import ImageFolder


class ImageNet(ImageFolder):
    """1,281,167 training and 50,000 evaluation images of 1,000 classes (Russakovsky et al. 2015, arXiv 1409.0575).

    Never downloaded. Another folder of this form: say its `classes` and `train_size`, or take `dataset=folder`, which
    counts them.

    Args:
        folder, classes, train_size, image_size, augment, workers: see `ImageFolder`.
        limit_eval, validation, subset, sharding, alpha: see there.
    """

    counted = ()
    usual = {"classes": 1000, "train_size": 1_281_167, "image_size": 224}
    instead = "dataset=cifar10"

    def __init__(
        self,
        folder: str = "imagenet",
        classes: int = 1000,
        train_size: int = 1_281_167,
        image_size: int = 224,
        **options: Any,
    ) -> None:
        super().__init__(folder, classes, train_size, image_size, **options)

    def wanted(self) -> str:
        return f"the images {self.folder}/{{train,val}}/CLASS/*.JPEG"
