"""GPT: a causal transformer for next-token prediction."""

import torch
from torch import Tensor, nn

from accordion_bench.models.transformer import blocks, initialise_
from accordion_bench.options import checks
from accordion_bench.options.option import Choice, option, with_options


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
