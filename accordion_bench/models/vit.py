"""Vision transformer: an image as a sequence of patches."""

import torch
from torch import Tensor, nn

from accordion_bench.models.transformer import STD, blocks, initialise_
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.option import Choice, option, with_options


@with_options
class ViT(nn.Module):
    """logits = W mean(norm(blocks(d(patches of the image, as vectors, + P)))) + b, d dropout.

    (C p^2 + 1) d + N d + L (12 d^2 + 13 d) + 2 d + (d + 1) K parameters for N patches of C channels, p pixels wide, L
    layers of width d and K classes. Dropout follows the patches, the attention and each half block.

    Args:
        in_channels, num_classes: numbers of input channels C and of classes K.

    Source: Dosovitskiy et al. 2021 (arXiv 2010.11929). The mean over the patches replaces the class token as in Beyer
    et al. 2022 (arXiv 2205.01580).
    """

    chosen_as = {"vit_tiny": Choice("vision transformer for 32x32 images: 4,027,786 parameters with 10 classes")}

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        image_size: int = option("pixels; 8 for dataset=digits", default=32, at_least=1),
        patch: int = option("side of a patch in pixels, a divisor of image_size", default=4, at_least=1),
        layers: int = option(default=9, at_least=1),
        heads: int = option("a divisor of the width", default=3, at_least=1),
        width: int = option("dimension of a patch's embedding", default=192, at_least=1),
        dropout: float = option("fraction of activations that is zeroed", default=0.0, at_least=0, below=1),
    ) -> None:
        super().__init__()
        self.image_size = image_size
        if image_size % patch:
            divisor = max(side for side in range(1, min(patch, image_size) + 1) if image_size % side == 0)
            raise ValueRefused("patch", f"a divisor of image_size={image_size}", patch, divisor)
        checked = blocks(layers, width, heads, causal=False, dropout=dropout)
        # in the order of the forward pass, because gradients become available in the reverse order
        self.patches = nn.Conv2d(in_channels, width, patch, stride=patch)
        self.position_embedding = nn.Parameter(torch.empty((image_size // patch) ** 2, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = checked
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)
        initialise_(self)
        nn.init.normal_(self.position_embedding, std=STD)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, num_classes] for images [B, C, image_size, image_size]."""
        patches = self.patches(x).flatten(2).transpose(1, 2)
        y = self.blocks(self.dropout(patches + self.position_embedding))
        return self.head(self.norm(y).mean(1))
