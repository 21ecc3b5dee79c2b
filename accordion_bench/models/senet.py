"""SE-ResNet-18 in its CIFAR form: basic blocks with squeeze and excitation."""

import torch.nn.functional as F
from torch import Tensor, nn

from accordion_bench.models.resnet import kaiming_
from accordion_bench.options.option import Choice, option, with_options

REDUCTION = 16


def _conv_bn(channels_in: int, channels: int, size: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels, size, stride, size // 2), nn.BatchNorm2d(channels))


class SEBlock(nn.Module):
    """relu(s y + shortcut(x)), y two 3x3 convolutions each with BatchNorm and ReLU, s [C] a gate from y's means."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _conv_bn(channels_in, channels, 3, stride), _conv_bn(channels, channels, 3, 1)
        self.squeeze = nn.Linear(channels, channels // REDUCTION)
        self.excite = nn.Linear(channels // REDUCTION, channels)
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if same else _conv_bn(channels_in, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv2(F.relu(self.conv1(x))))
        gate = self.excite(F.relu(self.squeeze(y.mean((2, 3))))).sigmoid()
        return F.relu(gate[:, :, None, None] * y + self.shortcut(x))


@with_options
class SENet18(nn.Module):
    """ResNet-18 with SE blocks (two linear layers, reduction 16), biased convolutions, and a ReLU after the second BN.

    Args:
        in_channels, num_classes: numbers of input channels and of classes.

    Source: Hu et al. 2018 (arXiv 1709.01507); the variant is that of the Accordion experiments.
    """

    chosen_as = {
        "senet18": Choice(
            "SE-ResNet-18, the SENet of the Accordion paper: biased convolutions, ReLU after the second BatchNorm"
        )
    }

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        stage4: int = option(
            "channels of the last stage; 516 as in Accordion's code gives its 11,389,726 parameters",
            default=512,
            at_least=REDUCTION,
        ),
    ) -> None:
        super().__init__()
        self.stem = _conv_bn(in_channels, 64, 3, 1)
        blocks, channels = [], 64
        for width, stride in ((64, 1), (128, 2), (256, 2), (stage4, 2)):
            blocks += [SEBlock(channels, width, stride), SEBlock(width, width, 1)]
            channels = width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, num_classes)
        kaiming_(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(F.relu(self.stem(x)))
        return self.fc(y.mean((2, 3)))
