"""DenseNet-BC in its CIFAR form."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion_bench.models.resnet import kaiming_
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.option import Choice, option, with_options


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
