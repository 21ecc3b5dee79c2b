"""Initialisation of convolutions, shared by the image models."""

from torch import nn


def kaiming_(model: nn.Module) -> None:
    """Initialise convolutions: weights from N(0, 2 / fan_out), biases 0; skip other layers (He et al. 2015)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
