"""VGG with BatchNorm in its CIFAR form."""

from torch import Tensor, nn

from accordion_bench.models.weights import kaiming_
from accordion_bench.options import checks

WIDTHS = (1, 2, 4, 8, 8)  # channels of the groups, in those of the first
WIDTH = 64
CONVOLUTIONS = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}  # configurations D and E


class VGG(nn.Module):
    """Five groups of 3x3 convolutions (with bias, BatchNorm, ReLU), each before a 2x2 max pooling; then a classifier.

    Args:
        in_channels, num_classes: of the data set.
        depth: 16 or 19.
        classifier: `linear`: one layer 512 -> classes; `paper`: 512 -> 512 -> 512 -> classes with ReLU and dropout 0.5,
            as in the Accordion experiments (VGG-19: 20,565,834 parameters with 10 classes).
        width: channels of the first group; None = 64, the paper's. Time and parameters grow with its square.

    Raises:
        ConfigError: the depth or the width cannot be, or the classifier is none of the two.

    Source: Simonyan and Zisserman 2015 (arXiv 1409.1556).
    """

    min_size = 32  # halved five times

    def __init__(
        self, in_channels: int, num_classes: int, depth: int, classifier: str = "linear", width: int | None = None
    ) -> None:
        super().__init__()
        if depth not in CONVOLUTIONS:
            raise checks.ValueRefused("depth", "16 or 19", depth, 16)
        checks.choice("classifier", classifier, ["linear", "paper"])
        first = WIDTH if width is None else checks.integer("width", width, at_least=1, instead=WIDTH)
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
