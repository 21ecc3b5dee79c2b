"""torchvision's classifiers in their ImageNet form."""

from torch import Tensor, nn

from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.option import Choice, option, with_options

# smallest image side that a family accepts, if it is not 1; maxvit and vit accept no side above 224
MIN_SIZE = {
    "alexnet": 63,
    "convnext": 32,
    "densenet": 29,
    "googlenet": 15,
    "inception": 75,
    "maxvit": 221,
    "squeezenet1_0": 21,
    "squeezenet1_1": 17,
    "swin": 4,
    "vgg": 32,
    "vit": 224,
}

IMAGENET_SIZES = {
    "resnet18": "11,689,512",
    "resnet50": "25,557,032",
    "resnet101": "44,549,160",
    "vgg16": "138,357,544",
}


@with_options
class Torchvision(nn.Module):
    """Classifier of torchvision with random initial weights, never pretrained ones.

    Networks with auxiliary heads (googlenet, inception_v3) are built without them, so that they return only logits.

    Args:
        in_channels: 3, because torchvision's networks take colour images.
        num_classes: number of classes.

    Attributes:
        min_size: smallest image side in pixels.
        usual_data: data set that is assumed if none is named.
    """

    min_size = 1
    usual_data = "imagenet"
    chosen_as = {
        "torchvision": Choice(
            "any classifier of torchvision by its name, random weights: model=torchvision model.name=mobilenet_v2"
        ),
        **{
            f"imagenet_{name}": Choice(
                f"torchvision's {name}, the ImageNet form, random weights: {size} parameters with 1,000 classes",
                {"name": name},
            )
            for name, size in IMAGENET_SIZES.items()
        },
    }

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        name: str = option("name in torchvision.models.list_models()", default="resnet18"),
    ) -> None:
        super().__init__()
        from torchvision import models  # imported only here: takes seconds

        names = models.list_models(module=models)
        if name not in names:
            raise ValueRefused("name", "a classifier of torchvision", name, checks.closest(str(name), names))
        if in_channels != 3:
            raise ConfigError(
                f"model must be one that takes {in_channels} channel{'s' if in_channels > 1 else ''} with this dataset,"
                f" got torchvision's {name}, which takes 3; type model=resnet18, or a dataset of colour images"
            )
        plain = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
        self.network = models.get_model(name, weights=None, num_classes=num_classes, **plain)
        self.min_size = next((size for family, size in MIN_SIZE.items() if name.startswith(family)), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)
