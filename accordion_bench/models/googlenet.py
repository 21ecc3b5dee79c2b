"""GoogLeNet in its CIFAR form: a 3x3 stem, nine inception blocks, no auxiliary heads."""

import torch
from torch import Tensor, nn

from accordion_bench.models.resnet import kaiming_
from accordion_bench.options.option import Choice

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
