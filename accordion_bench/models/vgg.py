"""VGG with BatchNorm in its CIFAR form."""

from torch import Tensor, nn

from accordion_bench.models.resnet import kaiming_
from accordion_bench.options.option import Choice, option, with_options

WIDTHS = (1, 2, 4, 8, 8)  # channels of the groups, as multiples of those of the first
WIDTH = 64
CONVOLUTIONS = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}  # configurations D and E


@with_options
class VGG(nn.Module):
    """Five groups of 3x3 convolutions (with bias, BatchNorm, ReLU), each with 2x2 max pooling at its end; a classifier.

    `classifier=paper` is 512 -> 512 -> 512 -> classes with ReLU and dropout 0.5 (VGG-19: 20,565,834 parameters with 10
    classes).

    Source: Simonyan and Zisserman 2015 (arXiv 1409.1556).
    """

    min_size = 32  # halved five times
    chosen_as = {
        "vgg16": Choice(
            "configuration D with BatchNorm: 14,728,266 parameters with 10 classes (Simonyan and Zisserman 2015)"
        ),
        "vgg19": Choice(
            "configuration E with BatchNorm: 20,040,522 parameters with 10 classes (Simonyan and Zisserman 2015)",
            {"depth": 19},
        ),
    }

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        depth: int = option(default=16, choices=(16, 19)),
        classifier: str = option(
            "linear = one layer, usual on CIFAR; paper = three with dropout, as in the Accordion paper",
            default="linear",
            choices=("linear", "paper"),
        ),
        width: int | None = option(
            "channels of the first group; null = 64. Time and parameters grow with its square",
            default=None,
            at_least=1,
            instead=WIDTH,
        ),
    ) -> None:
        super().__init__()
        first = WIDTH if width is None else width
        layers: list[nn.Module] = []
        channels = in_channels
        for times, count in zip(WIDTHS, CONVOLUTIONS[depth], strict=True):
            for _ in range(count):
                wide = first * times
                layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU(inplace=True)]
                channels = wide
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        hidden: list[nn.Module] = []
        if classifier == "paper":
            for _ in range(2):
                hidden += [nn.Dropout(0.5), nn.Linear(channels, channels), nn.ReLU(inplace=True)]
        self.classifier = nn.Sequential(*hidden, nn.Linear(channels, num_classes))
        kaiming_(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))
