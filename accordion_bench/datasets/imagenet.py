"""ImageNet: a folder of pictures with a known number of classes and images."""

from accordion_bench.datasets.decoded_images import WORKERS
from accordion_bench.datasets.image_folder import ImageFolder
from accordion_bench.options.option import Choice, option, with_options


@with_options
class ImageNet(ImageFolder):
    """1,281,167 training and 50,000 evaluation images of 1,000 classes (Russakovsky et al. 2015, arXiv 1409.0575).

    The files are never downloaded. For another folder of this form set `classes` and `train_size`, or use
    `dataset=folder`, which counts them.
    """

    classes: int = option(default=1000, at_least=2)
    train_size: int = option(default=1_281_167, at_least=1)
    image_size: int = option(default=224, at_least=1)
    folder: str = option(default="imagenet")
    workers: int = option(WORKERS, default=4, at_least=0)

    counted = ()
    instead = "dataset=cifar10"
    chosen_as = {
        "imagenet": Choice(
            "paths.data/imagenet/{train,val}/CLASS/*.JPEG; another folder of pictures: dataset=folder",
            leaves_out=("test_share", "fingerprint", "labels"),
        )
    }

    def wanted(self) -> str:
        return f"the images {self.folder}/{{train,val}}/CLASS/*.JPEG"
