"""VGG with BatchNorm, GoogLeNet and DenseNet-BC in their CIFAR forms."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion_bench.models.resnet import kaiming_
from accordion_bench.options.checks import ValueRefused
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


# channels of the branches: 1x1; 3x3 after a 1x1; 5x5 after a 1x1; 1x1 after pooling (Szegedy et al. 2015, table 1)
BEFORE_FIRST_POOLING = [(64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)]
BEFORE_SECOND_POOLING = [
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
]
LAST = [(256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)]


def _conv(channels_in: int, channels: int, size: int) -> nn.Sequential:
    convolution = nn.Conv2d(channels_in, channels, size, padding=size // 2)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


class Inception(nn.Module):
    """Four parallel branches; the 5x5 branch consists of two 3x3 convolutions."""

    def __init__(self, channels: int, b1: int, reduce3: int, b3: int, reduce5: int, b5: int, pool: int) -> None:
        super().__init__()
        self.branch1 = _conv(channels, b1, 1)
        self.branch3 = nn.Sequential(_conv(channels, reduce3, 1), _conv(reduce3, b3, 3))
        self.branch5 = nn.Sequential(_conv(channels, reduce5, 1), _conv(reduce5, b5, 3), _conv(b5, b5, 3))
        self.branch_pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(channels, pool, 1))
        self.channels = b1 + b3 + b5 + pool

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch3(x), self.branch5(x), self.branch_pool(x)], 1)


class GoogLeNet(nn.Module):
    """Convolutions with bias and BatchNorm; 6,166,250 parameters with 10 classes, as in the Accordion experiments.

    Source: Szegedy et al. 2015 (arXiv 1409.4842).
    """

    chosen_as = {
        "googlenet": Choice(
            "3x3 stem, no auxiliary heads, as in the Accordion paper: 6,166,250 parameters with 10 classes (Szegedy et "
            "al. 2015)"
        )
    }

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [_conv(in_channels, 192, 3)]
        channels = 192
        for group in (BEFORE_FIRST_POOLING, BEFORE_SECOND_POOLING, LAST):
            if group is not BEFORE_FIRST_POOLING:
                layers.append(nn.MaxPool2d(3, 2, 1))
            for branches in group:
                block = Inception(channels, *branches)
                layers.append(block)
                channels = block.channels
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(channels, num_classes)
        kaiming_(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.features(x).mean((2, 3)))


class DenseLayer(nn.Module):
    """x -> [h(x), x], h: BN, ReLU, 1x1 convolution to 4 growth channels, BN, ReLU, 3x3 convolution to growth."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.relu(self.bn1(x)))
        return torch.cat([self.conv2(F.relu(self.bn2(h))), x], 1)


class Transition(nn.Module):
    """BN, ReLU, 1x1 convolution to fewer channels, 2x2 mean pooling."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(channels_in), nn.Conv2d(channels_in, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.bn(x))), 2)


@with_options
class DenseNet(nn.Module):
    """Dense blocks of bottleneck layers; a transition between two blocks halves the resolution.

    Source: Huang et al. 2017 (arXiv 1608.06993). The defaults are those of the Accordion experiments: 1,000,618
    parameters with 10 classes.
    """

    min_size = 8  # halved three times
    chosen_as = {
        "densenet": Choice(
            "DenseNet-BC as in the Accordion paper: 1,000,618 parameters with 10 classes (Huang et al. 2017)"
        )
    }

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        growth: int = option("channels added per layer", default=12, at_least=1),
        blocks: Sequence[int] = option("number of layers of each dense block", default=(6, 12, 24, 16)),
        reduction: float = option(
            "fraction of the channels kept by a transition, rounded down", default=0.5, above=0, at_most=1
        ),
    ) -> None:
        super().__init__()
        if not blocks or not all(type(count) is int and count > 0 for count in blocks):
            raise ValueRefused("blocks", "a list of integers of at least 1", blocks, [6, 12, 24, 16])
        channels = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)]
        for block, count in enumerate(blocks):
            if block:
                kept = max(1, int(channels * reduction))
                layers.append(Transition(channels, kept))
                channels = kept
            for _ in range(count):
                layers.append(DenseLayer(channels, growth))
                channels += growth
        self.features = nn.Sequential(*layers)
        self.min_size = 2 ** (len(blocks) - 1)
        self.bn, self.fc = nn.BatchNorm2d(channels), nn.Linear(channels, num_classes)
        kaiming_(self)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(self.features(x)))
        return self.fc(y.mean((2, 3)))
