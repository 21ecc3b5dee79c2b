"""Pre-norm transformer blocks, and the language model (GPT) and the image model (ViT) that consist of them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.option import Choice, option, with_options

STD = 0.02  # standard deviation of initial weights, as in GPT-2


class SelfAttention(nn.Module):
    """softmax(Q K^T / sqrt(d / h)) V for each of h heads, concatenated, then a linear layer; Q, K, V = W x + b.

    Args:
        width: d, of a position.
        heads: h, a divisor of d.
        causal: whether a position attends only to itself and earlier ones.
        dropout: fraction of the attention weights that is zeroed.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.
    """

    def __init__(self, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, d] to [B, T, d]."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """x <- x + attention(norm(x));  x <- x + W2 gelu(W1 norm(x)), with a hidden width of 4 d.

    12 d^2 + 13 d parameters.

    Args:
        width, heads, causal: see `SelfAttention`.
        dropout: fraction of each summand of x, and of the attention weights, that is zeroed.
    """

    def __init__(self, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(width), SelfAttention(width, heads, causal, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.narrow(F.gelu(self.widen(self.mlp_norm(x)))))


def blocks(layers: int, width: int, heads: int, causal: bool, dropout: float) -> nn.Sequential:
    """Return a sequence of `layers` blocks; refuse `heads` that do not divide `width`."""
    if width % heads:
        divisor = max(d for d in range(1, heads) if width % d == 0)
        raise ValueRefused("heads", f"a divisor of width={width}", heads, divisor)
    return nn.Sequential(*(Block(width, heads, causal, dropout) for _ in range(layers)))


def initialise_(model: nn.Module) -> None:
    """Initialise weights from N(0, 0.02^2), biases with 0; output layers of the branches in L blocks: 0.02 / sqrt(2 L).

    Source: Radford et al. 2019 (GPT-2), section 2.3.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            nn.init.normal_(module.weight, std=STD)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)
    residual = [block for block in model.modules() if isinstance(block, Block)]
    for block in residual:
        for last in (block.attention.out, block.narrow):
            nn.init.normal_(last.weight, std=STD / math.sqrt(2 * len(residual)))


@with_options
class GPT(nn.Module):
    """logits_t = E norm(x_t), x = blocks(d(E[tokens] + P)), d dropout; the embedding E is also the output layer.

    V d + P d + L (12 d^2 + 13 d) + 2 d parameters for V symbols, P positions, L layers of width d. Dropout follows the
    embedding, the attention and each half block.

    Args:
        vocabulary: number of symbols, V.

    Source: Radford et al. 2019 (GPT-2), with the exact GELU.
    """

    task = "tokens"
    chosen_as = {
        "gpt_nano": Choice("a causal transformer in a size for CPUs: 858,880 parameters with bytes"),
        "gpt_small": Choice(
            "a causal transformer for one GPU: 10,844,160 parameters with bytes",
            {"layers": 6, "heads": 6, "width": 384},
        ),
        "gpt2": Choice(
            "GPT-2's smallest form: 86,039,040 parameters with bytes, 124,439,808 with its own 50,257 tokens",
            {"layers": 12, "heads": 12, "width": 768, "positions": 1024},
        ),
    }

    def __init__(
        self,
        vocabulary: int,
        layers: int = option(default=4, at_least=1),
        heads: int = option("a divisor of the width", default=4, at_least=1),
        width: int = option("dimension of the embedding", default=128, at_least=1),
        positions: int = option("maximum sequence length; dataset.context may be shorter", default=256, at_least=1),
        dropout: float = option("fraction of activations that is zeroed", default=0.0, at_least=0, below=1),
    ) -> None:
        super().__init__()
        checks.integer("vocabulary", vocabulary, at_least=2)
        self.positions = positions
        checked = blocks(layers, width, heads, causal=True, dropout=dropout)
        # in the order of the forward pass, because gradients become available in the reverse order
        self.embedding, self.position_embedding = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = checked
        self.norm = nn.LayerNorm(width)
        initialise_(self)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, T, vocabulary] of the symbol after each of tokens [B, T]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.position_embedding(positions))
        return self.output(self.norm(self.blocks(x)))


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
