"""Small models that tests name by `_target_`."""

from torch import Tensor, nn

from accordion_bench.models.resnet import CifarResNet


class Plain(nn.Module):
    """Two convolutions without BatchNorm."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(16, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ResNetInDouble(CifarResNet):
    """ResNet in float64, so that rounding does not move an entry across a threshold."""

    def __init__(self, in_channels: int, num_classes: int, depth: int) -> None:
        super().__init__(in_channels, num_classes, depth)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.double())


class OneLayer(nn.Module):
    """Logistic regression: only an output layer."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64 * in_channels, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class DropoutNet(nn.Module):
    """BatchNorm and dropout between two convolutions."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, 16, 3, 2, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Conv2d(16, 16, 3),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(16, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)
