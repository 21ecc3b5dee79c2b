"""ResNets in their CIFAR form, also with squeeze and excitation: a 3x3 stem, and no pooling before the last layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from accordion_bench.options import checks
from accordion_bench.options.option import Choice, option, with_options


def kaiming_(model: nn.Module) -> None:
    """Initialise convolutions: weights from N(0, 2 / fan_out), biases 0; skip other layers (He et al. 2015)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _conv3x3(channels_in: int, channels: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)


def _conv1x1(channels_in: int, channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, 1, stride, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: `A`, subsample and pad with zeros; or `B`, 1x1 convolution and BatchNorm."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv3x3(channels_in, channels, stride), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = _conv3x3(channels, channels, 1), nn.BatchNorm2d(channels)
        self.stride, self.padding = stride, channels - channels_in
        self.shortcut: nn.Module | None = None
        if shortcut == "B" and (stride != 1 or self.padding):
            self.shortcut = nn.Sequential(_conv1x1(channels_in, channels, stride), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif self.stride != 1 or self.padding:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.padding))
        return F.relu(y + x)


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions, the last with 4 x channels; shortcuts are option B."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int, shortcut: str) -> None:
        super().__init__()
        checks.choice("shortcut", shortcut, ["B"])
        wide = self.expansion * channels
        self.conv1, self.bn1 = _conv1x1(channels_in, channels), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = _conv3x3(channels, channels, stride), nn.BatchNorm2d(channels)
        self.conv3, self.bn3 = _conv1x1(channels, wide), nn.BatchNorm2d(wide)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != wide:
            self.shortcut = nn.Sequential(_conv1x1(channels_in, wide, stride), nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stages of blocks; every stage after the first halves the resolution.

    Args:
        widths: channels of each stage, before the block's expansion.
        blocks: blocks of each stage.
        shortcut: `A` (He et al.'s CIFAR networks) or `B` (ResNet-18).
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        widths: list[int],
        blocks: list[int],
        shortcut: str = "A",
        block: type[BasicBlock | Bottleneck] = BasicBlock,
    ) -> None:
        super().__init__()
        checks.choice("shortcut", shortcut, ["A", "B"])
        self.conv, self.bn = _conv3x3(in_channels, widths[0], 1), nn.BatchNorm2d(widths[0])
        stages, channels = [], widths[0]
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            layers = []
            for i in range(count):
                layers.append(block(channels, width, 2 if stage and not i else 1, shortcut))
                channels = block.expansion * width
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, num_classes)
        kaiming_(self)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stages(F.relu(self.bn(self.conv(x))))
        return self.fc(y.mean((2, 3)))


@with_options
class CifarResNet(ResNet):
    """ResNet-(6n+2) of He et al. 2016, section 4.2: ResNet-20 on CIFAR-10 has 269,722 parameters."""

    chosen_as = {
        f"resnet{depth}": Choice(
            "He et al. 2016 in the CIFAR form: widths 16, 32, 64, parameter-free shortcuts", {"depth": depth}
        )
        for depth in (8, 20, 32, 56, 110)
    }

    def __init__(
        self, in_channels: int, num_classes: int, depth: int = option("6n + 2", default=20, at_least=8)
    ) -> None:
        if (depth - 2) % 6:
            raise checks.ValueRefused("depth", "6n + 2", depth, 6 * max(1, round((depth - 2) / 6)) + 2)
        super().__init__(in_channels, num_classes, [16, 32, 64], [(depth - 2) // 6] * 3, "A")


WIDE = "3x3 stem, widths 64 to 512, 1x1 projection shortcuts"
BOTTLENECK = "3x3 stem, bottleneck blocks, 1x1 projection shortcuts"


class ResNet18(ResNet):
    """ResNet-18 with a 3x3 stem, as in Accordion's CIFAR runs."""

    chosen_as = {"resnet18": Choice(f"{WIDE}: 11,173,962 parameters with 10 classes")}

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes, [64, 128, 256, 512], [2, 2, 2, 2], "B")


class ResNet34(ResNet):
    """ResNet-34 with a 3x3 stem."""

    chosen_as = {"resnet34": Choice(f"{WIDE}: 21,282,122 parameters with 10 classes")}

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes, [64, 128, 256, 512], [3, 4, 6, 3], "B")


class ResNet50(ResNet):
    """ResNet-50 with a 3x3 stem, bottleneck blocks."""

    chosen_as = {"resnet50": Choice(f"{BOTTLENECK}: 23,520,842 parameters with 10 classes")}

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes, [64, 128, 256, 512], [3, 4, 6, 3], "B", Bottleneck)


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
