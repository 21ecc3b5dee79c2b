"""Pre-norm transformer blocks, shared by language and image models."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from accordion_bench.options.checks import ValueRefused

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
    """Return a sequence of `layers` blocks.

    Raises:
        ValueRefused: `heads` does not divide `width`.
    """
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
